"""The listener's side of time: what has been handed over, what is still unplayed, and how large the next chunk should be.

Plain Python, no torch. A listener is *late* only when everything handed over has been played.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NEED_S = 0.25  # a stream with less than this needs the device
COMFORT_S = 2.0  # a stream so far ahead of its listener gives way while others need the device
SAFETY = 1.5  # a chunk may take so many times its expected time before the listener notices


@dataclass(slots=True)
class Playout:
    """The clock of one listener: playing begins with the first chunk and waits whenever the next one is not there."""

    frame_s: float
    began: float | None = None  # when the first frame sounded, shifted by every wait since
    handed: int = 0  # frames
    worst_underrun_s: float = 0.0

    def hand_over(self, frames: int, now: float) -> None:
        """Frames reach the listener now."""
        if self.began is None:
            self.began = now
        late_s = -self.buffer_s(now)
        if late_s > 0:
            self.began += late_s
            self.worst_underrun_s = max(self.worst_underrun_s, late_s)
        self.handed += frames

    def buffer_s(self, now: float) -> float:
        """Seconds until what was handed over has been played; negative while the listener waits. 0 before the first chunk."""
        return self.ahead_s(self.handed, now)

    def ahead_s(self, frames: int, now: float) -> float:
        """How long `frames` last from now on. Before the first chunk nothing has been played."""
        played_s = 0.0 if self.began is None else now - self.began
        return frames * self.frame_s - played_s


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """How many frames are decoded at once for a listener: few at first, then up to twice as many each time while the buffer
    lasts until they are made. Whoever does not listen yet (a complete answer) is served in chunks of `largest`.

    A first chunk has `first` frames, up to twice as many where frames come slowly: it must last until the next one, which
    comes two steps of the device later at the earliest.
    """

    first: int = 2
    largest: int = 16

    def size(self, playout: Playout, last: int, frame_s: float, now: float) -> int:
        """Frames of a stream's next chunk. `last`: those of the one before, 0 at the start. `frame_s`: time to make a frame."""
        if last == 0:
            lasting = math.ceil(1 + 2 * SAFETY * min(frame_s / playout.frame_s, 1.0))
            return min(max(self.first, lasting), 2 * self.first, self.largest)
        affordable = playout.buffer_s(now) / (SAFETY * frame_s) if frame_s > 0 else self.largest
        return max(1, int(min(2 * last, self.largest, affordable)))
