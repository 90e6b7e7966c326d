"""Formats, rates, speed and volume over HTTP: heard by FFmpeg, and the same by every way of delivery."""

import asyncio
from typing import Any

import httpx
import pytest

from duetts.audio.encode import with_exact_sizes
from duetts.audio.formats import FORMAT_NAMES
from duetts.server.schemas import is_openai, read_output
from tests.audio.listening import as_samples, hear, level_db, middle, pitch
from tests.server.conftest import CONFIG, NATIVE, Door, error_of
from tests.server.sine import FRAME, RATE, Knobs, hum
from tests.server.test_events import events_of, joined
from tests.waiting import LIMIT_S

TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm; rate=44100; channels=1",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg; codecs=opus",
    "flac": "audio/flac",
    "aac": "audio/aac",
}
STARTS = {"wav": b"RIFF", "mp3": b"\xff\xfb", "opus": b"OggS", "flac": b"fLaC", "aac": b"\xff\xf1"}
CHUNKS = 20
CHANGES: list[dict[str, Any]] = [
    {"speed": 2.0},
    {"speed": 0.5},
    {"volume": -6},
    {"volume_multiplier": 0.5},
    {"normalize_loudness": True},
    {"sample_rate": 24000},
    {"bitrate": 96},
]
DELIVERED = [
    (name, change)
    for name in FORMAT_NAMES
    for change in ({}, *CHANGES)
    if name in ("mp3", "opus", "aac") or "bitrate" not in change
]


def whole(door: Door, **fields: Any) -> httpx.Response:
    door.service.knobs = Knobs(num_chunks=CHUNKS)
    answer = door.speak(seed=340, **fields)  # hums at 440 Hz
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_each_format_is_what_it_says(door: Door, name: str) -> None:
    answer = whole(door, response_format=name)
    headers, rate = answer.headers, 48000 if name == "opus" else RATE
    assert headers["content-type"] == TYPES[name]
    assert headers["content-disposition"] == f'inline; filename="speech.{name}"'
    assert headers["x-sample-rate"] == str(rate)
    assert headers.get("x-bit-depth") == ("16" if name in ("wav", "pcm") else None)
    assert int(headers["content-length"]) == len(answer.content)
    seconds = CHUNKS * FRAME / RATE
    assert float(headers["x-audio-duration"]) == pytest.approx(seconds, abs=1e-3)
    assert answer.content.startswith(STARTS.get(name, b""))
    samples, heard_rate = (as_samples(answer.content), RATE) if name == "pcm" else hear(answer.content)
    assert heard_rate == rate
    assert len(samples) / rate == pytest.approx(seconds, abs=0.06)
    assert pitch(middle(samples), rate) == pytest.approx(440, abs=1)
    assert level_db(middle(samples)) == pytest.approx(level_db(as_samples(hum(340, 0) * 10)), abs=1)


@pytest.mark.parametrize(("name", "change"), DELIVERED, ids=str)
def test_every_way_of_delivery_has_the_same_bytes(door: Door, name: str, change: dict[str, Any]) -> None:
    fields = {"response_format": name, **change}
    complete = whole(door, **fields)
    chunked = whole(door, **fields, stream_format="audio")
    events = events_of(whole(door, **fields, stream=True).text)
    assert with_exact_sizes(name, int(chunked.headers["x-sample-rate"]), chunked.content) == complete.content
    assert joined(events) == chunked.content
    if change:
        assert complete.content != whole(door, response_format=name).content


@pytest.mark.parametrize("change", CHANGES[:-1], ids=str)
def test_what_each_field_does(door: Door, change: dict[str, Any]) -> None:
    plain = whole(door, response_format="pcm")
    answer = whole(door, response_format="pcm", **change)
    before, after = as_samples(plain.content), as_samples(answer.content)
    rate = change.get("sample_rate", RATE)
    assert answer.headers["x-sample-rate"] == str(rate)
    assert answer.headers["content-type"] == f"audio/pcm; rate={rate}; channels=1"
    assert len(after) == round(len(before) / change.get("speed", 1) * rate / RATE)
    assert float(answer.headers["x-audio-duration"]) == pytest.approx(len(after) / rate, abs=1e-6)
    assert pitch(middle(after), rate) == pytest.approx(440, abs=2)
    gain = {"volume": -6, "volume_multiplier": -6.02, "normalize_loudness": -3}
    expected = next((gain[name] for name in change if name in gain), 0)
    assert level_db(middle(after)) - level_db(middle(before)) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("rate", [8000, 16000, 24000])
