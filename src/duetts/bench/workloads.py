"""What is asked of a server: the workloads by name, the one seeded table of lengths, texts that never repeat, and bodies.

Every engine gets the same requests. Knows no sockets.
"""

from __future__ import annotations

import base64
import io
import json
import math
import random
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from duetts.errors import ConfigError

TEXT_CHARS, REFERENCE_S = (60, 150, 400), (3, 10, 30)
SHORTEST, LONGEST = 43, 860  # frames of log-normal lengths
FRAMES, LONG_FRAMES = 215, 1720  # 10 and 80 s
TABLE_ROWS, TABLE_SEED = 4096, 6
REUSED_VOICES = 8
TRANSCRIPTS = 1 << 50  # numbers of texts that are said in references
FIRST_RATES, PEAK_SHARES = (2.0, 4.0, 8.0, 16.0), (0.25, 0.5, 0.75, 0.9)

Loop = Literal["closed", "poisson", "readers", "burst"]
Voices = Literal["none", "cached", "unique", "reused"]


@dataclass(frozen=True, slots=True)
class Workload:
    """`loads` are numbers of clients, for Poisson arrivals requests a second. `reference_s` of the voices; 0: by the table."""

    name: str
    loads: tuple[float, ...]
    loop: Loop = "closed"
    voices: Voices = "none"
    frames: int = FRAMES  # 0: log-normal lengths of the table
    reference_s: float = 0
    streaming: tuple[bool, ...] = (True,)


CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
WORKLOADS = {
    one.name: one
    for one in (
        Workload("L1", (1,), voices="cached", reference_s=10),
        Workload("L2", (1,), voices="unique", reference_s=10),
        Workload("T", CURVE, streaming=(True, False)),
        Workload("C1", CURVE, voices="unique", streaming=(True, False)),
        Workload("C2", CURVE, voices="reused", streaming=(True, False)),
        Workload("P", FIRST_RATES, "poisson", frames=0),
        Workload("S", (1,), "readers"),
        Workload("G", (1, 16, 64), frames=LONG_FRAMES),
        Workload("B", (64,), "burst"),
    )
}


@dataclass(frozen=True, slots=True)
class Row:
    """Lengths of one request: characters of text, seconds of reference, frames when lengths vary."""

    text_chars: int
    reference_s: int
    frames: int


@cache
def table() -> tuple[Row, ...]:
    """The lengths that all engines get, in any version of Python. Frames are log-normal: 95 % of the draws lie within the
    bounds, the others on them."""
    generator = random.Random(TABLE_SEED)
    frames = NormalDist(math.log(SHORTEST * LONGEST) / 2, math.log(LONGEST / SHORTEST) / 4)

    def row() -> Row:
        chars, seconds = (choices[int(3 * generator.random())] for choices in (TEXT_CHARS, REFERENCE_S))
        drawn = round(math.exp(frames.inv_cdf(max(1e-9, generator.random()))))
        return Row(chars, seconds, min(LONGEST, max(SHORTEST, drawn)))

    return tuple(row() for _ in range(TABLE_ROWS))


def mean_frames() -> float:
    return sum(row.frames for row in table()) / TABLE_ROWS


WORDS = (
    "amber anchor autumn basket beacon bridge candle canyon castle cedar circle copper desert eagle ember falcon forest garden "
    "granite harbor island jungle lantern marble meadow ocean olive paper river silver summer winter"
)


def text(number: int, chars: int) -> str:
    """A sentence of exactly so many characters, another one for every number."""
    words = WORDS.split()
    chosen = np.random.default_rng([TABLE_SEED, number]).integers(len(words), size=chars // 4)
    spoken = " ".join(words[index] for index in chosen)
    return (spoken[: chars - 1].rstrip() + "..")[:chars].capitalize()


SAMPLING = {"temperature": 0.8, "top_k": 30}
# How servers want to be asked: for a stream, and in any case.
DIALECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "duetts": ({"stream_format": "audio"}, {"chunk_length": 1000, **SAMPLING}),
    "vllm-omni": ({"stream": True, "stream_format": "audio"}, {"extra_params": SAMPLING}),
    "sglang-omni": ({"stream": True}, SAMPLING),
    "openai": ({"stream_format": "audio"}, SAMPLING),
}


