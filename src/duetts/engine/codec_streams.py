"""What the codec worker keeps: streams with frames that wait, shares of calls, calls under way. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from duetts.engine.parts import Decoding
from duetts.engine.sequence import Sequence
from duetts.types import Int32


@dataclass(slots=True, eq=False)
class Stream:
    """Frames of one sequence that wait to be decoded."""

    sequence: Sequence
    frames: list[Int32] = field(default_factory=list)
    slot: int | None = None
    last: int = 0  # frames of the chunk before
    shown: int = 0  # frames at the head of `frames` that were handed over before their quantum was full
    served: float = 0.0
    ended: bool = False
    flying: bool = False  # a call decodes frames of it: until that lands no other call may, and it cannot end
    held: bool = False  # the vocoder has its past

    @property
    def waiting(self) -> int:
        return len(self.frames) - self.shown

    def drop(self) -> None:
        self.frames.clear()
        self.shown = 0


Due = tuple[float, int, Stream]  # seconds until it is needed, frames of the chunk


@dataclass(slots=True, eq=False)
class Part:
    """One stream's share of a call: frames [codebooks], of which the first `start` were handed over before."""

    stream: Stream
    slot: int
    frames: list[Int32]
    start: int
    keep: bool
    fresh: bool

    @property
    def sequence(self) -> Sequence:
        return self.stream.sequence


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A call under way."""

    parts: list[Part]
    codes: Int32
    decoding: Decoding
    began: float
