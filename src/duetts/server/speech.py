"""POST /v1/audio/speech: one request from its body to its last byte. Knows no engine, only a `SpeechService`.

The status line waits for the first bytes of audio, so everything that goes wrong before them is a real status. A failure after
them breaks the connection off, or is an event, so that nothing cut short looks complete. A client that leaves ends the engine's
work at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from duetts.audio.encode import with_exact_sizes
from duetts.audio.formats import FORMATS, SAMPLE_BYTES
from duetts.audio.output import OutputStream
from duetts.config import ServerConfig
from duetts.errors import EmptyGeneration
from duetts.server.body import FORM, JSON, read_body
from duetts.server.events import CONTENT_TYPE, EventStream
from duetts.server.schemas import SpeechOrder, is_text, read_order, speech_schema
from duetts.types import Chunk, Outcome, Speech, SpeechService

T = TypeVar("T")
log = logging.getLogger("duetts.server")


def speech_router(service: SpeechService, config: ServerConfig) -> APIRouter:
    """The route of speech."""
    router = APIRouter()
    schema = {"schema": speech_schema()}
    body = {"required": True, "content": {JSON: schema, FORM: schema}}
    types = [chosen.content_type.split(";")[0] for chosen in FORMATS.values()] + [CONTENT_TYPE.split(";")[0]]
    audio: dict[int | str, dict[str, Any]] = {200: {"content": {name: {} for name in types}, "description": "Speech."}}

    @router.post("/v1/audio/speech", response_class=Response, responses=audio, openapi_extra={"requestBody": body})
    async def speak(request: Request) -> Response:
        """Speak a text, whole or as a stream."""
        fields = await read_body(request, config.limits.max_body_bytes, is_text)
        order = read_order(fields, config, service.info.sample_rate, request.state.speech_id)
        return await _answer(service, order, Client(request.receive))

    return router


class Client:
    """Whether the other side is still there, watched from when the body has been read. Close it at the end."""

    def __init__(self, receive: Receive) -> None:
        self._left = asyncio.ensure_future(_wait_for_leaving(receive))

    async def unless_left(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work, which is cancelled if the client leaves. Then raises `ClientDisconnect`."""
        if self._left.done():  # work that never has to wait would win every race below
            work.close()
            raise ClientDisconnect
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        self._left.cancel()


async def _wait_for_leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(service: SpeechService, order: SpeechOrder, client: Client) -> Response:
    """The response to an order. A streamed one takes over what has to be closed."""
    started_s = time.perf_counter()
    async with AsyncExitStack() as closing:
        closing.callback(client.close)
        speech = await client.unless_left(service.start(order.request))
        closing.push_async_callback(speech.aclose)
        output = OutputStream(order.output, speech.sample_rate)
        closing.callback(output.close)
        audio = _audio(speech, output, client)
        closing.push_async_callback(audio.aclose)
        first = await anext(audio)
        if order.delivery == "complete":
            return await _complete(order, speech, output, first, audio)
        timing = {"Server-Timing": f"ttfa;dur={1000 * (time.perf_counter() - started_s):.1f}", "X-Accel-Buffering": "no"}
        headers = _common_headers(order, speech) | timing
        rest = _after(first, audio)
        if order.delivery == "audio":
            return AudioStream(headers, rest, closing.pop_all(), lambda: _ended(speech))
        shared = {"format": order.output.format, "sample_rate": order.output.sample_rate}
        return EventStream(headers, rest, closing.pop_all(), shared, lambda: _done(speech, output))


async def _next_chunk(speech: Speech) -> Chunk | None:
    """None at the end: a StopAsyncIteration cannot leave a task."""
    return await anext(aiter(speech), None)


async def _audio(speech: Speech, output: OutputStream, client: Client) -> AsyncGenerator[bytes, None]:
    """The bytes of the answer, a piece for each chunk that gave any, none of them empty. There is at least one."""
    while (chunk := await client.unless_left(_next_chunk(speech))) is not None:
        if data := await _encoded(output, output.write, chunk.pcm):
            yield data
    last = await _encoded(output, output.finish)
    if not output.num_samples:
        raise EmptyGeneration("the speech ended without audio")
    if last:
        yield last


async def _encoded(output: OutputStream, call: Callable[..., bytes], *pcm: bytes) -> bytes:
    """What a call of the output gives, from another thread if it takes long: 16 frames of MP3 are 11 ms."""
    return call(*pcm) if output.plain else await asyncio.to_thread(call, *pcm)


async def _after(first: bytes, audio: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for data in audio:
        yield data


async def _complete(
    order: SpeechOrder, speech: Speech, output: OutputStream, first: bytes, audio: AsyncGenerator[bytes, None]
) -> Response:
    stream = b"".join([first, *[data async for data in audio]])
    body = with_exact_sizes(order.output.format, order.output.sample_rate, stream)
    headers = _common_headers(order, speech) | _outcome_headers(_ended(speech), output.duration_s)
    return Response(body, 200, headers)


class AudioStream(Response):
    """A chunked body, one write a piece. The terminating chunk is only sent when the speech ended well."""

    def __init__(
        self,
        headers: dict[str, str],
        audio: AsyncGenerator[bytes, None],
        closing: AsyncExitStack,
        ended: Callable[[], Outcome],
    ) -> None:
        super().__init__(None, 200, headers)
        del self.headers["content-length"]
        self._audio, self._closing, self._ended = audio, closing, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._closing:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._audio:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            self._ended()
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _ended(speech: Speech) -> Outcome:
    """The outcome of a speech that came to its end; logs it."""
    assert speech.outcome is not None, "a speech that ended has an outcome"
    outcome = speech.outcome
    log.info("%s: %s after %d frames, %.2f s", speech.request_id, outcome.reason, outcome.num_frames, outcome.timings.total_s)
    return outcome


def _done(speech: Speech, output: OutputStream) -> dict[str, Any]:
    """The fields of the last event."""
    outcome = _ended(speech)
    audio_tokens = speech.input_audio_tokens
    details = {"text_tokens": speech.input_tokens - audio_tokens, "audio_tokens": audio_tokens}
    usage = {
        "input_tokens": speech.input_tokens,
        "output_tokens": outcome.num_frames,
        "total_tokens": speech.input_tokens + outcome.num_frames,
        "input_token_details": details,
    }
    return {"usage": usage, "finish_reason": outcome.reason, "duration": round(output.duration_s, 6)}


def _common_headers(order: SpeechOrder, speech: Speech) -> dict[str, str]:
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
    }
    if order.delivery != "sse":
        headers["Content-Disposition"] = f'inline; filename="speech.{chosen.name}"'
    if not chosen.codec:
        headers["X-Bit-Depth"] = str(8 * SAMPLE_BYTES)
    if order.ignored:
        headers["X-Ignored-Fields"] = ", ".join(order.ignored)
    return headers


def _outcome_headers(outcome: Outcome, duration_s: float) -> dict[str, str]:
    """What is known when the speech has ended."""
    timings = outcome.timings
    spans = {
        "queue": timings.queue_s,
        "prefill": timings.prefill_s,
        "ttfa": timings.first_audio_s,
        "total": timings.total_s,
    }
    return {
        "Server-Timing": ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in spans.items()),
        "X-Output-Tokens": str(outcome.num_frames),
        "X-Finish-Reason": outcome.reason,
        "X-Audio-Duration": f"{duration_s:.6f}",
        "X-RTF": f"{timings.total_s / duration_s:.4f}",
    }
