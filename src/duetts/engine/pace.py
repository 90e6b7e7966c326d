"""How fast the engine is, learned while it runs: seconds of a step as a straight line over its rows. No torch."""

from __future__ import annotations

DECAY = 0.98  # weight of the past at every new measurement
SHARE = 0.85  # of a frame's duration that may be planned for; the rest is for prompts, references and accidents
COMPANY = 0.5  # of a lone listener's frame: who costs a late one no more than that is let in, waiting would cost both more


class Pace:
    """Least squares with fading memory over (rows, seconds) of steps, and the codec's seconds per frame."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = self._seconds = self._rows_squared = self._products = 0.0
        self._codec_frames = self._codec_s = 0.0
        self.stay_s = 0.0  # from a listener's admission to its last frame, 0 before the first

    def saw_step(self, rows: int, seconds: float) -> None:
        self._weight = DECAY * self._weight + 1
        self._rows = DECAY * self._rows + rows
        self._seconds = DECAY * self._seconds + seconds
        self._rows_squared = DECAY * self._rows_squared + rows * rows
        self._products = DECAY * self._products + rows * seconds

    def saw_codec(self, frames: int, seconds: float) -> None:
        """A codec call that decoded `frames` in all streams together."""
        self._codec_frames = DECAY * self._codec_frames + frames
        self._codec_s = DECAY * self._codec_s + seconds

    def saw_stay(self, seconds: float) -> None:
        """A listener's utterance is drawn, so long after it was let in."""
        self.stay_s += (0.05 if self.stay_s else 1.0) * (seconds - self.stay_s)

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
        return self._codec_s / self._codec_frames if self._codec_frames else 0.0

    def rows_within(self, seconds: float, *, shared_thread: bool) -> int:
        """How many rows a step may have so that it takes no longer, with their codec's time if that comes out of the steps';
        0 before the first step."""
        none_s, one_s = self.step_s(0), self.step_s(1)
        if none_s is None or one_s is None:
            return 0
        each_s = one_s - none_s + (self.codec_frame_s if shared_thread else 0.0)
        left_s = seconds - none_s
        if left_s < each_s:
            return 0
        return int(left_s / max(each_s, 1e-9))

    def streams(self, rows: int, frame_s: float, *, shared_thread: bool) -> float:
        """How many listeners can be served when a step takes at most `rows` of them: as many as are all in time. Where not even
        one is in time, a step's worth, unless each would delay the others by more than `COMPANY` says. At least one; infinite
        before the first step.

        With `shared_thread` the codec takes its time out of the steps', otherwise it runs beside them.
        """
        full_s, one_s = self.step_s(rows), self.step_s(1)
        if full_s is None or one_s is None:
            return float("inf")
        codec_s = self.codec_frame_s
        own_codec_s = codec_s if shared_thread else 0.0
        time_s = SHARE * frame_s
        alone_s = one_s + own_codec_s
        more_s = (full_s - one_s) / max(1, rows - 1) + own_codec_s  # of each listener more in a step
        if alone_s > time_s:
            served = float(rows) if more_s <= COMPANY * alone_s else 1.0
        elif full_s + rows * own_codec_s <= time_s:  # n listeners need n / rows full steps a frame
            each_s = full_s / rows + own_codec_s
            served = time_s / each_s if each_s > 0 else float("inf")  # a clock may be too coarse to see a step
        else:
            served = 1 + (time_s - alone_s) / more_s
        decoded = float("inf") if shared_thread or codec_s == 0 else SHARE * frame_s / codec_s
        return max(1.0, min(served, decoded))
