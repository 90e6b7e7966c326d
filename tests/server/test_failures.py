"""Errors before and after the first chunk, and clients that leave."""

import json
import logging
import socket
import time
from typing import Any

import httpx
import pytest

from duetts.errors import (
    Aborted,
    DeadlineExceeded,
    DuettsError,
    EmptyGeneration,
    EngineDead,
    EngineFailure,
    NotReady,
    Overloaded,
    StorageFailure,
    StoreUnreachable,
)
from duetts.server import app
from tests.server.conftest import Door, error_of
from tests.server.sine import FRAME, Knobs
from tests.waiting import LIMIT_S, wait_until

ERRORS: list[tuple[Exception, int, str, dict[str, str]]] = [
    (Overloaded("full", retry_after_s=0.2), 429, "queue_full", {"retry-after": "1"}),
    (Overloaded("full", retry_after_s=2.1), 429, "queue_full", {"retry-after": "3"}),
    (NotReady("loading"), 503, "not_ready", {"retry-after": "5"}),
    (EngineDead("no engine is up", retry_after_s=2.5), 503, "engine_dead", {"retry-after": "3"}),
    (Aborted("stopping"), 503, "draining", {"retry-after": "5"}),
    (DeadlineExceeded("too slow"), 504, "deadline_exceeded", {"x-should-retry": "false"}),
    (EmptyGeneration("nothing"), 500, "empty_generation", {"x-should-retry": "false"}),
    (EngineFailure("secret"), 500, "internal_error", {}),
    (StorageFailure("the disk is full"), 500, "internal_error", {"x-should-retry": "false"}),
    (StoreUnreachable("no answer"), 503, "store_unreachable", {"retry-after": "5"}),
    (DuettsError("secret"), 500, "internal_error", {"x-should-retry": "false"}),
    (ValueError("secret"), 500, "internal_error", {"x-should-retry": "false"}),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("error_at", [-1, 0])
@pytest.mark.parametrize(("error", "status", "code", "headers"), ERRORS, ids=lambda value: getattr(type(value), "__name__", ""))
def test_errors_before_audio_have_a_status(
    door: Door, error: Exception, status: int, code: str, headers: dict[str, str], error_at: int, streaming: bool
) -> None:
    door.service.knobs = Knobs(error=error, error_at=error_at)
    answer = door.speak(stream_format="audio" if streaming else None)
    assert "secret" not in error_of(answer, status, code, None)
    assert {name: answer.headers[name] for name in headers} == headers
    door.service.reset()
    assert door.speak().status_code == 200


@pytest.mark.parametrize("streaming", [False, True])
def test_no_audio_at_all_is_an_error(door: Door, streaming: bool) -> None:
    door.service.knobs = Knobs(num_chunks=0)
    error_of(door.speak(stream_format="audio" if streaming else None), 500, "empty_generation", None)


@pytest.mark.parametrize(
    ("error", "error_at"),
    [(EngineFailure("lost"), 1), (ValueError("secret"), 1), (DeadlineExceeded("late"), 2), (EngineFailure("lost"), 3)],
)
def test_a_stream_that_fails_ends_uncleanly(door: Door, error: Exception, error_at: int) -> None:
    """At 3 all chunks were sent, and the failure is the outcome's."""
    door.service.knobs = Knobs(error=error, error_at=error_at)
    body = {"input": "Hello.", "stream_format": "audio", "response_format": "pcm"}
    with door.http.stream("POST", "/v1/audio/speech", json=body) as answer:
        assert answer.status_code == 200
        received, broken = read_what_comes(answer)
    assert broken
    assert len(received) == 2 * FRAME * error_at
    door.service.reset()
    assert door.speak().status_code == 200


def read_what_comes(answer: httpx.Response) -> tuple[bytes, bool]:
    """The body so far, and whether it ended without its end."""
    received = b""
    try:
        for piece in answer.iter_raw():
            received += piece
    except httpx.RemoteProtocolError:
        return received, True
    return received, False


def test_a_whole_body_that_fails_late_is_an_error(door: Door) -> None:
    door.service.knobs = Knobs(error=EngineFailure("lost"), error_at=2)
    error_of(door.speak(), 500, "internal_error", None)
    assert door.service.aborted.is_set()


def open_request(door: Door, path: str = "/v1/audio/speech", **fields: Any) -> socket.socket:
    body = json.dumps({"input": "Hello.", **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", door.port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def wait_for_request(door: Door) -> None:
    wait_until(lambda: door.service.requests)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "knobs",
    [Knobs(start_wait_s=100), Knobs(chunk_wait_s=100), Knobs(num_chunks=10**6, chunk_wait_s=0.01)],
    ids=["while checked", "before the first chunk", "while speaking"],
)
def test_a_client_that_leaves_frees_the_engine(door: Door, knobs: Knobs, streaming: bool) -> None:
    door.service.knobs = knobs
    connection = open_request(door, stream_format="audio" if streaming else None)
    wait_for_request(door)
    time.sleep(0.05)
    assert not door.service.aborted.is_set()
    connection.close()
    assert door.service.aborted.wait(LIMIT_S)
    door.service.reset()
    assert door.speak().status_code == 200


def test_a_client_that_reads_nothing_and_leaves_frees_the_engine(door: Door) -> None:
    door.service.knobs = Knobs(num_chunks=10**6)
    connection = open_request(door, stream_format="audio")
    wait_for_request(door)
    time.sleep(0.3)  # buffers are full, the server waits to write
    assert not door.service.aborted.is_set()
    connection.close()
    assert door.service.aborted.wait(LIMIT_S)


@pytest.mark.parametrize("fields", [{"stream_format": "audio"}, {"stream": True}], ids=["chunked", "events"])
def test_a_client_that_reads_nothing_is_not_waited_for(
    door: Door, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(app, "STALL_S", 0.3)
    door.service.knobs = Knobs(num_chunks=10**6)
    before = door.outcomes.counts["client_disconnect"]
    with open_request(door, **fields):
        assert door.service.aborted.wait(LIMIT_S)
    wait_until(lambda: door.outcomes.counts["client_disconnect"] == before + 1)
    door.service.reset()
    assert door.speak().status_code == 200


def test_a_client_that_leaves_in_the_middle_of_its_body(door: Door) -> None:
    with socket.create_connection(("127.0.0.1", door.port)) as connection:
        connection.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        time.sleep(0.05)
    assert door.speak().status_code == 200


def test_logs_hold_no_user_text(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="duetts.server"):
        door.speak("A private sentence.")
        door.service.knobs = Knobs(error=ValueError("A private sentence."))
        door.speak("A private sentence.")
        door.speak("A private sentence.", voice="private")
    ids = [request.request_id for request in door.service.requests]
    assert any(message.startswith(f"{ids[0]}: stop after 3 frames, 0.00 s") for message in caplog.messages)
    assert any(message.startswith(f"{ids[1]}: ValueError") and "sine.py" in message for message in caplog.messages)
    assert "private" not in caplog.text
