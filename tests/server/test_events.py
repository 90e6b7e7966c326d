"""Server-sent events: their shape, what they add up to, silences, failures, and a client that leaves."""

import base64
import json
import logging
import time
from typing import Any

import pytest

from duetts.errors import DeadlineExceeded, EngineFailure
from duetts.server import speech
from tests.server.conftest import Door, error_of
from tests.server.sine import FRAME, RATE, Knobs, hum
from tests.waiting import LIMIT_S


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON of every event. Each is one `event:` line and one `data: ` line, and they name the same type."""
    assert text.endswith("\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        assert data.startswith("data: ")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(found: list[dict[str, Any]]) -> bytes:
    return b"".join(base64.b64decode(event["audio"]) for event in found if event["type"] == "speech.audio.delta")


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream_format": "sse"}, {"stream": False, "stream_format": "sse"}])
def test_deltas_and_a_done(door: Door, fields: dict[str, Any]) -> None:
    answer = door.speak(seed=5, response_format="pcm", **fields)
    assert answer.status_code == 200
    headers = answer.headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (headers["cache-control"], headers["x-accel-buffering"], headers["x-seed"]) == ("no-store", "no", "5")
    assert (headers["x-sample-rate"], headers["transfer-encoding"]) == ("44100", "chunked")
    assert "content-length" not in headers
    assert "content-disposition" not in headers
    *deltas, done = events_of(answer.text)
    expected = [
        {"type": "speech.audio.delta", "audio": base64.b64encode(hum(5, index)).decode(), "format": "pcm", "sample_rate": RATE}
        for index in range(3)
    ]
    assert deltas == expected
    details = {"text_tokens": 7, "audio_tokens": 0}
    assert done == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10, "input_token_details": details},
        "finish_reason": "stop",
        "duration": pytest.approx(3 * FRAME / RATE, abs=1e-6),
        "pieces": {"total": 1, "spoken": 1, "redone": [], "suspect": []},
    }


def test_audio_wins_over_stream(door: Door) -> None:
    answer = door.speak(stream=True, stream_format="audio", response_format="pcm")
    assert answer.headers["content-type"].startswith("audio/pcm")
    assert len(answer.content) == 3 * 2 * FRAME


def test_a_wav_header_comes_once(door: Door) -> None:
    found = events_of(door.speak(stream=True, response_format="wav").text)
    assert joined(found[:1])[:4] == b"RIFF"
    assert joined(found).count(b"RIFF") == 1
    assert len(joined(found)) == 44 + 3 * 2 * FRAME


def test_duration_and_rate_are_those_of_the_output(door: Door) -> None:
    *deltas, done = events_of(door.speak(stream=True, response_format="opus", speed=2.0, sample_rate=24000).text)
    assert {(delta["format"], delta["sample_rate"]) for delta in deltas} == {("opus", 24000)}
    assert done["duration"] == pytest.approx(3 * FRAME / RATE / 2, abs=1e-4)


def test_silences_are_filled_with_comments(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "SILENCE_S", 0.05)
    door.service.knobs = knobs = Knobs(num_chunks=2, held_at=1)
    body, text, began = {"input": "Hello.", "stream": True, "response_format": "pcm", "seed": 1}, "", time.monotonic()
    with door.http.stream("POST", "/v1/audio/speech", json=body) as answer:
        for part in answer.iter_text():
            text += part
            if text.count(": keep-alive") == 3:
                knobs.held_at = -1
    blocks = text.split("\n\n")
    assert blocks[0].startswith("event: speech.audio.delta")
    assert 3 <= blocks.count(": keep-alive") <= (time.monotonic() - began) / 0.049
    assert joined(events_of("\n\n".join(blocks))) == hum(1, 0) + hum(1, 1)


@pytest.mark.parametrize(
    ("error", "error_at", "code", "message"),
    [
        (EngineFailure("lost"), 1, "internal_error", "the engine failed"),
        (ValueError("secret"), 2, "internal_error", "an internal error"),
        (DeadlineExceeded("late"), 3, "deadline_exceeded", "late"),
    ],
)
def test_a_failure_after_the_first_audio_is_an_event(
    door: Door, error: Exception, error_at: int, code: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At 3 all chunks were sent, and the failure is the outcome's. The body ends well, since it has said that it did not."""
    door.service.knobs = Knobs(error=error, error_at=error_at)
    with caplog.at_level(logging.INFO, "duetts.server"):
        answer = door.speak(stream=True, response_format="pcm", seed=2)
        assert door.http.get("/live").status_code == 200
    assert answer.status_code == 200
    assert "secret" not in answer.text
    *deltas, last = events_of(answer.text)
    assert [delta["type"] for delta in deltas] == ["speech.audio.delta"] * error_at
    assert joined(deltas) == b"".join(hum(2, index) for index in range(error_at))
    assert (last["type"], last["partial_audio"], last["error"]["code"]) == ("error", True, code)
    assert last["error"]["message"].startswith(message)
    assert last["request_id"] == answer.headers["x-request-id"]
    assert type(error).__name__ in caplog.text
    assert "broken off" not in caplog.text


def test_a_failure_before_the_first_audio_is_a_status(door: Door) -> None:
    door.service.knobs = Knobs(error=EngineFailure("lost"), error_at=0)
    error_of(door.speak(stream=True), 500, "internal_error", None)
    door.service.knobs = Knobs(num_chunks=0)
    error_of(door.speak(stream=True), 500, "empty_generation", None)
    door.service.reset()
    door.refused(400, "out_of_range", "speed", input="Hi.", stream=True, speed=9)


@pytest.mark.parametrize("name", ["pcm", "mp3"])
def test_a_client_that_leaves_ends_the_work(door: Door, name: str) -> None:
    door.service.knobs = Knobs(num_chunks=1000, chunk_wait_s=0.01)
    body = {"input": "Hello.", "stream": True, "response_format": name}
    with door.http.stream("POST", "/v1/audio/speech", json=body) as answer:
        assert next(answer.iter_raw())
    assert door.service.aborted.wait(LIMIT_S)


def test_a_client_that_leaves_in_silence_ends_the_work(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "SILENCE_S", 0.05)
    door.service.knobs = Knobs(num_chunks=2, held_at=1)
    with door.http.stream("POST", "/v1/audio/speech", json={"input": "Hello.", "stream": True}) as answer:
        assert next(answer.iter_raw())
    assert door.service.aborted.wait(LIMIT_S)
