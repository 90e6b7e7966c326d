"""How loud the output is: a fixed gain with a limiter, and a gain that brings speech to a standard loudness as it comes.

Loudness is that of ITU-R BS.1770: power after K-weighting, the mean over blocks of 400 ms, every 100 ms, without the blocks
below -70 LUFS and those 10 LU below the rest.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from duetts.audio.filters import Filters
from duetts.types import Float32

Float64 = npt.NDArray[np.float64]

LOWEST_VOLUME_DB, HIGHEST_VOLUME_DB = -20.0, 20.0
CEILING = 0.95  # of full scale, about -0.4 dB: room for what resampling and lossy codecs add

TARGET_LUFS = -18.0
SILENT_LUFS = -70.0
GATE_LU = 10.0
FAINT_LUFS = -50.0  # what is quieter stays far from the target with the most gain, as the noise before speech should
STEPS_A_BLOCK = 4
STEP_S = 0.1
REMEMBERED_STEPS = 600
MOST_DB = 20.0  # of gain or loss
FASTEST_DB = 0.6  # change of the gain from one step to the next
# The standard's two filters, a shelf for the head and a high-pass, at 48 kHz: numerator and denominator in powers of 1/z.
K_FILTERS = (
    ((1.53512485958697, -2.69169618940638, 1.19839281085285), (1.0, -1.69065929318241, 0.73248077421585)),
    ((1.0, -2.0, 1.0), (1.0, -1.99004745483398, 0.99007225036621)),
)
K_RATE = 48000


class Volume:
    """A gain in dB, then FFmpeg's limiter, which looks 5 ms ahead: peaks never pass `CEILING`, and nothing else changes."""

    def __init__(self, rate: int, gain_db: float) -> None:
        self._factor = np.float32(10 ** (gain_db / 20))
        self._limiter = Filters(rate, ("alimiter", f"limit={CEILING}:attack=5:release=50:level=0:latency=1"))

    def write(self, samples: Float32) -> Float32:
        return self._limiter.write(samples * self._factor)

    def finish(self) -> Float32:
        return self._limiter.finish()


class Loudness:
    """Brings speech to -18 LUFS while it is made.

    A step of 100 ms leaves when it and the 300 ms after it have been measured: a look-ahead of 400 ms, counted from the start
    of a step. The gain at its end is what is missing between the loudness of the last minute, all that was measured included,
    and the target, at most 20 dB either way. It moves freely until the first step that can be heard leaves, by at most 6 dB a
    second from then on, and is drawn across a step as a straight line in dB. Silence moves nothing.
    """

    def __init__(self, rate: int) -> None:
        self._step = round(rate * STEP_S)
        self._weights = k_weights(rate, self._step)
        self._waiting: Float32 = np.zeros(0, np.float32)
        self._num_measured = 0  # samples of `_waiting`
        self._powers: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._gain_db = 0.0
        self._left = self._heard = False  # whether anything has left, and whether it could be heard

    def write(self, samples: Float32) -> Float32:
        self._waiting = np.concatenate([self._waiting, samples])
        leaving = [np.zeros(0, np.float32)]
        while len(self._waiting) - self._num_measured >= self._step:
            start = self._num_measured
            self._powers.append(self._power(self._waiting[start : start + self._step]))
            self._num_measured += self._step
            if self._num_measured == STEPS_A_BLOCK * self._step:
                leaving.append(self._leave(self._step))
                self._heard = self._heard or bool(_lufs(self._powers[-STEPS_A_BLOCK]) > FAINT_LUFS)
        return np.concatenate(leaving)

    def finish(self) -> Float32:
        if not self._powers:  # shorter than a step
            self._powers.append(self._power(self._waiting) * self._step / max(1, len(self._waiting)))
        return self._leave(len(self._waiting))

    def _power(self, samples: Float32) -> float:
        """K-weighted mean square of a step, with silence after samples that are fewer."""
        spectrum = np.fft.rfft(samples.astype(np.float64), self._step)
        return float(self._weights @ (spectrum.real**2 + spectrum.imag**2))

    def _leave(self, num: int) -> Float32:
        """The oldest `num` samples that wait, with the gain of now."""
        start_db = self._gain_db
        loudness = integrated_loudness(np.array(self._powers))
        if loudness > SILENT_LUFS:
            wanted_db = min(max(TARGET_LUFS - loudness, -MOST_DB), MOST_DB)
            change_db = wanted_db - start_db
            self._gain_db += min(max(change_db, -FASTEST_DB), FASTEST_DB) if self._heard else change_db
        line_db = np.linspace(start_db if self._left else self._gain_db, self._gain_db, num)
        samples, self._waiting = self._waiting[:num], self._waiting[num:]
        self._num_measured -= num
        self._left = True
        return (samples * 10 ** (line_db / 20)).astype(np.float32)


def k_weights(rate: int, num: int) -> Float64:
    """What each bin of the squared spectrum of `num` samples adds to the K-weighted mean square [num // 2 + 1]."""
    delay = np.exp(-2j * np.pi * np.fft.rfftfreq(num, 1 / rate) / K_RATE)
    response = np.ones(len(delay), np.complex128)
    for above, below in K_FILTERS:
        response *= np.polyval(above[::-1], delay) / np.polyval(below[::-1], delay)
    sides = np.full(len(delay), 2.0)  # negative frequencies
    sides[0] = 1.0
    if num % 2 == 0:
        sides[-1] = 1.0
    weights: Float64 = sides * np.abs(response) ** 2 / num**2
    return weights


def integrated_loudness(steps: Float64) -> float:
    """LUFS of steps, from their K-weighted mean squares [n]; at most `SILENT_LUFS` is silence."""
    size = min(STEPS_A_BLOCK, len(steps))
    blocks = np.convolve(steps, np.full(size, 1 / size), "valid")
    blocks = blocks[_lufs(blocks) > SILENT_LUFS]
    if not len(blocks):
        return -np.inf
    return float(_lufs(float(blocks[_lufs(blocks) > _lufs(float(blocks.mean())) - GATE_LU].mean())))


def _lufs(power: Float64 | float) -> Float64:
    return np.asarray(-0.691 + 10 * np.log10(np.maximum(power, 1e-20)))
