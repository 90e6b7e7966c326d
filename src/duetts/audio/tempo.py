"""Speech faster or slower at its own pitch, piece by piece: FFmpeg's WSOLA, made exact in length."""

from __future__ import annotations

import numpy as np

from duetts.audio.filters import Filters
from duetts.types import Float32

LOWEST_SPEED, HIGHEST_SPEED = 0.25, 4.0
STEP = 2.0  # `atempo` skips samples above it and refuses what is below 1 / STEP
SILENCE = np.zeros(1024, np.float32)


class Tempo:
    """N samples become round(N / speed). Needs 70 ms of input before its first output, 95 to 190 ms beyond half or double.

    `atempo` ends early by up to 54 ms. Silence is appended until all of the length is there, and the rest is cut off.
    """

    def __init__(self, rate: int, speed: float) -> None:
        factors = [speed] if 1 / STEP <= speed <= STEP else [speed**0.5] * 2
        self._filters = Filters(rate, *(("atempo", f"{factor:.12g}") for factor in factors))
        self._speed = speed
        self._num_in = self._num_out = 0

    def write(self, samples: Float32) -> Float32:
        self._num_in += len(samples)
        return self._count(self._filters.write(samples))

    def finish(self) -> Float32:
        wanted = round(self._num_in / self._speed) - self._num_out
        blocks = [np.zeros(0, np.float32)]
        while sum(map(len, blocks)) < wanted:
            blocks.append(self._filters.write(SILENCE))
        return self._count(np.concatenate(blocks)[: max(0, wanted)])

    def _count(self, samples: Float32) -> Float32:
        self._num_out += len(samples)
        return samples
