"""What the operator may decide of a request's fields: unknown ones, and the length of instructions."""

from typing import Any

import httpx
import pytest

from duetts.config import Limits, RequestsConfig, ServerConfig
from duetts.server.app import create_app
from tests.server.conftest import NATIVE, error_of
from tests.server.sine import SineService
from tests.server.test_auth import serving


def app(**settings: Any) -> Any:
    return create_app(SineService(Limits()), ServerConfig((NATIVE,), requests=RequestsConfig(**settings)))


def ask(http: httpx.Client, door: str) -> httpx.Response:
    """A request with one field that is unknown, one that has no effect, and one that is honoured."""
    if door == "/v1/audio/speech/batch":
        items = [{"input": "Hello.", "colour": "red"}, {"input": "Hello."}]
        return http.post(door, json={"items": items})
    text = "text" if door == "/v1/tts" else "input"
    hint = "features" if door == "/v1/tts" else "language"
    return http.post(door, json={text: "Hello.", "colour": "red", hint: ["x"] if door == "/v1/tts" else "en", "seed": 1})


@pytest.mark.parametrize(("policy", "listed"), [("warn", "colour, {hint}"), ("ignore", "{hint}")])
@pytest.mark.parametrize(("door", "hint"), [("/v1/audio/speech", "language"), ("/v1/tts", "features")])
def test_unknown_fields_are_listed_or_passed_over(policy: str, listed: str, door: str, hint: str) -> None:
    with serving(app(unknown_fields=policy)) as http:
        answer = ask(http, door)
    assert (answer.status_code, answer.headers["X-Ignored-Fields"]) == (200, listed.format(hint=hint))


def test_unknown_fields_are_refused_on_every_door() -> None:
    with serving(app(unknown_fields="reject")) as http:
        error_of(ask(http, "/v1/audio/speech"), 400, "unsupported_field", "colour")
        assert (ask(http, "/v1/tts").status_code, ask(http, "/v1/tts").json()["code"]) == (400, "unsupported_field")
        first, second = ask(http, "/v1/audio/speech/batch").json()["results"]
        assert (first["error"]["code"], first["error"]["param"], second["status"]) == ("unsupported_field", "colour", "success")
        voice = {"name": "anna", "colour": "red", "consent": "x", "ref_text": "Hello.", "audio_sample": "AAAA"}
        error_of(http.post("/v1/audio/voices", json=voice), 400, "unsupported_field", "colour")
        known = http.post("/v1/audio/speech", json={"input": "Hello.", "language": "en"})
        assert (known.status_code, known.headers["X-Ignored-Fields"]) == (200, "language")


@pytest.mark.parametrize("door", ["/v1/audio/speech", "/v1/audio/speech/batch"])
def test_instructions_are_passed_over_or_refused(door: str) -> None:
    item = {"input": "Hello.", "instructions": "calm"}
    body = {"items": [item]} if door.endswith("batch") else item
    with serving(app(instructions="ignore")) as http:
        answer = http.post(door, json=body)
        shown = answer.json()["results"][0]["ignored_fields"][0] if "items" in body else answer.headers["X-Ignored-Fields"]
        assert shown == "instructions"
    with serving(app(instructions="reject")) as http:
        answer = http.post(door, json=body)
        if "items" in body:
            error = answer.json()["results"][0]["error"]
            assert (error["code"], error["param"]) == ("unsupported_field", "instructions")
        else:
            error_of(answer, 400, "unsupported_field", "instructions")
        assert http.post("/v1/audio/speech", json={"input": "Hello.", "instructions": " "}).status_code == 200


def test_the_length_of_instructions() -> None:
    with serving(app(max_instructions_chars=5)) as http:
        assert http.post("/v1/audio/speech", json={"input": "Hello.", "instructions": "x" * 5}).status_code == 200
        answer = http.post("/v1/audio/speech", json={"input": "Hello.", "instructions": "x" * 6})
        assert "at most 5" in error_of(answer, 400, "input_too_long", "instructions")
