"""POST /v1/audio/speech: one request from its body to its last byte. Knows no engine, only a `SpeechService`.

The status line waits for the first bytes of audio, so everything that goes wrong before them is a real status, unless the
operator wants headers early. A failure after them breaks the connection off, or is an event, so that nothing cut short looks
complete. A client that leaves ends the engine's work at once.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from duetts.audio.formats import FORMATS, SAMPLE_BYTES
from duetts.config import ServerConfig
from duetts.errors import CallerLeft
from duetts.server.body import FORM, JSON, read_body
from duetts.server.caller import Caller
from duetts.server.errors import error_body
from duetts.server.outcomes import Outcomes
from duetts.server.rendition import Rendition
from duetts.server.schemas import SpeechOrder, is_text, read_order, speech_schema
from duetts.service import SpeechService
from duetts.types import Outcome, Speech

MAX_LISTED = 64  # pieces in a header
WRITE_BYTES = 256 << 10  # at once, so that a slow reader can be told from one that has stopped
EVENTS_TYPE = "text/event-stream; charset=utf-8"
SILENCE_S = 10.0
KEEP_ALIVE = b": keep-alive\n\n"


def speech_router(service: SpeechService, config: ServerConfig, outcomes: Outcomes) -> APIRouter:
    """The route of speech."""
    router = APIRouter()
    schema = {"schema": speech_schema()}
    body = {"required": True, "content": {JSON: schema, FORM: schema}}
    types = [chosen.content_type.split(";")[0] for chosen in FORMATS.values()] + [EVENTS_TYPE.split(";")[0]]
    audio: dict[int | str, dict[str, Any]] = {200: {"content": {name: {} for name in types}, "description": "Speech."}}

    @router.post("/v1/audio/speech", response_class=Response, responses=audio, openapi_extra={"requestBody": body})
    async def speak(request: Request) -> Response:
        """Speak a text, whole or as a stream."""
        fields = await read_body(request, config.limits.max_body_bytes, is_text)
        order = read_order(fields, config, service.info.sample_rate, request.state.speech_id)
        return await answer(service, order, request.receive, outcomes, config.requests.early_headers)

    return router


class Listening:
    """Watches, from when the body has been read, whether the other side is still there. Close it at the end."""

    def __init__(self, receive: Receive) -> None:
        self.caller = Caller()
        self._watch = asyncio.ensure_future(self._wait_for_leaving(receive))

    async def _wait_for_leaving(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.caller.leave(CallerLeft("the client left"))

    def close(self) -> None:
        self._watch.cancel()


async def answer(
    service: SpeechService, order: SpeechOrder, receive: Receive, outcomes: Outcomes, early: bool = False
) -> Response:
    """The response to an order. A streamed one takes over what has to be closed, and waits for no audio if it is `early`."""
    early = early and order.delivery != "complete"
    async with AsyncExitStack() as closing:
        listening = Listening(receive)
        closing.callback(listening.close)
        opening = Rendition.open(order, service.start(order.request), listening.caller, outcomes, early=early)
        rendition = await closing.enter_async_context(await opening)
        headers = common_headers(order, rendition.speech)
        if not service.info.repeats:
            headers["X-Deterministic"] = "false"
        if order.delivery == "complete":
            body = await rendition.complete()
            return Response(body, 200, headers | _outcome_headers(rendition.outcome, rendition.output.duration_s))
        headers |= {"X-Accel-Buffering": "no"}
        if not early:
            headers["Server-Timing"] = f"ttfa;dur={1000 * rendition.first_audio_s:.1f}"
        if order.delivery == "audio":
            return Stream(headers, rendition, closing.pop_all())
        return EventStream(headers, rendition, closing.pop_all())


class Stream(Response):
    """A chunked body, one write a piece unless it is large. The terminating chunk is only sent when the pieces ended well."""

    def __init__(self, headers: dict[str, str], pieces: AsyncIterable[bytes], closing: AsyncExitStack) -> None:
        super().__init__(None, 200, headers)
        del self.headers["content-length"]
        self._pieces, self._closing = pieces, closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._closing:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._pieces:
                for start in range(0, len(data), WRITE_BYTES):
                    part = data[start : start + WRITE_BYTES]
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(kind: str, **fields: Any) -> bytes:
    """One event: its name, and its JSON on one line. The space after `data:` is there for clients that look for it."""
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


class EventStream(Response):
    """A delta for every piece of audio and a comment for every silence, then `done`, or `error` if the speech failed.
    `closing` is closed at the end."""

    def __init__(self, headers: dict[str, str], rendition: Rendition, closing: AsyncExitStack) -> None:
        super().__init__(None, 200, headers | {"Content-Type": EVENTS_TYPE})
        del self.headers["content-length"]
        self._rendition, self._closing = rendition, closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error that an event has told is raised after the end of the body, for the log."""
        failure: BaseException | None = None
        begun = False
        output = self._rendition.order.output
        shared = {"format": output.format, "sample_rate": output.sample_rate}
        async with self._closing, aclosing(_with_silences(aiter(self._rendition))) as items:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for item in items:
                if isinstance(item, BaseException):
                    failure = item
                    body = event("error", **error_body(item, scope["state"]["request_id"]), partial_audio=begun)
                elif item is None:
                    body = KEEP_ALIVE
                else:
                    begun = True
                    body = event("speech.audio.delta", audio=base64.b64encode(item).decode(), **shared)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            last = event("speech.audio.done", **self._rendition.summary()) if failure is None else b""
            await send({"type": "http.response.body", "body": last, "more_body": False})
            if failure is not None:
                raise failure


