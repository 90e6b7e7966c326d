"""Mono 16-bit PCM to the bytes of an audio format, piece by piece. Knows no codec frames and no HTTP."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any, Protocol

import av
import numpy as np

from duetts.audio.filters import one_cpu
from duetts.audio.formats import SAMPLE_BYTES, AudioFormat, choose_bitrate, find_format

UNKNOWN_SIZE = 0xFFFFFFFF  # in a WAV header: up to the end of the stream
WAV_HEADER_BYTES = 44
SIZED_HEADER_BYTES = 36  # of the header, those that its first size counts
# What a stream's header states of the whole and of the data, since nobody knows them.
STREAM_SIZES = {"max": (UNKNOWN_SIZE, UNKNOWN_SIZE), "2g": (0x7FFFFFFF, 0x7FFFFFFF - SIZED_HEADER_BYTES), "zero": (0, 0)}


class Encoder(Protocol):
    """Turns PCM into the bytes of one stream. Every byte string that is not empty can be sent, and decoded, at once."""

    def write(self, pcm: bytes) -> bytes:
        """Encodes signed 16-bit little-endian mono PCM; a header comes with the first bytes of audio."""
        ...

    def finish(self) -> bytes:
        """What is left at the end. Only `close` may follow."""
        ...

    def close(self) -> None:
        """Frees what an encoder holds. May be called twice, and without `finish`; never during another call."""
        ...


class PcmEncoder:
    """The samples as they are, after a header that may be empty."""

    def __init__(self, header: bytes = b"") -> None:
        self._header = header

    def write(self, pcm: bytes) -> bytes:
        return self.finish() + pcm if pcm else b""

    def finish(self) -> bytes:
        header, self._header = self._header, b""
        return header

    def close(self) -> None:
        pass


class ContainerEncoder:
    """A codec of FFmpeg in its container, in memory. Opened by the first samples, since that takes milliseconds."""

    def __init__(self, chosen: AudioFormat, rate: int, bitrate: int | None) -> None:
        self._format, self._rate, self._bitrate = chosen, rate, bitrate
        self._sink = _Sink()
        self._container: Any = None
        self._stream: Any = None
        self._position = 0  # in samples

    def write(self, pcm: bytes) -> bytes:
        if not pcm:
            return b""
        if self._container is not None:
            return self._encode(self._frame(pcm))
        self._open()
        with one_cpu():  # the first frame makes a filter graph
            return self._encode(self._frame(pcm))

    def finish(self) -> bytes:
        if self._container is None:
            return b""
        data = self._encode(None)
        self.close()
        return data + self._sink.take()

    def close(self) -> None:
        """Frees at once what otherwise waits for the garbage collector, up to 7 MB."""
        if self._container is not None:
            self._container.close()

    def _open(self) -> None:
        self._container = av.open(
            self._sink, "w", format=self._format.container, options=dict(self._format.container_options)
        )  # fmt: skip
        codec_options = dict(self._format.codec_options)
        self._stream = self._container.add_stream(self._format.codec, rate=self._rate, layout="mono", options=codec_options)
        if self._bitrate is not None:
            self._stream.bit_rate = 1000 * self._bitrate

    def _frame(self, pcm: bytes) -> Any:
        frame = av.AudioFrame.from_ndarray(np.frombuffer(pcm, "<i2")[None], format="s16", layout="mono")
        frame.sample_rate = self._rate
        frame.time_base = Fraction(1, self._rate)
        frame.pts = self._position
        self._position += frame.samples
        return frame

    def _encode(self, frame: Any) -> bytes:
        self._container.mux(self._stream.encode(frame))
        return self._sink.take()


class _Sink:
    """The file that FFmpeg writes to: bytes since they were last taken. It cannot seek."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data, self._data = bytes(self._data), bytearray()
        return data


def open_encoder(name: str, rate: int, bitrate: int | None = None, stream_size: str = "max") -> Encoder:
    """A new encoder of one output at `rate` Hz. `bitrate` is kbit/s, `stream_size` one of `STREAM_SIZES`."""
    chosen = find_format(name)
    if chosen.codec:
        return ContainerEncoder(chosen, rate, choose_bitrate(chosen, rate, bitrate))
    return PcmEncoder(wav_header(rate, None, stream_size) if name == "wav" else b"")


def wav_header(rate: int, num_bytes: int | None, stream_size: str = "max") -> bytes:
    """The 44 bytes before mono 16-bit samples; `num_bytes` of data, None if that is not known."""
    riff_size, data_size = STREAM_SIZES[stream_size]
    if num_bytes is not None and num_bytes + SIZED_HEADER_BYTES <= UNKNOWN_SIZE:
        riff_size, data_size = num_bytes + SIZED_HEADER_BYTES, num_bytes
    fields = (b"WAVE", b"fmt ", 16, 1, 1, rate, rate * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES, b"data", data_size)
    return b"RIFF" + struct.pack("<I4s4sIHHIIHH4sI", riff_size, *fields)


def wav_file(pcm: bytes, rate: int) -> bytes:
    """A complete WAV file of mono 16-bit PCM."""
    return wav_header(rate, len(pcm)) + pcm


def with_exact_sizes(name: str, rate: int, stream: bytes) -> bytes:
    """A whole stream as a file. Only the header of a WAV differs: it states the sizes."""
    return wav_file(stream[WAV_HEADER_BYTES:], rate) if name == "wav" else stream
