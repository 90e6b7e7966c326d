"""The pieces of one request, spoken one after another as one speech. It knows prompts as a function, no tokenizer, no torch.

**In order.** A piece is spoken after the one before it, because its prompt holds that one's text and codes: voice and pace
carry on. Text and codes go in together or not at all, as nobody knows which frame ends which word: if they do not fit, nothing
is in their place, and if that piece was bad, the last good one; the reference always stays.

**No gap.** A piece is submitted when the last chunk of the one before it arrives, not when somebody has read it. The engine
makes audio faster than it is played, at a real-time factor r, so after a piece of d seconds the listener has about (1 - r) d
in hand, and the next piece's first chunk needs less: at r = 0.5 a piece of 10 s leaves 5 s for what takes a few tenths. The
engine is told of that lead and owes the new piece no hurry. If a listener takes what is made slowly, at most `READ_AHEAD_S`
and one piece wait for it.

**Seeds.** Piece k has the request's seed + k times the golden ratio's odd 64-bit constant, modulo 2^64; a second try the same
with the lowest bit changed. So a seed gives the same bytes, streamed or complete, unless a complete answer had a bad piece.

**Checks.** A piece is bad if it was ended by its bound or lasts less than its text can (`rules.least_seconds`). If nothing of
it has been sent it has a second try, and of two bad tries the one nearer to its text's natural length in proportion is kept.
What has been sent cannot be taken back: a stream's chunks leave as they are made, so there only a piece that came to nothing
is tried again, the others are reported. The checks are the caller's choice; a second try for nothing at all is always made.

**The end.** "length" if any piece was ended by its bound or the request's own frames are used up, else "stop". A piece that
fails ends the request with its error.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from duetts.engine.playout import Playout
from duetts.errors import DeadlineExceeded, DuettsError, EmptyGeneration, EngineFailure, Overloaded
from duetts.text.prompt import Turn
from duetts.text.rules import least_seconds
from duetts.types import Chunk, FinishReason, Int32, Outcome, Pieces, Said, Speaker, SpeechRequest, Suspect, Timings, Utterance

Flaw = Literal["too_short", "length"]

READ_AHEAD_S = 10.0  # the next piece waits while so much is made and not read
BRIDGE_S = 0.005
SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the text, and the most frames that its speech may take by itself."""

    text: str
    max_frames: int


@dataclass(frozen=True, slots=True)
class Script:
    """What is spoken: the pieces, the first one's utterance, and the prompt of any other, from history and text.

    `max_frames` bounds the whole request and replaces the pieces' own bounds. `checked` says whether bad pieces are looked for,
    `conditioned` whether a piece's prompt holds the one before. The first piece `continues` what was said before, if anything.
    """

    pieces: Sequence[Piece]
    first: Utterance
    prompt: Callable[[Sequence[Turn], str], Int32]
    input_tokens: int
    max_frames: int | None = None
    checked: bool = True
    conditioned: bool = True
    continues: Said | None = None


@dataclass(frozen=True, slots=True)
class _Try:
    """What came of a piece, and when it was begun, in seconds since the request was."""

    began_s: float
    chunks: list[Chunk]
    outcome: Outcome

    @property
    def is_empty(self) -> bool:
        return isinstance(self.outcome.error, EmptyGeneration)

    def codes(self) -> Int32:
        return np.concatenate([chunk.codes for chunk in self.chunks], axis=1)


