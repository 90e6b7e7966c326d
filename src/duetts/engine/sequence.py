"""The life of one utterance inside the engine: its places, its progress, its times. No torch."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from duetts.engine.stream import Channel
from duetts.errors import Aborted, DeadlineExceeded, DuettsError, EmptyGeneration, EngineFailure
from duetts.types import FinishReason, Outcome, Timings, Utterance

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Sequence:
    """One utterance. The loop's thread writes it until it has `finished`, then the codec's; callers only set `cancelled`."""

    utterance: Utterance
    channel: Channel
    submitted: float = field(default_factory=time.monotonic)
    slot: int | None = None
    prefilled: int = 0  # prompt positions in the cache
    num_frames: int = 0
    cancelled: bool = False
    failure: DuettsError | None = None
    finished: FinishReason | None = None
    admitted_at: float | None = None
    read_at: float | None = None
    first_audio_at: float | None = None

    @property
    def prompt_length(self) -> int:
        return int(self.utterance.prompt.shape[1])

    @property
    def to_prefill(self) -> int:
        """Prompt positions still to read; the last one is left for the first step, which draws from it."""
        return self.prompt_length - 1 - self.prefilled

    @property
    def position(self) -> int:
        """Where the next step's input goes."""
        return self.prompt_length - 1 + self.num_frames

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
        log.error("request %s failed", self.utterance.request_id, exc_info=error)
        known = error if isinstance(error, DuettsError) else EngineFailure(f"a step failed: {type(error).__name__}")
        self.failure = self.failure or known

    def outcome(self) -> Outcome:
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
        return Outcome(reason, self.num_frames, self.prompt_length, self._timings(), error)

    def _timings(self) -> Timings:
        def since(moment: float | None) -> float:
            return 0.0 if moment is None else moment - self.submitted

        return Timings(
            since(self.admitted_at), since(self.read_at), since(self.first_audio_at), time.monotonic() - self.submitted
        )
