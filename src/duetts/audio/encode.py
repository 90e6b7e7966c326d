"""Mono 16-bit PCM to the bytes of an audio format, piece by piece. Knows no codec frames and no HTTP."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from duetts.errors import InvalidRequest

FORMAT_NAMES = ("wav", "pcm", "mp3", "opus", "flac", "aac")
SAMPLE_BYTES = 2
UNKNOWN_SIZE = 0xFFFFFFFF  # in a WAV header: up to the end of the stream


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """A format that can be written now. `content_type` may hold a `{rate}` in Hz to fill in."""

    name: str
    extension: str
    content_type: str


class Encoder(Protocol):
    """Turns PCM into a file's or a stream's bytes. Every byte string that is not empty can be sent at once."""

    def write(self, pcm: bytes) -> bytes:
        """Encodes signed 16-bit little-endian mono PCM; a header comes with the first call."""
        ...

    def finish(self) -> bytes:
        """What is left at the end. No call may follow."""
        ...


class WavEncoder:
    """RIFF with a 44-byte header. Without `num_samples` both sizes are 0xFFFFFFFF, as in a stream."""

    def __init__(self, rate: int, num_samples: int | None) -> None:
        self._header = wav_header(rate, None if num_samples is None else num_samples * SAMPLE_BYTES)

    def write(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm

    def finish(self) -> bytes:
        return self.write(b"")


class PcmEncoder:
    """The samples as they are."""

    def __init__(self, rate: int, num_samples: int | None) -> None:
        pass

    def write(self, pcm: bytes) -> bytes:
        return pcm

    def finish(self) -> bytes:
        return b""


_ENCODERS: dict[str, tuple[AudioFormat, Callable[[int, int | None], Encoder]]] = {
    "wav": (AudioFormat("wav", "wav", "audio/wav"), WavEncoder),
    "pcm": (AudioFormat("pcm", "pcm", "audio/pcm; rate={rate}; channels=1"), PcmEncoder),
}


def available_formats() -> tuple[str, ...]:
    """Names of the formats that can be written now."""
    return tuple(_ENCODERS)


def find_format(name: str) -> AudioFormat:
    """The format of that name. Raises `InvalidRequest` for an unknown name, or a known one that cannot be written yet."""
    if name in _ENCODERS:
        return _ENCODERS[name][0]
    if name in FORMAT_NAMES:
        raise InvalidRequest(
            f"response_format {name} has no encoder here yet; these work now: {', '.join(_ENCODERS)}",
            field="response_format", code="format_unavailable",
        )  # fmt: skip
    raise InvalidRequest(f"response_format {name[:64]!r} is not one of {', '.join(FORMAT_NAMES)}", field="response_format")


def open_encoder(name: str, rate: int, *, num_samples: int | None = None) -> Encoder:
    """A new encoder of one output at `rate` Hz. With `num_samples`, known in advance, sizes in its header are exact."""
    find_format(name)
    return _ENCODERS[name][1](rate, num_samples)


def wav_header(rate: int, num_bytes: int | None) -> bytes:
    """The 44 bytes before mono 16-bit samples; `num_bytes` of data, None if that is not known."""
    unknown = num_bytes is None or num_bytes + 36 > UNKNOWN_SIZE
    riff_size, data_size = (UNKNOWN_SIZE, UNKNOWN_SIZE) if unknown else ((num_bytes or 0) + 36, num_bytes)
    fields = (b"WAVE", b"fmt ", 16, 1, 1, rate, rate * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES, b"data", data_size)
    return b"RIFF" + struct.pack("<I4s4sIHHIIHH4sI", riff_size, *fields)
