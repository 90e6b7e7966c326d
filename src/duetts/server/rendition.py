"""One order while it is spoken: from the synthesizer's chunks to the bytes of its output. Every door speaks through here.
Knows no HTTP and no sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict
from types import TracebackType
from typing import Any

import numpy as np

from duetts.audio.encode import with_exact_sizes
from duetts.audio.output import OutputStream
from duetts.errors import EmptyGeneration
from duetts.server.caller import Caller
from duetts.server.outcomes import Outcomes, usage_of
from duetts.server.schemas import SpeechOrder
from duetts.types import Chunk, Int32, Outcome, Speech

log = logging.getLogger("duetts.server")


class Rendition:
    """A speech that has begun: iterate for its bytes, a piece for each chunk that gave any. Use it as a context manager, which
    ends the engine's work and keeps the outcome."""

    def __init__(
        self, order: SpeechOrder, speech: Speech, output: OutputStream, audio: AsyncGenerator[bytes, None], codes: list[Int32]
    ) -> None:
        self.order = order
        self.speech = speech
        self.output = output
        self.first_audio_s = 0.0  # from the order to the first bytes, if they were waited for
        self._audio = audio
        self._first = b""
        self._codes = codes
        self._closing = AsyncExitStack()

    @classmethod
    async def open(
        cls,
        order: SpeechOrder,
        starting: Coroutine[Any, Any, Speech],
        caller: Caller,
        outcomes: Outcomes,
        *,
        early: bool = False,
    ) -> Rendition:
        """Waits for the first bytes, so that everything that goes wrong before them is raised here. They are never empty.
        `early`: waits only until the speech may begin."""
        began = time.perf_counter()
        async with AsyncExitStack() as closing:
            entry = outcomes.begin(order.request.request_id, caller, listened=order.request.streaming)
            closing.push(entry.end)
            speech = entry.speech = await caller.unless_gone(starting)
            closing.push_async_callback(speech.aclose)
            output = entry.output = OutputStream(order.output, speech.sample_rate)
            closing.callback(output.close)
            audio = _audio(speech, output, caller, entry.take)
            closing.push_async_callback(audio.aclose)
            rendition = cls(order, speech, output, audio, entry.codes)
            if not early:
                rendition._first = await anext(audio)
                rendition.first_audio_s = time.perf_counter() - began
            rendition._closing = closing.pop_all()
        return rendition

    async def __aenter__(self) -> Rendition:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._closing.__aexit__(kind, error, trace)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Once."""
        if self._first:
            yield self._first
        async for data in self._audio:
            yield data

    async def complete(self) -> bytes:
        """All bytes, as a file that states its sizes."""
        stream = b"".join([data async for data in self])
        return with_exact_sizes(self.order.output.format, self.order.output.sample_rate, stream)

    @property
    def outcome(self) -> Outcome:
        """How the speech ended, after its last bytes."""
        assert self.speech.outcome is not None, "a speech that ended has an outcome"
        return self.speech.outcome

    @property
    def codes(self) -> Int32:
        """int32 [codebooks, frames] of what was spoken so far."""
        return np.concatenate(self._codes, axis=1)

    def summary(self) -> dict[str, Any]:
        """What every door tells of a speech that has ended. The duration is in seconds, of the output."""
        outcome = self.outcome
        return {
            "usage": usage_of(self.speech, outcome.num_frames),
            "finish_reason": outcome.reason,
            "duration": round(self.output.duration_s, 6),
            "pieces": asdict(outcome.pieces),
        }


async def _audio(
    speech: Speech, output: OutputStream, caller: Caller, take: Callable[[Int32], None]
) -> AsyncGenerator[bytes, None]:
    """The bytes of the output, none of the pieces empty. There is at least one."""
    while (chunk := await caller.unless_gone(_next_chunk(speech))) is not None:
        take(chunk.codes)
        if data := await _encoded(output, output.write, chunk.pcm):
            yield data
    last = await _encoded(output, output.finish)
    if not output.num_samples:
        raise EmptyGeneration("the speech ended without audio")
    outcome = speech.outcome
    assert outcome is not None, "a speech that ended has an outcome"
    pieces = outcome.pieces
    log.info("%s: %s after %d frames, %.2f s; %d of %d pieces, redone %s, suspect %s", speech.request_id, outcome.reason,
             outcome.num_frames, outcome.timings.total_s, pieces.spoken, pieces.total, list(pieces.redone),
             [f"{piece.index}: {piece.why}" for piece in pieces.suspect])  # fmt: skip
    if last:
        yield last


async def _next_chunk(speech: Speech) -> Chunk | None:
    """None at the end: a StopAsyncIteration cannot leave a task."""
    return await anext(aiter(speech), None)


async def _encoded(output: OutputStream, call: Callable[..., bytes], *pcm: bytes) -> bytes:
    """What a call of the output gives, from another thread if it takes long: 16 frames of MP3 are 11 ms."""
    return call(*pcm) if output.plain else await asyncio.to_thread(call, *pcm)
