"""The life of one utterance inside the engine: its places, its progress, its times. No torch."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field

import numpy as np

from duetts.engine.pages import Block, pages_for
from duetts.engine.playout import Playout
from duetts.engine.stream import Channel
from duetts.errors import Aborted, DeadlineExceeded, DuettsError, EmptyGeneration, EngineFailure
from duetts.types import FinishReason, Int32, Outcome, Timings, Utterance

log = logging.getLogger(__name__)
_arrivals = itertools.count()


@dataclass(slots=True, eq=False)
class Sequence:
    """One utterance. The loop writes it until it has `finished`, then the codec; callers only set `cancelled`.

    Frames are counted three times: `launched` to the device, `settled` when their codes are read, and handed to the listener.
    After a preemption they are launched and settled anew; `frames` keeps those that are known.
    """

    utterance: Utterance
    channel: Channel
    playout: Playout
    blocks: list[Block] = field(default_factory=list)
    submitted: float = field(default_factory=time.monotonic)
    arrival: int = field(default_factory=lambda: next(_arrivals))
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    run: int = 0  # counts preemptions: what was launched in an earlier run is of no use
    displaced: int = 0  # preemptions for a listener's sake
    num_blocks: int = 0  # of `blocks`, read
    launched: int = 0
    settled: int = 0
    frames: list[Int32] = field(default_factory=list)  # columns [1 + codebooks], token first
    repeats: int = 0  # of the last semantic token
    served: float = 0.0  # when the last frame was launched
    cancelled: bool = False
    failure: DuettsError | None = None
    finished: FinishReason | None = None
    admitted_at: float | None = None
    read_at: float | None = None
    first_audio_at: float | None = None

    @property
    def streaming(self) -> bool:
        return self.utterance.streaming

    @property
    def prompt_length(self) -> int:
        return int(self.utterance.prompt.shape[1])

    @property
    def num_frames(self) -> int:
        return len(self.frames)

    @property
    def is_read(self) -> bool:
        """Whether all blocks are in the cache, so that frames can be drawn."""
        return self.num_blocks == len(self.blocks)

    @property
    def position(self) -> int:
        """Where the next launched step's input goes. The last prompt position is stepped from, not read with the blocks."""
        return self.prompt_length - 1 + self.launched

    @property
    def most_pages(self) -> int:
        """Pages that it may come to need."""
        return pages_for(self.prompt_length + self.utterance.max_frames)

    def keep(self, column: Int32) -> None:
        """A new frame is known."""
        self.repeats = self.repeats + 1 if self.frames and self.frames[-1][0] == column[0] else 0
        self.frames.append(column)
        self.settled += 1

    @property
    def is_over(self) -> bool:
        """Whether its bound is reached, or it says the same for ever."""
        utterance = self.utterance
        return self.num_frames >= utterance.max_frames or 0 < utterance.max_repeats <= self.repeats

    def columns(self) -> Int32:
        """Prompt and known frames [1 + codebooks, positions]."""
        if not self.frames:
            return self.utterance.prompt
        return np.concatenate((self.utterance.prompt, np.stack(self.frames, axis=1)), axis=1)

    def expired(self, now: float) -> bool:
        limit = self.utterance.timeout_s
        return limit is not None and now - self.submitted > limit

    def verdict(self, now: float) -> FinishReason | None:
        """Why the sequence must end before its next step, or None."""
        if self.failure is not None:
            return "failed"
        if self.cancelled:
            return "aborted"
        return "timeout" if self.expired(now) else None

    def fail(self, error: Exception) -> None:
        """Records, from either thread, why the sequence cannot go on: `verdict` and `outcome` follow it."""
        if isinstance(error, DuettsError):  # it says all there is to say
            log.error("request %s failed: %s", self.utterance.request_id, error)
        else:
            log.error("request %s failed", self.utterance.request_id, exc_info=error)
        known = error if isinstance(error, DuettsError) else EngineFailure(f"a step failed: {type(error).__name__}")
        self.failure = self.failure or known

    def outcome(self, now: float) -> Outcome:
        """What the caller is told; call it when the last audio is out."""
        assert self.finished is not None, "outcome of a sequence that has not finished"
        reason, error = self.finished, self.failure
        if reason == "aborted":
            error = Aborted("the request was cancelled")
        elif reason == "timeout":
            error = DeadlineExceeded(f"the request's limit of {self.utterance.timeout_s} s has passed")
        elif error is not None:
            reason = "failed"
        elif self.num_frames == 0:
            reason, error = "failed", EmptyGeneration("the model ended before its first frame")
        return Outcome(reason, self.num_frames, self.prompt_length, self._timings(now), error)

    def _timings(self, now: float) -> Timings:
        def since(moment: float | None) -> float:
            return 0.0 if moment is None else moment - self.submitted

        return Timings(
            since(self.admitted_at), since(self.read_at), since(self.first_audio_at), since(now),
            self.playout.worst_underrun_s,
        )  # fmt: skip
