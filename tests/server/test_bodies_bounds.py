"""Bounds on all bodies together: on their bytes, which come back, and on the time that one takes to arrive."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from duetts.config import Limits, ServerConfig
from duetts.server import body
from duetts.server.app import create_app
from tests.server.conftest import NATIVE, error_of
from tests.server.sine import Knobs, SineService
from tests.server.test_auth import serving
from tests.waiting import LIMIT_S, wait_until

SIZE = 1024  # the largest body, so there is room for 32 KiB
BODY = json.dumps({"input": "Hello."}).ljust(SIZE - 1).encode()


@pytest.fixture
def small() -> Iterator[tuple[httpx.Client, SineService]]:
    limits = Limits(max_body_bytes=SIZE)
    service = SineService(limits)
    with serving(create_app(service, ServerConfig((NATIVE,), limits=limits))) as http:
        yield http, service


def upload(http: httpx.Client, sent: int) -> socket.socket:
    """A connection that has sent a part of its body."""
    connection = socket.create_connection((http.base_url.host, http.base_url.port or 80))
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {SIZE}\r\n\r\n"
    connection.sendall(head.encode() + b" " * sent)
    return connection


def speak(http: httpx.Client) -> httpx.Response:
    return http.post("/v1/audio/speech", content=BODY, headers={"Content-Type": "application/json"})


def until(http: httpx.Client, status: int) -> httpx.Response:
    deadline = time.monotonic() + LIMIT_S
    while (answer := speak(http)).status_code != status:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.01)
    return answer


def test_bodies_that_are_held_up_take_bounded_memory(small: tuple[httpx.Client, SineService]) -> None:
    http, _ = small
    held = [upload(http, SIZE - 1) for _ in range(body.LARGEST_AT_ONCE)]
    answer = until(http, 429)
    error_of(answer, 429, "queue_full", None)
    assert int(answer.headers["Retry-After"]) >= 1
    assert http.get("/health").status_code == 200
    for connection in held:
        connection.close()
    until(http, 200)
    for _ in range(3):  # all of it came back
        held = [upload(http, SIZE - 1) for _ in range(body.LARGEST_AT_ONCE - 1)]
        until(http, 200)
        for connection in held:
            connection.close()


def test_what_is_spoken_holds_its_body_until_its_end(small: tuple[httpx.Client, SineService]) -> None:
    http, service = small
    service.knobs = long = Knobs(held_at=1)
    with ThreadPoolExecutor(1) as pool:
        held = [upload(http, SIZE - 1) for _ in range(body.LARGEST_AT_ONCE - 1)]
        spoken = pool.submit(speak, http)
        wait_until(lambda: service.requests)
        service.knobs = Knobs(num_chunks=1)
        until(http, 429)
        for connection in held:
            connection.close()
        long.held_at = -1
        assert spoken.result().status_code == 200
    for _ in range(2 * body.LARGEST_AT_ONCE):
        assert speak(http).status_code == 200


def test_a_body_that_does_not_arrive_is_given_up(
    small: tuple[httpx.Client, SineService], monkeypatch: pytest.MonkeyPatch
) -> None:
    http, _ = small
    with monkeypatch.context() as hurried:
        hurried.setattr(body, "ARRIVAL_S", 0.3)
        with upload(http, 10) as connection:
            connection.settimeout(LIMIT_S)
            answer = b""
            while b"request_timeout" not in answer and (part := connection.recv(65536)):
                answer += part  # head and body need not come together
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"code": "request_timeout"' in answer
    assert speak(http).status_code == 200
