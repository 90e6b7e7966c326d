"""Encoded audio of any container to mono float samples, within bounds. Knows no voices, no HTTP, no files on disk.

Levels: several channels are mixed so that speech keeps its loudness, a constant offset is taken away, and only a clip that
is very quiet, or louder than full scale, is scaled. A quiet clip that is left alone makes a quiet, noisy voice.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import soxr

from duetts.errors import InvalidRequest
from duetts.types import Float32

# FFmpeg guesses a container from content and knows playlists and network descriptions among them: only plain files pass.
OPEN_OPTIONS = {
    "format_whitelist": "wav,mp3,flac,ogg,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,aac,aiff,amr,w64,caf",
    "protocol_whitelist": "",
}
OPEN_TIMEOUT_S = 5.0
LOWEST_RATE, HIGHEST_RATE = 4000, 384_000  # Hz
SILENT_PEAK = 1e-5
QUIET_PEAK = 0.05  # -26 dBFS; a clip that stays below is brought to SPEECH_PEAK
SPEECH_PEAK = 0.5
LOUDEST_PEAK = 1000.0

# ITU-R BS.775 down to stereo, then the mean of both sides. The subwoofer is left out, as the standard allows.
_SIDE = 0.5**0.5 / 2
_SURROUND_WEIGHTS = {
    "FL": 0.5, "FR": 0.5, "FC": 2 * _SIDE, "LFE": 0.0,
    "BL": _SIDE, "BR": _SIDE, "SL": _SIDE, "SR": _SIDE, "BC": _SIDE,
}  # fmt: skip


def decode_audio(data: bytes, *, rate: int, min_s: float, max_s: float, field: str = "ref_audio") -> Float32:
    """Mono float32 samples [n] at `rate` Hz. The length that counts is that of the samples, not what a header says.

    Raises `InvalidRequest` naming `field`: reference_undecodable, reference_too_short, reference_too_long (as soon as more
    than `max_s` seconds are decoded) or reference_silent. Messages hold nothing of the data.
    """
    if not data:
        raise _refused(field, "is empty: it has 0 bytes")
    try:
        wave, source_rate = _read(data, max_s, field)
    except av.FFmpegError as error:
        raise _refused(field, "is not audio that can be decoded, or it is damaged") from error
    seconds = len(wave) / source_rate
    if seconds < min_s:
        raise InvalidRequest(
            f"{field} lasts {seconds:.2f} s; at least {min_s:g} s are needed", field=field, code="reference_too_short"
        )
    resampled: Float32 = soxr.resample(_centred(wave, field), source_rate, rate, quality="HQ")
    return _scaled(resampled)


def _read(data: bytes, max_s: float, field: str) -> tuple[Float32, int]:
    """The mixed samples and their rate in Hz. Keeps one channel and stops past `max_s`, whatever the file unpacks to."""
    with av.open(io.BytesIO(data), "r", options=OPEN_OPTIONS, metadata_errors="ignore", timeout=OPEN_TIMEOUT_S) as container:
        if not container.streams.audio:
            raise _refused(field, "holds no audio")
        codec = container.streams.audio[0].codec_context
        if codec is None:
            raise _refused(field, "uses a codec for which there is no decoder here")
        source_rate = int(codec.sample_rate)
        if not LOWEST_RATE <= source_rate <= HIGHEST_RATE:
            raise _refused(field, f"has a sample rate of {source_rate} Hz; {LOWEST_RATE} to {HIGHEST_RATE} Hz are allowed")
        blocks: list[Float32] = []
        room = int(max_s * source_rate)
        for block in _mixed_blocks(container, source_rate, field):
            room -= len(block)
            if room < 0:
                raise _too_long(field, max_s, container.duration)
            blocks.append(block)
    return np.concatenate([np.zeros(0, np.float32), *blocks]), source_rate


def _mixed_blocks(container: Any, source_rate: int, field: str) -> Iterator[Float32]:
    """Each decoded frame of the first audio stream as mono float32 [n]."""
    weights: Float32 | None = None
    for frame in container.decode(audio=0):
        if weights is None:
            weights = _weights([channel.name for channel in frame.layout.channels])
        if frame.sample_rate != source_rate or frame.layout.nb_channels != len(weights):
            raise _refused(field, "changes its sample rate or its channels on the way")
        with np.errstate(over="ignore", invalid="ignore"):  # what is no number is refused once all is mixed
            block: Float32 = weights @ _samples(frame)
        yield block


def _weights(channels: list[str]) -> Float32:
    """How much of each channel goes into the mix [channels]: known surround channels by the standard, others equally."""
    if len(channels) > 2 and all(name in _SURROUND_WEIGHTS for name in channels):
        return np.array([_SURROUND_WEIGHTS[name] for name in channels], np.float32)
    return np.full(len(channels), 1 / len(channels), np.float32)


def _samples(frame: Any) -> Float32:
    """A decoded frame as float32 [channels, n], full scale at 1."""
    values: npt.NDArray[Any] = frame.to_ndarray()
    if not frame.format.is_planar:
        values = values.reshape(-1, frame.layout.nb_channels).T
    if values.dtype.kind == "f":
        return np.asarray(values, np.float32)
    full_scale = 1 << (8 * values.dtype.itemsize - 1)
    offset = full_scale if values.dtype.kind == "u" else 0
    return (values.astype(np.float32) - np.float32(offset)) / np.float32(full_scale)


def _centred(wave: Float32, field: str) -> Float32:
    """The wave without a constant offset, which would click at the start and waste the codec's range."""
    if not np.abs(wave).max() < LOUDEST_PEAK:  # false for NaN too
        raise _refused(field, "holds samples that are no numbers, infinite or far beyond full scale")
    wave = wave - np.float32(wave.mean(dtype=np.float64))
    if np.abs(wave).max() < SILENT_PEAK:
        raise InvalidRequest(f"{field} is silent: no speech was found in it", field=field, code="reference_silent")
    return wave


def _scaled(wave: Float32) -> Float32:
    """The wave at a usable level: scaled only if it is very quiet or beyond full scale."""
    peak = float(np.abs(wave).max())
    if peak > 1.0:
        return wave * np.float32(1.0 / peak)
    return wave * np.float32(SPEECH_PEAK / peak) if peak < QUIET_PEAK else wave


def _too_long(field: str, max_s: float, duration_us: int | None) -> InvalidRequest:
    """Names the length that the container states, unless that would contradict what was decoded."""
    stated_s = (duration_us or 0) / av.time_base
    length = f"about {stated_s:.1f} s" if stated_s > max_s else f"more than {max_s:g} s"
    return InvalidRequest(
        f"{field} lasts {length}; at most {max_s:g} s are allowed", field=field, code="reference_too_long"
    )  # fmt: skip


def _refused(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {what}", field=field, code="reference_undecodable")
