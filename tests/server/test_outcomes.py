"""How speeches ended, asked for by their ids; and ending them by their ids."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from duetts.config import AccessConfig, Limits, ServerConfig
from duetts.errors import CallerLeft, DeadlineExceeded, EngineFailure
from duetts.server.app import create_app
from duetts.server.caller import Caller
from duetts.server.outcomes import KEPT, Outcomes
from tests.server.conftest import Door, error_of
from tests.server.sine import FRAME, RATE, Knobs, SineService
from tests.server.test_failures import open_request, wait_for_request
from tests.waiting import LIMIT_S


def outcome_of(door: Door, speech_id: str) -> dict[str, Any]:
    """Once it is there: a client may have the last byte a moment before the server has settled."""
    deadline = time.monotonic() + LIMIT_S
    while (found := door.http.get(f"/v1/audio/speech/{speech_id}")).status_code == 404 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found.status_code == 200, found.text
    return dict(found.json())


@pytest.mark.parametrize("fields", [{}, {"stream_format": "audio"}, {"stream": True}], ids=["complete", "chunked", "events"])
def test_a_finished_speech_tells_how_it_ended(door: Door, fields: dict[str, Any]) -> None:
    answer = door.http.post(
        "/v1/audio/speech", json={"input": "Hello.", "speed": 2, **fields}, headers={"X-Request-Id": "my-own"}
    )
    speech_id = answer.headers["X-Speech-Id"]
    assert answer.headers["X-Request-Id"] == "my-own"
    assert outcome_of(door, speech_id) == {
        "request_id": speech_id,
        "object": "audio.speech.outcome",
        "finish_reason": "stop",
        "usage": {
            "input_tokens": 7,
            "output_tokens": 3,
            "total_tokens": 10,
            "input_token_details": {"text_tokens": 7, "audio_tokens": 0},
        },
        "duration": pytest.approx(3 * FRAME / RATE / 2, abs=1e-5),
        "pieces": {"total": 1, "spoken": 1, "redone": [], "suspect": []},
        "error": None,
    }
    error_of(door.http.get("/v1/audio/speech/my-own"), 404, "request_not_found", None)


@pytest.mark.parametrize("fields", [{}, {"stream_format": "audio"}, {"stream": True}], ids=["complete", "chunked", "events"])
@pytest.mark.parametrize(
    ("error", "error_at", "reason", "code"),
    [
        (EngineFailure("lost"), 2, "failed", "internal_error"),
        (EngineFailure("lost"), 3, "failed", "internal_error"),
        (DeadlineExceeded("late"), 2, "failed", "deadline_exceeded"),
        (ValueError("secret"), 1, "failed", "internal_error"),
    ],
    ids=["raised", "outcome", "deadline", "fault"],
)
def test_a_failed_speech_tells_why(
    door: Door, error: Exception, error_at: int, reason: str, code: str, fields: dict[str, Any]
) -> None:
    """At 3 all chunks were there, and the failure is the outcome's."""
    door.service.knobs = Knobs(error=error, error_at=error_at)
    try:
        door.speak(**fields)
    except httpx.RemoteProtocolError:
        assert "stream_format" in fields
    told = outcome_of(door, door.service.requests[0].request_id)
    assert (told["finish_reason"], told["error"]["code"]) == (reason, code)
    assert told["usage"]["output_tokens"] == error_at
    assert "secret" not in str(told)


def test_nothing_is_told_before_the_end_or_of_what_never_was(door: Door) -> None:
    door.service.knobs = Knobs(num_chunks=10**6, chunk_wait_s=0.01)
    connection = open_request(door, stream_format="audio")
    wait_for_request(door)
    speech_id = door.service.requests[0].request_id
    error_of(door.http.get(f"/v1/audio/speech/{speech_id}"), 404, "request_not_found", None)
    connection.close()
    told = outcome_of(door, speech_id)
    assert (told["finish_reason"], told["error"]["code"]) == ("aborted", "client_disconnect")
    for path in ("speech-0", "batch", "stream", "%00", "a" * 3000):
        error_of(door.http.get(f"/v1/audio/speech/{path}"), 404, "request_not_found", None)
        error_of(door.http.delete(f"/v1/audio/speech/{path}"), 404, "request_not_found", None)


def test_a_refused_request_leaves_no_outcome(door: Door) -> None:
    assert door.speak("  ").status_code == 400
    error_of(door.http.get(f"/v1/audio/speech/{door.service.requests[0].request_id}"), 404, "request_not_found", None)