@dataclass(frozen=True, slots=True)
class Asker:
    """Makes bodies. `fields` are added to every body; one that is None is left out."""

    dialect: str = "duetts"
    model: str = ""
    format: str = "pcm"
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dialect not in DIALECTS:
            raise ConfigError(f"the dialect is {self.dialect!r}; it must be one of {', '.join(DIALECTS)}")

    def body(self, workload: Workload, row: Row, number: int, frames: int, streaming: bool) -> tuple[bytes, float]:
        """The JSON of a request with this number, which no other one has; and the seconds of its reference."""
        streamed, always = DIALECTS[self.dialect]
        plain = {"model": self.model or None, "input": text(number, row.text_chars), "response_format": self.format,
                 "max_new_tokens": frames, **always, **(streamed if streaming else {}), **self.fields}  # fmt: skip
        voice = self._voice(workload, row, number)
        if voice is not None:
            plain["ref_text"] = text(TRANSCRIPTS + voice[1], round(15 * voice[0]))
        body = json.dumps({name: value for name, value in plain.items() if value is not None}).encode()
        if voice is None:
            return body, 0.0
        audio = base64.b64encode(clip(*voice))
        return body[:-1] + b', "ref_audio": "data:audio/wav;base64,' + audio + b'"}', voice[0]

    def _voice(self, workload: Workload, row: Row, number: int) -> tuple[float, int] | None:
        """Seconds and number of the clip of a request."""
        seconds = workload.reference_s or row.reference_s
        if workload.voices == "none":
            return None
        if workload.voices == "cached":
            return seconds, 0
        if workload.voices == "unique":
            return seconds, 1 + REUSED_VOICES + number
        voice = number % REUSED_VOICES
        return workload.reference_s or table()[voice].reference_s, 1 + voice


CLIP_RATE = 24000  # Hz
LONGEST_S = 30
STEP = 7919  # samples between the beginnings of neighbouring clips
MARKS = 8  # samples that spell a clip's number in base 64, far below what can be heard, so that no two are equal


@cache
def _voice() -> npt.NDArray[np.int16]:
    """Half a minute of it."""
    generator = np.random.default_rng(30)
    num_samples = LONGEST_S * CLIP_RATE
    time_s = np.arange(num_samples) / CLIP_RATE
    pitch = 120 * np.exp(0.15 * np.sin(2 * np.pi * 0.4 * time_s) + 0.08 * np.sin(2 * np.pi * 1.7 * time_s + 1))
    phase = 2 * np.pi * np.cumsum(pitch) / CLIP_RATE
    syllable_s = np.interp(time_s, *_steps(generator, 300, 2200))[None], np.interp(time_s, *_steps(generator, 800, 2400))[None]
    sound = np.zeros(num_samples)
    for harmonic in range(1, 31):
        frequency = harmonic * pitch
        level = sum(np.exp(-(((frequency - formant[0]) / 180) ** 2)) for formant in syllable_s) + 0.02
        sound += level / harmonic**0.5 * np.sin(harmonic * phase)
    loud = np.clip(1.4 * np.sin(2 * np.pi * 2.1 * time_s + np.sin(2 * np.pi * 0.3 * time_s)) + 0.5, 0, 1)
    sound = sound * loud + 0.03 * generator.normal(size=num_samples)
    return np.asarray(np.rint(9000 * sound / np.abs(sound).max()), np.int16)


def _steps(generator: np.random.Generator, low: float, high: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Times and frequencies of a formant that goes somewhere else four times a second."""
    times = np.arange(0, LONGEST_S + 0.25, 0.25)
    return times, generator.uniform(low, high, len(times))


def clip(seconds: float, number: int) -> bytes:
    """A WAV file of so many seconds, at most 30; another sound for every number below 2 ** 48."""
    voice = _voice()[: round(seconds * CLIP_RATE)]
    begin = number * STEP % len(voice)
    marks = np.array([number >> 6 * place & 63 for place in range(MARKS)], np.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(CLIP_RATE)
        writer.writeframes(np.concatenate((marks, voice[begin:], voice[:begin]))[: len(voice)].tobytes())
    return file.getvalue()
