"""POST /v1/audio/speech: one request from its body to its last byte. Knows no engine, only a `SpeechService`.

The status line waits for the first chunk of audio, so everything that goes wrong before it is a real status. A failure after
it breaks the connection off, so that nothing cut short looks complete. A client that leaves ends the engine's work at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from duetts.audio.encode import SAMPLE_BYTES, find_format, open_encoder
from duetts.config import ServerConfig
from duetts.errors import EmptyGeneration
from duetts.server.body import FORM, JSON, read_body
from duetts.server.schemas import SpeechOrder, is_text, read_order, speech_schema
from duetts.types import Chunk, Outcome, Speech, SpeechService

T = TypeVar("T")
log = logging.getLogger("duetts.server")


def speech_router(service: SpeechService, config: ServerConfig) -> APIRouter:
    """The route of speech."""
    router = APIRouter()
    schema = {"schema": speech_schema()}
    body = {"required": True, "content": {JSON: schema, FORM: schema}}
    audio: dict[int | str, dict[str, Any]] = {200: {"content": {"audio/wav": {}, "audio/pcm": {}}, "description": "Speech."}}

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
        first = await client.unless_left(_next_chunk(speech))
        if first is None:
            raise EmptyGeneration("the speech ended without audio")
        chunks = _chunks(speech, first, client)
        if not order.streaming:
            return await _complete(order, speech, chunks)
        first_audio_ms = 1000 * (time.perf_counter() - started_s)
        return AudioStream(order, speech, chunks, closing.pop_all(), first_audio_ms)


async def _next_chunk(speech: Speech) -> Chunk | None:
    """None at the end: a StopAsyncIteration cannot leave a task."""
    return await anext(aiter(speech), None)


async def _chunks(speech: Speech, first: Chunk, client: Client) -> AsyncIterator[Chunk]:
    chunk: Chunk | None = first
    while chunk is not None:
        yield chunk
        chunk = await client.unless_left(_next_chunk(speech))


async def _complete(order: SpeechOrder, speech: Speech, chunks: AsyncIterator[Chunk]) -> Response:
    pcm = b"".join([chunk.pcm async for chunk in chunks])
    num_samples = len(pcm) // SAMPLE_BYTES
    encoder = open_encoder(order.response_format, speech.sample_rate, num_samples=num_samples)
    headers = _common_headers(order, speech) | _outcome_headers(_ended(speech), num_samples / speech.sample_rate)
    return Response(encoder.write(pcm) + encoder.finish(), 200, headers)


class AudioStream(Response):
    """A chunked body, one write a chunk. The terminating chunk is only sent when the speech ended well."""

    def __init__(
        self,
        order: SpeechOrder,
        speech: Speech,
        chunks: AsyncIterator[Chunk],
        closing: AsyncExitStack,
        first_audio_ms: float,
    ) -> None:
        timing = {"Server-Timing": f"ttfa;dur={first_audio_ms:.1f}", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, _common_headers(order, speech) | timing)
        del self.headers["content-length"]
        self._encoder = open_encoder(order.response_format, speech.sample_rate)
        self._speech, self._chunks, self._closing = speech, chunks, closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._closing:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": self._encoder.write(chunk.pcm), "more_body": True})
            _ended(self._speech)
            await send({"type": "http.response.body", "body": self._encoder.finish(), "more_body": False})


def _ended(speech: Speech) -> Outcome:
    """The outcome of a speech that came to its end; logs it."""
    assert speech.outcome is not None, "a speech that ended has an outcome"
    outcome = speech.outcome
    log.info("%s: %s after %d frames, %.2f s", speech.request_id, outcome.reason, outcome.num_frames, outcome.timings.total_s)
    return outcome


def _common_headers(order: SpeechOrder, speech: Speech) -> dict[str, str]:
    """The headers of every audio answer."""
    chosen = find_format(order.response_format)
    headers = {
        "Content-Type": chosen.content_type.format(rate=speech.sample_rate),
        "Content-Disposition": f'inline; filename="speech.{chosen.extension}"',
        "Cache-Control": "no-store",
        "X-Speech-Id": speech.request_id,
        "X-Sample-Rate": str(speech.sample_rate),
        "X-Channels": "1",
        "X-Bit-Depth": str(8 * SAMPLE_BYTES),
        "X-Model": quote(order.model, safe="/:@+"),
        "X-Seed": str(speech.seed),
        "X-Input-Tokens": str(speech.input_tokens),
    }
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