@pytest.mark.parametrize(
    "knobs",
    [Knobs(start_wait_s=100), Knobs(chunk_wait_s=100), Knobs(num_chunks=10**6, chunk_wait_s=0.01)],
    ids=["while checked", "before the first chunk", "while speaking"],
)
def test_leaving_is_counted_whatever_was_going_on(door: Door, knobs: Knobs) -> None:
    door.service.knobs = knobs
    before = door.outcomes.counts["client_disconnect"]
    connection = open_request(door)
    wait_for_request(door)
    time.sleep(0.05)
    connection.close()
    told = outcome_of(door, door.service.requests[0].request_id)
    assert told["error"]["code"] == "client_disconnect"
    assert door.outcomes.counts["client_disconnect"] == before + 1
    assert door.outcomes.num_running == 0


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "knobs",
    [Knobs(start_wait_s=100), Knobs(chunk_wait_s=100), Knobs(num_chunks=10**6, chunk_wait_s=0.01)],
    ids=["while checked", "before the first chunk", "while speaking"],
)
def test_a_delete_ends_a_speech(door: Door, knobs: Knobs, streaming: bool) -> None:
    """A request without audio so far gets a status that nobody retries, a stream breaks off."""
    door.service.knobs = knobs
    begun = threading.Event()

    def speak() -> httpx.Response:
        fields = {"input": "Hello.", "stream_format": "audio" if streaming else None}
        with door.http.stream("POST", "/v1/audio/speech", json=fields) as answer:
            begun.set()
            answer.read()
            return answer

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(speak)
        wait_for_request(door)
        if streaming and knobs.num_chunks > 3:
            assert begun.wait(LIMIT_S)  # its status is sent with the first audio
        speech_id = door.service.requests[0].request_id
        answer = door.http.delete(f"/v1/audio/speech/{speech_id}")
        assert answer.json() == {"request_id": speech_id, "object": "audio.speech.cancelled", "cancelled": True}
        assert door.service.aborted.wait(LIMIT_S)
        if streaming and knobs.num_chunks > 3:
            with pytest.raises(httpx.RemoteProtocolError):
                future.result()
        else:
            assert "by its id" in error_of(future.result(), 499, "cancelled", None)
    assert outcome_of(door, speech_id)["error"]["code"] == "cancelled"
    assert door.http.delete(f"/v1/audio/speech/{speech_id}/").json()["cancelled"] is False
    door.service.reset()
    assert door.speak().status_code == 200


def test_a_delete_ends_events_with_an_error(door: Door) -> None:
    door.service.knobs = Knobs(num_chunks=10**6, chunk_wait_s=0.01)
    with door.http.stream("POST", "/v1/audio/speech", json={"input": "Hello.", "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        timer = threading.Timer(0.1, door.http.delete, [f"/v1/audio/speech/{answer.headers['X-Speech-Id']}"])
        timer.start()
        text = "\n".join(lines)
    assert '"code": "cancelled"' in text.replace('":"', '": "')
    assert "speech.audio.done" not in text


async def test_only_the_last_are_kept() -> None:
    outcomes = Outcomes()
    for index in range(KEPT + 3):
        entry = outcomes.begin(f"speech-{index}", Caller())
        entry.end(CallerLeft, CallerLeft("left"), None)
    assert len(outcomes._ended) == KEPT
    assert "speech-2" not in outcomes._ended
    assert outcomes.ended("speech-3")["usage"] is None
    assert outcomes.counts == {"client_disconnect": KEPT + 3}
    assert outcomes.num_running == 0


# -- several servers behind one address


class Others:
    """A server of the name `b2`, where everything is known, as `a1` asks it."""

    name = "a1"

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bool]] = []

    async def ask(self, owner: str, speech_id: str, cancel: bool) -> dict[str, Any] | None:
        self.asked.append((owner, speech_id, cancel))
        return {"request_id": speech_id} if owner == "b2" else None

    async def numbers(self, own: bytes, engines: bytes) -> bytes:
        return own + b"others 1\n" + engines


async def test_a_speech_is_asked_of_the_server_that_its_id_names_and_of_no_other() -> None:
    """And only for those who are let in."""
    others, access = Others(), AccessConfig(("key",))
    app = create_app(SineService(Limits()), ServerConfig(("m",), access=access), peers=others)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    key, path, number = {"Authorization": "Bearer key"}, "/v1/audio/speech", "0" * 32
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as http:
        spoken = await http.post(path, json={"input": "Hello."}, headers=key)
        own = spoken.headers["X-Speech-Id"]
        assert re.fullmatch("speech-a1-[0-9a-f]{32}", own)
        assert (await http.get(f"{path}/{own}", headers=key)).json()["request_id"] == own
        there = f"speech-b2-{number}"
        assert (await http.get(f"{path}/{there}")).status_code == 401
        for unknown in ("x", f"speech-{number}", f"speech-a1-{number}", f"speech-b2-{number}x", f"speech-b2-{number[1:]}"):
            for method in ("GET", "DELETE"):
                assert (await http.request(method, f"{path}/{unknown}", headers=key)).status_code == 404
        assert others.asked == []
        batch = f"speech-batch-b2-{number}-0"
        for method, known in (("GET", there), ("DELETE", there), ("GET", batch)):
            assert (await http.request(method, f"{path}/{known}", headers=key)).json() == {"request_id": known}
        assert (await http.get(f"{path}/speech-c3-{number}", headers=key)).status_code == 404
        told = [("b2", there, False), ("b2", there, True), ("b2", batch, False), ("c3", f"speech-c3-{number}", False)]
        assert others.asked == told
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/metrics", headers=key)).text.count("\nothers 1\n") == 1
