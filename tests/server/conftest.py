"""A real server on a free port of the loopback interface, with a humming service behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from duetts.config import MIB, Limits, ServerConfig
from duetts.server.app import create_app
from duetts.server.outcomes import Outcomes
from duetts.serving import KEEP_ALIVE_S
from tests.server.sine import SineService
from tests.waiting import LIMIT_S, wait_until

NATIVE = "fishaudio/s2-pro"
LIMITS = Limits(max_body_bytes=2 * MIB, reference_bytes=MIB)
CONFIG = ServerConfig((NATIVE, "second"), limits=LIMITS)


@dataclass(frozen=True)
class Door:
    """What tests use: the service behind, the port, a client, and what the server keeps."""

    service: SineService
    port: int
    http: httpx.Client
    outcomes: Outcomes

    def speak(self, input: Any = "Hello there.", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/audio/speech", json={"input": input, **fields})

    def refused(self, status: int, code: str | None, field: str | None, **fields: Any) -> str:
        """Asserts that a body is refused so, before it reached the service; returns the message."""
        return error_of(self.http.post("/v1/audio/speech", json=fields), status, code, field)


def error_of(response: httpx.Response, status: int, code: str | None, field: str | None) -> str:
    """Asserts an error of OpenAI's shape, and returns its message."""
    assert response.status_code == status, response.text
    body = response.json()
    error = body["error"]
    assert (error["code"], error["param"]) == (code, field), error
    assert error["type"].endswith("_error")
    assert body["request_id"] == response.headers["X-Request-Id"]
    assert "Traceback" not in response.text
    return str(error["message"])


@pytest.fixture(scope="session")
def served() -> Iterator[Door]:
    service = SineService(LIMITS)
    app = create_app(service, CONFIG)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S, trust_env=False) as http:
        yield Door(service, port, http, app.state.outcomes)
    server.should_exit = True
    thread.join()


@pytest.fixture
def door(served: Door) -> Door:
    """The server, when nothing is left of the test before: not even what is counted a moment after its client has left."""
    wait_until(lambda: not served.outcomes.num_running and not served.service.speaking)
    served.service.reset()
    return served