async def _with_silences(audio: AsyncIterator[bytes]) -> AsyncGenerator[bytes | BaseException | None, None]:
    """The pieces of audio, None for every `SILENCE_S` without one, and an error of theirs as the last item."""
    while True:
        task = asyncio.ensure_future(_next(audio))
        try:
            while not (await asyncio.wait({task}, timeout=SILENCE_S))[0]:
                yield None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        error = task.exception()
        if isinstance(error, CallerLeft):
            raise error
        if error is not None:
            yield error
            return
        if task.result() is None:
            return
        yield task.result()


async def _next(audio: AsyncIterator[bytes]) -> bytes | None:
    """None at the end: a StopAsyncIteration cannot leave a task."""
    return await anext(audio, None)


def common_headers(order: SpeechOrder, speech: Speech) -> dict[str, str]:
    """The headers of every audio answer."""
    chosen, rate = FORMATS[order.output.format], order.output.sample_rate
    headers = {
        "Content-Type": chosen.content_type.format(rate=rate),
        "Cache-Control": "no-store",
        "X-Speech-Id": speech.request_id,
        "X-Sample-Rate": str(rate),
        "X-Channels": "1",
        "X-Model": quote(order.model, safe="/:@+"),
        "X-Seed": str(speech.seed),
        "X-Input-Tokens": str(speech.input_tokens),
        "X-Input-Characters": str(len(order.request.text)),
        "X-Pieces": str(speech.num_pieces),
    }
    if speech.voice:
        headers["X-Voice-Resolved"] = quote(speech.voice, safe=" ")
    if speech.reference_hit is not None:
        headers["X-Reference-Cache"] = "hit" if speech.reference_hit else "miss"
    if order.delivery != "sse":
        headers["Content-Disposition"] = f'inline; filename="speech.{chosen.name}"'
    if not chosen.codec:
        headers["X-Bit-Depth"] = str(8 * SAMPLE_BYTES)
    if speech.warnings:
        headers["X-Warnings"] = ", ".join(speech.warnings)
    if order.ignored:
        headers["X-Ignored-Fields"] = ", ".join(order.ignored)
    return headers


def _shortened(items: list[str]) -> list[str]:
    """The first of many, so that a header stays short."""
    return items if len(items) <= MAX_LISTED else [*items[:MAX_LISTED], "..."]


def _outcome_headers(outcome: Outcome, duration_s: float) -> dict[str, str]:
    """What is known when the speech has ended."""
    timings = outcome.timings
    spans = {
        "queue": timings.queue_s,
        "prefill": timings.prefill_s,
        "ttfa": timings.first_audio_s,
        "total": timings.total_s,
    }
    headers = {
        "Server-Timing": ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in spans.items()),
        "X-Output-Tokens": str(outcome.num_frames),
        "X-Finish-Reason": outcome.reason,
        "X-Audio-Duration": f"{duration_s:.6f}",
        "X-RTF": f"{timings.total_s / duration_s:.4f}",
    }
    redone = [str(index) for index in outcome.pieces.redone]
    suspect = [f"{piece.index}={piece.why}" for piece in outcome.pieces.suspect]
    lists = {"X-Pieces-Retried": redone, "X-Pieces-Suspect": suspect}
    return headers | {name: ", ".join(_shortened(items)) for name, items in lists.items() if items}
