"""How fast the engine is, learned while it runs: seconds of a step as a straight line over its rows. No torch."""

from __future__ import annotations

DECAY = 0.98  # weight of the past at every new measurement
SHARE = 0.85  # of a frame's duration that may be planned for; the rest is for prompts, references and accidents


class Pace:
    """Least squares with fading memory over (rows, seconds) of steps, and the codec's seconds per frame."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = self._seconds = self._rows_squared = self._products = 0.0
        self._codec_s: float | None = None

    def saw_step(self, rows: int, seconds: float) -> None:
        self._weight = DECAY * self._weight + 1
        self._rows = DECAY * self._rows + rows
        self._seconds = DECAY * self._seconds + seconds
        self._rows_squared = DECAY * self._rows_squared + rows * rows
        self._products = DECAY * self._products + rows * seconds

    def saw_codec(self, frames: int, seconds: float) -> None:
        """A codec call that decoded `frames` in all streams together."""
        each_s = seconds / frames
        self._codec_s = each_s if self._codec_s is None else DECAY * self._codec_s + (1 - DECAY) * each_s

    def step_s(self, rows: int) -> float | None:
        """Expected seconds of a step, or None before the first."""
        if self._weight == 0:
            return None
        spread = self._weight * self._rows_squared - self._rows**2
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        slope = 0.0
        if spread > 1e-6 * self._rows_squared * self._weight:
            slope = (self._weight * self._products - self._rows * self._seconds) / spread
        slope = min(max(slope, 0.0), mean_s / mean_rows)  # more rows never take less, and no rows take no less than nothing
        return mean_s + slope * (rows - mean_rows)

    @property
    def codec_frame_s(self) -> float:
        """Codec seconds per frame, 0 before the first call."""
        return self._codec_s or 0.0

    def streams(self, rows: int, frame_s: float, *, shared_thread: bool) -> float:
        """How many listeners can be served in real time when a step takes at most `rows`; infinite before the first step.

        With `shared_thread` the codec takes its time out of the steps', otherwise it runs beside them.
        """
        full_s = self.step_s(rows)
        one_s = self.step_s(1)
        if full_s is None or one_s is None:
            return float("inf")
        time_s, codec_s = SHARE * frame_s, self.codec_frame_s
        beside = float("inf") if shared_thread or codec_s == 0 else time_s / codec_s
        own_codec_s = codec_s if shared_thread else 0.0
        # n listeners need ceil(n / rows) steps a frame; beyond one full step their number is a matter of time per row.
        if full_s + rows * own_codec_s <= time_s:
            return min(beside, time_s / (full_s / rows + own_codec_s))
        each_s = (full_s - one_s) / max(1, rows - 1) + own_codec_s
        if each_s <= 0:
            return 0.0
        return min(beside, max(0.0, 1 + (time_s - one_s - own_codec_s) / each_s))
