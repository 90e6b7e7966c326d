"""FFmpeg's own programs on everything that we encode: `ffprobe` names it, `ffmpeg` decodes it to the right length."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest

from duetts.audio.formats import FORMATS
from tests.server.real import Served

pytestmark = pytest.mark.skipif(not (shutil.which("ffmpeg") and shutil.which("ffprobe")), reason="needs FFmpeg's programs")

SAID = {"input": "Hello, how are you?", "seed": 7, "max_new_tokens": 30}
CODECS = {"wav": "pcm_s16le", "mp3": "mp3", "opus": "opus", "flac": "flac", "aac": "aac"}
RATES = [(name, rate) for name, chosen in FORMATS.items() for rate in (None, min(chosen.rates))]


def run(program: str, data: bytes, *options: str) -> bytes:
    return subprocess.run([program, "-v", "error", *options], input=data, capture_output=True, check=True, timeout=200).stdout


def samples_of(data: bytes, *given: str) -> int:
    """How many `ffmpeg` decodes, at the file's own rate."""
    return len(run("ffmpeg", data, *given, "-i", "pipe:0", "-f", "s16le", "pipe:1")) // 2


def spoken(served: Served, name: str, rate: int | None, **fields: Any) -> tuple[bytes, int]:
    answer = served.speak(**SAID, response_format=name, sample_rate=rate, **fields)
    assert answer.status_code == 200, answer.text
    return answer.content, int(answer.headers["X-Sample-Rate"])


@pytest.mark.parametrize(("name", "rate"), RATES)
def test_it_is_what_it_says_and_lasts_as_long(tiny_served: Served, name: str, rate: int | None) -> None:
    data, told_rate = spoken(tiny_served, name, rate)
    assert rate in (None, told_rate)
    given: tuple[str, ...] = ()
    if name == "pcm":
        given = ("-f", "s16le", "-ar", str(told_rate), "-ch_layout", "mono")
        own_rate = told_rate
    else:
        shown = json.loads(run("ffprobe", data, "-show_streams", "-of", "json", "-i", "pipe:0"))
        (stream,) = shown["streams"]
        own_rate = int(stream["sample_rate"])
        assert (stream["codec_name"], stream["channels"]) == (CODECS[name], 1)
        assert own_rate == (48000 if name == "opus" else told_rate)  # Opus decodes at its clock's rate
    pcm, _ = spoken(tiny_served, "pcm", None)
    seconds = len(pcm) / 2 / 44100
    # MP3 and AAC have whole frames and a delay that they cannot state: up to two frames, which at low rates are long.
    most = max(0.06, 2048 / told_rate) if name in ("mp3", "aac") else 0.06
    assert abs(samples_of(data, *given) / own_rate - seconds) <= most
    streamed, _ = spoken(tiny_served, name, rate, stream_format="audio")
    header = 44 if name == "wav" else 0  # a stream does not know its sizes
    assert streamed[header:] == data[header:]
    assert not header or samples_of(streamed) == samples_of(data)


def test_two_answers_in_mp3_join_to_the_sum_of_both(tiny_served: Served) -> None:
    """As clients do that ask for each sentence by itself; one of the two was streamed."""
    first, second = (spoken(tiny_served, "mp3", None, **way)[0] for way in ({}, {"stream_format": "audio", "speed": 1.5}))
    assert samples_of(first + second) == samples_of(first) + samples_of(second)


def test_the_sound_is_that_of_the_wav(tiny_served: Served) -> None:
    """Level by level of 20 ms, as far as both go."""
    levels = []
    for name in ("wav", "mp3", "opus", "flac", "aac"):
        data, _ = spoken(tiny_served, name, None)
        pcm = run("ffmpeg", data, "-i", "pipe:0", "-ar", "44100", "-f", "s16le", "pipe:1")
        samples = np.frombuffer(pcm, "<i2").astype(np.float64)
        count = len(samples) // 882
        levels.append((samples[: count * 882].reshape(count, 882) ** 2).mean(axis=1) ** 0.5)
    for other in levels[1:]:
        count = min(len(levels[0]), len(other))
        assert np.corrcoef(levels[0][:count], other[:count])[0, 1] > 0.5