class Narration:
    """One request while it is spoken. `speak` runs it once."""

    def __init__(self, speaker: Speaker, script: Script) -> None:
        self._speaker, self._script = speaker, script
        self._frame_s = speaker.info.frame_length / speaker.info.sample_rate
        self._playout = Playout(self._frame_s)
        self._items: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._read = asyncio.Event()
        self._unread = 0  # frames
        self._began = 0.0
        self._idle_s = 0.0  # spent waiting for a slow listener, which is not the request's time
        self._num_frames = 0
        self._spoken = 0
        self._opening: tuple[float, _Try] | None = None  # seconds in line, and the kept try of the first piece
        self._redone: list[int] = []
        self._suspect: list[Suspect] = []
        said = script.continues
        self._history = [Turn(said.text, said.codes)] if said and script.conditioned and said.codes.shape[1] else []
        # Of the piece before, until the next one has been joined to it.
        self._last_sample = said.last_sample if said else None

    async def speak(self) -> AsyncGenerator[Chunk | Outcome, None]:
        """Chunks in order, then the outcome of the request. Closing it cancels what runs. Raises what a speaker raises."""
        task = asyncio.create_task(self._run())
        task.add_done_callback(self._end)
        try:
            while (chunk := await self._items.get()) is not None:
                self._unread -= chunk.num_frames
                self._read.set()
                yield chunk
            yield task.result()
        finally:
            task.cancel()  # not awaited: a caller that was cancelled may close this at once again

    def _end(self, task: asyncio.Task[Outcome]) -> None:
        if not task.cancelled():
            task.exception()  # seen, also when nobody reads on
        self._items.put_nowait(None)

    async def _run(self) -> Outcome:
        self._began = time.monotonic()
        if self._script.continues is not None:
            self._playout.began = max(self._began, self._script.continues.heard_at)
        reason: FinishReason = "stop"
        for index in range(len(self._script.pieces)):
            await self._wait_for_reader()
            if self._frames_left(index) == 0:
                return self._outcome("length")
            if index and self._seconds_left() == 0:
                return self._outcome("timeout")
            kept = await self._speak_piece(index)
            if kept.outcome.error is not None:
                return self._outcome(kept.outcome.reason, kept.outcome.error)
            self._settle(index, kept)
            if kept.outcome.reason == "length":
                reason = "length"
        return self._outcome(reason)

    async def _speak_piece(self, index: int) -> _Try:
        """The better of at most two tries."""
        script = self._script
        holds = script.checked and not script.first.streaming
        utterance = script.first if index == 0 and script.continues is None else self._utterance(index)
        kept = first = await self._try(utterance, send=not holds)
        if (first.is_empty or (holds and self._flaw(index, first))) and self._seconds_left() != 0:
            self._redone.append(index)
            kept = self._better(index, first, await self._try(self._again(utterance), send=not holds))
        if index == 0:
            self._opening = first.outcome.timings.queue_s, kept
        if holds and kept.outcome.error is None:
            for chunk in kept.chunks:
                self._send(chunk)
        return kept

    async def _try(self, utterance: Utterance, *, send: bool) -> _Try:
        began_s = time.monotonic() - self._began
        chunks: list[Chunk] = []
        async with aclosing(self._speaker.speak(utterance)) as items:
            async for item in items:
                if isinstance(item, Outcome):
                    return _Try(began_s, chunks, item)
                chunks.append(item)
                if send:
                    self._send(item)
        raise EngineFailure("an utterance ended without an outcome")

    def _utterance(self, index: int) -> Utterance:
        """Of a piece that goes on from another one."""
        script, text, max_frames = self._script, self._script.pieces[index].text, self._frames_left(index)
        prompt = script.prompt(self._history, text)
        if prompt.shape[1] + max_frames > self._speaker.info.max_model_len:
            prompt = script.prompt([], text)
        seed = piece_seed(script.first.seed, index)
        return replace(self._continued(script.first), prompt=prompt, seed=seed, max_frames=max_frames)

    def _again(self, utterance: Utterance) -> Utterance:
        return replace(self._continued(utterance), seed=utterance.seed ^ 1)

    def _continued(self, utterance: Utterance) -> Utterance:
        lead_s = self._playout.buffer_s(time.monotonic()) if utterance.streaming else 0.0
        return replace(utterance, continues=True, lead_s=max(0.0, lead_s), timeout_s=self._seconds_left())

    def _settle(self, index: int, kept: _Try) -> None:
        """Counts a piece that is spoken, and keeps what the next one needs of it."""
        self._spoken += 1
        self._num_frames += kept.outcome.num_frames
        flaw = self._flaw(index, kept)
        if flaw is not None:
            self._suspect.append(Suspect(index, flaw))
        self._last_sample = int(np.frombuffer(kept.chunks[-1].pcm, "<i2")[-1])
        if flaw is None and self._script.conditioned:
            self._history = [Turn(self._script.pieces[index].text, kept.codes())]

    def _flaw(self, index: int, spoken: _Try) -> Flaw | None:
        if not self._script.checked or spoken.outcome.error is not None:
            return None
        if spoken.outcome.reason == "length":
            return "length"
        seconds = spoken.outcome.num_frames * self._frame_s
        return "too_short" if seconds < least_seconds(self._script.pieces[index].text) else None

    def _better(self, index: int, first: _Try, second: _Try) -> _Try:
        if second.outcome.error is not None:
            return first if second.is_empty and not first.is_empty else second
        if first.is_empty or self._flaw(index, second) is None:
            return second
        return min(first, second, key=lambda spoken: self._distance(index, spoken))

    def _distance(self, index: int, spoken: _Try) -> float:
        """How far a try is from the natural length of its text, about twice the least, as a logarithm of the proportion."""
        natural_s = max(2 * least_seconds(self._script.pieces[index].text), self._frame_s)
        return abs(math.log(spoken.outcome.num_frames * self._frame_s / natural_s))

    # -- towards the listener ------------------------------------------------------------------------------------------

    def _send(self, chunk: Chunk) -> None:
        if self._last_sample is not None:
            samples = round(BRIDGE_S * self._speaker.info.sample_rate)
            chunk = replace(chunk, pcm=bridge(chunk.pcm, self._last_sample, samples))
            self._last_sample = None
        self._playout.hand_over(chunk.num_frames, time.monotonic())
        self._unread += chunk.num_frames
        self._items.put_nowait(chunk)

    async def _wait_for_reader(self) -> None:
        waits_from = time.monotonic()
        while self._script.first.streaming and self._unread * self._frame_s > READ_AHEAD_S:
            self._read.clear()
            await self._read.wait()
        self._idle_s += time.monotonic() - waits_from

    # -- what is left, and what came of it -------------------------------------------------------------------------------

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began - self._idle_s

    def _seconds_left(self) -> float | None:
        limit = self._script.first.timeout_s
        return None if limit is None else max(0.0, limit - self._elapsed_s())

    def _frames_left(self, index: int) -> int:
        """The bound of a piece: its own, or what is left of the request's."""
        own = self._script.max_frames
        return self._script.pieces[index].max_frames if own is None else own - self._num_frames

    def _outcome(self, reason: FinishReason, error: DuettsError | None = None) -> Outcome:
        if reason == "timeout":
            error = DeadlineExceeded(f"the request's limit of {self._script.first.timeout_s} s has passed")
        pieces = Pieces(len(self._script.pieces), self._spoken, tuple(self._redone), tuple(self._suspect))
        return Outcome(reason, self._num_frames, self._script.input_tokens, self._timings(), error, pieces, self._said())

    def _said(self) -> Said | None:
        """For a request that goes on from this one; what was said before it if it came to nothing."""
        if not self._spoken or self._last_sample is None:
            return self._script.continues
        text, codes = "", np.zeros((self._speaker.info.num_codebooks, 0), np.int32)
        if self._history:
            text, codes = self._history[-1].text, self._history[-1].codes
        now = time.monotonic()
        seed = piece_seed(self._script.first.seed, len(self._script.pieces))
        return Said(text, codes, seed, self._last_sample, now + self._playout.buffer_s(now))

    def _timings(self) -> Timings:
        if self._opening is None:
            return Timings(total_s=self._elapsed_s())
        queue_s, kept = self._opening
        timings = kept.outcome.timings
        return Timings(
            queue_s,
            kept.began_s + timings.prefill_s,
            kept.began_s + timings.first_audio_s,
            self._elapsed_s(),
            self._playout.worst_underrun_s,
        )


