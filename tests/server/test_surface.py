"""Paths, methods, ids, health, the description of the interface, and what an import costs."""

import json
import subprocess
import sys

import pytest

from duetts.server.schemas import FIELDS, OPENAI_ALIASES
from tests.server.conftest import NATIVE, Door, error_of


def test_models(door: Door) -> None:
    listed = door.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == [NATIVE, "second", *OPENAI_ALIASES]
    one = door.http.get(f"/v1/models/{NATIVE}").json()
    assert one == listed["data"][0]
    assert one["formats"] == ["wav", "pcm", "mp3", "opus", "flac", "aac"]
    assert (one["root"], one["owned_by"], one["sample_rate"], one["max_input_chars"]) == (NATIVE, "duetts", 44100, 32768)
    assert {model["root"] for model in listed["data"]} == {NATIVE}
    error_of(door.http.get("/v1/models/no/such"), 404, "model_not_found", "model")


def test_health(door: Door) -> None:
    assert door.http.get("/health").json() == {"status": "healthy"}
    assert door.http.get("/live").json() == {"status": "alive"}
    door.service.knobs.alive = False
    answer = door.http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "unhealthy")
    assert door.http.get("/live").status_code == 200


@pytest.mark.parametrize("path", ["/v1/models/", f"/v1/models/{NATIVE}/", "/health/", "/live/"])
def test_a_slash_at_the_end_is_no_redirect(door: Door, path: str) -> None:
    assert door.http.get(path).status_code == 200
    assert door.http.post("/v1/audio/speech/", json={"input": "Hello."}).status_code == 200


def test_unknown_paths_and_methods(door: Door) -> None:
    error_of(door.http.get("/v1/nothing"), 404, "route_not_found", None)
    answer = door.http.get("/v1/audio/speech")
    error_of(answer, 405, "method_not_allowed", None)
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(("sent", "echoed"), [("abc-1._Z", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)])
def test_request_ids(door: Door, sent: str, echoed: bool) -> None:
    for fields in ({"input": "Hello."}, {}):
        answer = door.http.post("/v1/audio/speech", json=fields, headers={"X-Request-Id": sent})
        assert (answer.headers["x-request-id"] == sent) is echoed
    assert door.service.requests[0].request_id.startswith("speech-")


def test_ids_inside_are_unique_even_if_clients_share_one(door: Door) -> None:
    answers = [door.http.post("/v1/audio/speech", json={"input": "Hello."}, headers={"X-Request-Id": "same"}) for _ in range(4)]
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.headers["x-speech-id"] for answer in answers}) == 4


def test_openapi_lists_the_fields(door: Door) -> None:
    described = door.http.get("/openapi.json").json()
    content = described["paths"]["/v1/audio/speech"]["post"]["requestBody"]["content"]
    properties = content["application/json"]["schema"]["properties"]
    assert set(properties) == {name for name, field in FIELDS.items() if field.only is None}
    assert content["multipart/form-data"]["schema"]["required"] == ["input"]


def test_openapi_has_the_bodies_of_all_doors(door: Door) -> None:
    routes = door.http.get("/openapi.json").json()["paths"]
    bodies = {
        (path, method): next(iter(route["requestBody"]["content"].values()))["schema"]["properties"].keys()
        for path, methods in routes.items()
        for method, route in methods.items()
        if "requestBody" in route
    }
    assert "items" in bodies["/v1/audio/speech/batch", "post"]
    assert "text" in bodies["/v1/tts", "post"]
    assert {"id", "audio", "text"} <= bodies["/v1/references/add", "post"]
    assert {"title", "voices", "texts"} <= bodies["/model", "post"]
    assert bodies["/v1/vqgan/decode", "post"] == {"tokens"}
    taking = {(path, method) for path, methods in routes.items() for method in methods if method in ("post", "patch")}
    assert taking - bodies.keys() == {("/v1/health", "post")}


def test_the_server_loads_without_torch() -> None:
    code = (
        "import json, sys, duetts.server.app\n"
        "print(json.dumps([name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'triton')]))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert json.loads(shown) == []