def test_telephone_and_agent_rates(door: Door, rate: int) -> None:
    answer = whole(door, response_format="wav", sample_rate=rate, stream_format="audio")
    samples, heard_rate = hear(answer.content)
    assert (heard_rate, answer.headers["x-sample-rate"]) == (rate, str(rate))
    assert len(samples) == round(CHUNKS * FRAME * rate / RATE)


def test_a_form_may_ask_for_all_of_it(door: Door) -> None:
    form = {
        "input": "Hi.",
        "response_format": "mp3",
        "speed": "1.5",
        "bitrate": "96",
        "normalize_loudness": "false",
        "volume": "2",
    }
    answer = door.http.post("/v1/audio/speech", files={name: (None, value) for name, value in form.items()})
    assert answer.headers["content-type"] == "audio/mpeg"
    assert float(answer.headers["x-audio-duration"]) == pytest.approx(3 * FRAME / RATE / 1.5, abs=1e-3)


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_the_status_waits_for_bytes_and_not_only_for_a_chunk(door: Door, stream_format: str) -> None:
    """The first chunk fills no frame of MP3: a failure after it still is a status."""
    door.service.knobs = Knobs(error=ValueError("secret"), error_at=1)
    answer = door.speak(stream_format=stream_format, response_format="mp3")
    error_of(answer, 500, "internal_error", None)


def test_a_stream_in_mp3_comes_as_it_is_made(door: Door) -> None:
    door.service.knobs = knobs = Knobs(num_chunks=5, held_at=3)
    body = {"input": "Hello.", "stream_format": "audio", "response_format": "mp3"}
    with door.http.stream("POST", "/v1/audio/speech", json=body) as answer:
        parts = answer.iter_raw()
        first = next(parts)  # while the fourth chunk is not made
        knobs.held_at = -1
        assert len(first + b"".join(parts)) > 2 * len(first)


@pytest.mark.parametrize(
    ("fields", "name", "rate"),
    [
        ({}, "wav", 44100),
        ({"model": NATIVE}, "wav", 44100),
        ({"model": "tts-2"}, "wav", 44100),
        ({"response_format": "pcm"}, "pcm", 44100),
        ({"model": "tts-1"}, "mp3", 44100),
        ({"model": "tts-1-hd"}, "mp3", 44100),
        ({"model": "gpt-4o-mini-tts-2025-12-15"}, "mp3", 44100),
        ({"model": "gpt-4o-mini-tts", "response_format": "pcm"}, "pcm", 24000),
        ({"model": "gpt-4o-mini-tts", "response_format": "pcm", "sample_rate": 44100}, "pcm", 44100),
        ({"model": "tts-1", "response_format": "wav"}, "wav", 44100),
        ({"model": "tts-1", "response_format": "opus"}, "opus", 48000),
    ],
)
def test_defaults_follow_the_name_of_the_model(fields: dict[str, Any], name: str, rate: int) -> None:
    output = read_output(fields, RATE, is_openai(fields.get("model", ""), CONFIG))
    assert (output.format, output.sample_rate) == (name, rate)


async def test_other_requests_go_on_while_one_is_encoded(door: Door) -> None:
    """Half a minute of MP3 in one chunk takes half a second of work; life is shown in between."""
    door.service.knobs = Knobs(num_chunks=1, pcm=650 * hum(1, 0))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{door.port}", timeout=LIMIT_S, trust_env=False) as http:
        speech = asyncio.ensure_future(http.post("/v1/audio/speech", json={"input": "Hi.", "response_format": "mp3"}))
        lives = 0
        while not speech.done():
            assert (await http.get("/live")).status_code == 200
            lives += 1
    assert lives > 10  # two or three, if they had to wait
    assert float(speech.result().headers["x-audio-duration"]) > 30