def check_room(speaker: Speaker, request: SpeechRequest) -> None:
    """To be asked before clips are fetched and read: a look, no promise. Raises `Overloaded` if there is no place now."""
    figures = speaker.stats()
    if request.continues is None and figures.get("full", False) and figures.get("alive", True):
        wait_s = max(1.0, figures.get("retry_after_s", 1.0))
        raise Overloaded("every place is taken; no clip was read", retry_after_s=wait_s)


def piece_seed(seed: int, index: int) -> int:
    """The seed of a piece, a signed 64-bit integer; the first one's is the request's own."""
    return (seed + index * SEED_STEP + 2**63) % 2**64 - 2**63


def bridge(pcm: bytes, before: int, samples: int) -> bytes:
    """PCM that begins at the value `before` and is itself again after so many samples, on half a cosine; as long as it was.

    Every piece is decoded from silence, so its first sample need not follow from the last one before it. What has been sent
    cannot be faded out any more, hence the whole step is taken back on this side: where both sides are quiet nothing changes.
    """
    wave = np.frombuffer(pcm, "<i2").astype(np.float64)
    span = min(samples, len(wave))
    wave[:span] += (before - wave[0]) * (0.5 + 0.5 * np.cos(np.pi * np.arange(span) / span))
    return np.clip(np.rint(wave), -32768, 32767).astype("<i2").tobytes()
