"""What a listener can tell of audio: length, level, pitch. Files are read by FFmpeg's own decoders."""

from __future__ import annotations

import io

import av
import numpy as np

from duetts.types import Float32

RATE = 44100


def tone(hertz: float = 440.0, *, seconds: float = 1.0, rate: int = RATE, level: float = 0.25) -> Float32:
    return (level * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def as_pcm(samples: Float32) -> bytes:
    return np.rint(samples * 32767).astype("<i2").tobytes()


def as_samples(pcm: bytes) -> Float32:
    return np.frombuffer(pcm, "<i2").astype(np.float32) / 32768


def hear(data: bytes) -> tuple[Float32, int]:
    """The samples of a file or of a part of one, and their rate."""
    with av.open(io.BytesIO(data), format=format_without_signature(data)) as container:
        (stream,) = container.streams.audio
        assert stream.codec_context.channels == 1
        blocks = [_floats(frame.to_ndarray()) for frame in container.decode(stream)]
        return np.concatenate([np.zeros(0, np.float32), *blocks]), stream.codec_context.sample_rate


def format_without_signature(data: bytes) -> str | None:
    """FFmpeg's name of what begins with a frame and no signature, which a client knows by its content type. FFmpeg guesses it
    from a row of frames: of one to three frames of MP3 it takes 1 in 200 for something else."""
    if len(data) < 2 or data[0] != 0xFF or data[1] < 0xE0:
        return None
    return "mp3" if data[1] & 6 else "aac"


def _floats(values: np.ndarray) -> Float32:
    full_scale = 1.0 if values.dtype.kind == "f" else -float(np.iinfo(values.dtype).min)
    return values.reshape(-1).astype(np.float32) / np.float32(full_scale)


def middle(samples: Float32) -> Float32:
    """Without the first and the last fifth, where codecs begin and end."""
    fifth = len(samples) // 5
    return samples[fifth : len(samples) - fifth]


def level_db(samples: Float32) -> float:
    return float(20 * np.log10(np.sqrt(np.mean(samples.astype(np.float64) ** 2)) + 1e-12))


def pitch(samples: Float32, rate: int) -> float:
    """Hz of the strongest tone, to about 0.1 Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples)), 1 << 19))
    return float(np.argmax(spectrum)) * rate / (1 << 19)


def largest_step(samples: Float32) -> float:
    return float(np.abs(np.diff(samples)).max())
