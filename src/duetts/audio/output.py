"""One output from PCM to bytes: speed, loudness, volume, rate and format, piece by piece. Knows no HTTP and no requests.

How the PCM is cut into pieces changes no byte: what is processed goes through in blocks of a fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import soxr

from duetts.audio.encode import PcmEncoder, open_encoder
from duetts.audio.formats import SAMPLE_BYTES, choose_bitrate, choose_rate, find_format
from duetts.audio.loudness import HIGHEST_VOLUME_DB, LOWEST_VOLUME_DB, Loudness, Volume
from duetts.audio.tempo import HIGHEST_SPEED, LOWEST_SPEED, Tempo
from duetts.errors import InvalidRequest
from duetts.types import Float32

Int16 = npt.NDArray[np.int16]

BLOCK_BYTES = SAMPLE_BYTES * 1024  # a frame of the codec is a whole number of blocks, so that none of it has to wait
FULL_SCALE = 32768.0


@dataclass(frozen=True, slots=True)
class Output:
    """What an output is like. `sample_rate` is Hz, `bitrate` kbit/s or None, `volume_db` a gain after normalising."""

    format: str
    sample_rate: int
    bitrate: int | None = None
    speed: float = 1.0
    volume_db: float = 0.0
    normalize_loudness: bool = False
    stream_size: str = "max"  # what the header of a WAV stream states, by `encode.STREAM_SIZES`


def plan_output(
    native_rate: int,
    *,
    response_format: str,
    sample_rate: int | None = None,
    bitrate: int | None = None,
    speed: float = 1.0,
    volume: float = 0.0,
    normalize_loudness: bool = False,
    stream_size: str = "max",
) -> Output:
    """The output that is asked for, of speech at `native_rate` Hz. Raises `InvalidRequest` naming the field and its limits."""
    chosen = find_format(response_format)
    check_range("speed", speed, LOWEST_SPEED, HIGHEST_SPEED)
    check_range("volume", volume, LOWEST_VOLUME_DB, HIGHEST_VOLUME_DB)
    rate = choose_rate(chosen, native_rate, sample_rate)
    return Output(chosen.name, rate, choose_bitrate(chosen, rate, bitrate), speed, volume, normalize_loudness, stream_size)


def check_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{field} is {value}; it must be between {low:g} and {high:g}", field=field, code="out_of_range")


class Stage(Protocol):
    """A step of the way, over mono float32 samples [n]."""

    def write(self, samples: Float32) -> Float32: ...

    def finish(self) -> Float32: ...


class Resampler:
    """From one rate in Hz to another: N samples become round(N * to / from)."""

    def __init__(self, rate: int, to: int) -> None:
        self._stream: Any = soxr.ResampleStream(rate, to, 1, dtype="float32", quality="HQ")

    def write(self, samples: Float32) -> Float32:
        resampled: Float32 = self._stream.resample_chunk(samples)
        return resampled

    def finish(self) -> Float32:
        resampled: Float32 = self._stream.resample_chunk(np.zeros(0, np.float32), last=True)
        return resampled


class OutputStream:
    """Signed 16-bit little-endian mono PCM at `rate` Hz in, the bytes of one output out. Close it at the end.

    Calls may come from several threads: each waits for the one before.
    """

    def __init__(self, output: Output, rate: int) -> None:
        self.output = output
        self.num_samples = 0  # encoded so far, at the output's rate
        self._encoder = open_encoder(output.format, output.sample_rate, output.bitrate, output.stream_size)
        self._stages = _stages(output, rate)
        self._waiting = bytearray()
        self._lock = Lock()

    @property
    def plain(self) -> bool:
        """Whether bytes are passed on as they are: then a call takes no time worth a thread."""
        return not self._stages and isinstance(self._encoder, PcmEncoder)

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.output.sample_rate

    def write(self, pcm: bytes) -> bytes:
        """The bytes that are ready after this PCM, a whole number of samples. They may be empty."""
        with self._lock:
            if not self._stages:
                return self._encode(pcm)
            self._waiting += pcm
            end = len(self._waiting) - len(self._waiting) % BLOCK_BYTES
            blocks = [_samples(self._waiting[at : at + BLOCK_BYTES]) for at in range(0, end, BLOCK_BYTES)]
            del self._waiting[:end]
            return self._encode(b"".join(_pcm(self._process(block)) for block in blocks))

    def finish(self) -> bytes:
        """The last bytes. Only `close` may follow."""
        with self._lock:
            pcm = _pcm(self._process(_samples(self._waiting)))
            for number, stage in enumerate(self._stages, 1):
                pcm += _pcm(self._process(stage.finish(), first=number))
            return self._encode(pcm) + self._encoder.finish()

    def close(self) -> None:
        """Frees the encoder; harmless after the end."""
        with self._lock:
            self._encoder.close()

    def _process(self, samples: Float32, first: int = 0) -> Float32:
        """The samples through the stages from the one of that index on."""
        for stage in self._stages[first:]:
            samples = stage.write(samples)
        return samples

    def _encode(self, pcm: bytes) -> bytes:
        self.num_samples += len(pcm) // SAMPLE_BYTES
        return self._encoder.write(pcm)


def _stages(output: Output, rate: int) -> list[Stage]:
    stages: list[Stage] = []
    if output.speed != 1.0:
        stages.append(Tempo(rate, output.speed))
    if output.normalize_loudness:
        stages.append(Loudness(rate))
    if output.normalize_loudness or output.volume_db:
        stages.append(Volume(rate, output.volume_db))
    if output.sample_rate != rate:
        stages.append(Resampler(rate, output.sample_rate))
    return stages


def _samples(pcm: bytes | bytearray) -> Float32:
    return np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(FULL_SCALE)


def _pcm(samples: Float32) -> bytes:
    """Rounded, and held at full scale rather than wrapped."""
    numbers: Int16 = np.clip(np.rint(samples * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1).astype("<i2")
    return numbers.tobytes()
