"""What /metrics tells: of every door, of how speeches end, of the engine; with few labels, and cheaply."""

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as plain
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from duetts.config import EngineConfig, Limits, LogConfig, ServerConfig
from duetts.engine.inprocess import start_speaker
from duetts.errors import EngineFailure, Overloaded
from duetts.server.app import create_app
from duetts.server.errors import EXCEPTIONS, HTTP_STATUSES
from duetts.server.metrics import DOORS, ENGINE_FIGURES, FRAME_S, SERVER_FIGURES, Metrics, door_of
from duetts.synthesizer import Synthesizer
from duetts.types import Outcome, Pieces, Suspect, Timings
from tests.server.conftest import NATIVE
from tests.server.sine import Knobs, SineService
from tests.server.test_auth import serving
from tests.waiting import LIMIT_S

SECRET = "xylophone"  # in everything that a user may write


class Numbers:
    """What a server tells, by name and labels."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in plain(text)}
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def get(self, name: str, **labels: str) -> float:
        return self.samples.get((f"duetts:{name}", tuple(sorted(labels.items()))), 0.0)


def numbers(http: httpx.Client) -> Numbers:
    answer = http.get("/metrics")
    assert answer.status_code == 200
    return Numbers(answer.text)


@pytest.fixture
def hummed() -> Iterator[tuple[httpx.Client, SineService]]:
    service = SineService(Limits())
    with serving(create_app(service, ServerConfig((NATIVE,)))) as http:
        yield http, service


def speak(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/audio/speech", json={"input": "Hello.", **fields})


def wait_for(http: httpx.Client, count: float, name: str, **labels: str) -> Numbers:
    """What is told when a number is so high, which is after the last byte of an answer."""
    deadline = time.monotonic() + LIMIT_S
    while (told := numbers(http)).get(name, **labels) < count:
        assert time.monotonic() < deadline, (name, labels, told.get(name, **labels))
        time.sleep(0.01)
    return told


# -- doors and ends ------------------------------------------------------------------------------------------------------


def test_requests_by_door_status_and_reason(hummed: tuple[httpx.Client, SineService]) -> None:
    http, service = hummed
    speak(http)
    speak(http, stream_format="audio")
    speak(http, stream_format="sse")
    http.post("/v1/tts", json={"text": "Hello."})
    http.post("/v1/audio/speech/batch", json={"items": [{"input": "One."}, {"input": "Two."}]})
    speak(http, speed=9)
    speak(http, voice="nobody")
    http.get("/v1/nothing")
    http.get("/v1/audio/speech")
    http.post("/v1/audio/speech", content=b"x", headers={"Content-Type": "text/plain"})
    service.knobs = Knobs(error=Overloaded("full", retry_after_s=1), error_at=0)
    speak(http)
    service.knobs = Knobs(error=EngineFailure("x"), error_at=0)
    speak(http)
    service.knobs = Knobs(error=EngineFailure("x"), error_at=2)
    with pytest.raises(httpx.RemoteProtocolError):
        speak(http, stream_format="audio")
    speak(http, stream_format="sse")
    told = wait_for(http, 2, "requests_total", door="speech", status="200", reason="internal_error")
    for (door, status, reason), count in {
        ("speech", "200", "stop"): 3,
        ("fish", "200", "stop"): 1,
        ("batch", "200", ""): 1,
        ("speech", "400", "out_of_range"): 1,
        ("speech", "400", "unknown_voice"): 1,
        ("other", "404", "route_not_found"): 1,
        ("speech", "405", "method_not_allowed"): 1,
        ("speech", "415", "unsupported_media_type"): 1,
        ("speech", "429", "queue_full"): 1,
        ("speech", "500", "internal_error"): 1,
        ("speech", "200", "internal_error"): 2,
    }.items():
        assert told.get("requests_total", door=door, status=status, reason=reason) == count, (door, status, reason)
    assert told.get("speeches_total", door="speech", reason="stop") == 3
    assert told.get("speeches_total", door="batch", reason="stop") == 2
    assert told.get("speeches_total", door="fish", reason="stop") == 1
    assert told.get("speeches_total", door="speech", reason="internal_error") == 3
    assert told.get("speeches_total", door="speech", reason="queue_full") == 0  # it never began
    listeners = [told.get("ttfa_seconds_count", door=door) for door in ("speech", "fish", "batch")]
    assert listeners == [4, 1, 0]  # complete answers have no listener
    assert told.get("e2e_seconds_count", door="batch") == 2
    assert told.get("rtf_count", door="speech") == 3
    assert told.get("queue_seconds_count") >= 6
    assert told.get("underrun_seconds_count") == 3
    assert told.get("inter_chunk_seconds_count") == 3 * 2 + 2 * 1
    assert told.get("audio_seconds_total") == pytest.approx((6 * 3 + 2 * 2) * 2048 / 44100, rel=0.02)


def test_sockets_are_counted_and_what_is_spoken_on_them_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(SineService(Limits()), ServerConfig((NATIVE,)))

    async def talk(address: str) -> str:
        async with connect(address + "/v1/audio/speech/stream", additional_headers={"X-Request-Id": "mine"}) as socket:
            for text in ("One.", "Two."):
                await socket.send(json.dumps({"type": "session.config"}))
                await socket.send(json.dumps({"type": "input.text", "text": text}))
                await socket.send(json.dumps({"type": "input.done"}))
                while "session.done" not in str(await socket.recv()):
                    pass
            assert socket.response is not None
            return str(socket.response.headers["X-Request-Id"])

    async def knock(address: str) -> int:
        with pytest.raises(InvalidStatus) as raised:
            await connect(address + "/v1/audio/speech/stream", additional_headers={"Origin": "https://page.example"})
        return raised.value.response.status_code

    with caplog.at_level(logging.INFO, "duetts.requests"), serving(app) as http:
        address = str(http.base_url).replace("http", "ws").rstrip("/")
        assert asyncio.run(talk(address)) == "mine"
        assert asyncio.run(knock(address)) == 403
        told = wait_for(http, 1, "requests_total", door="socket", status="101", reason="")
        assert told.get("requests_total", door="socket", status="403", reason="origin_not_allowed") == 1
        assert told.get("speeches_total", door="socket", reason="stop") == 2
        assert told.get("ttfa_seconds_count", door="socket") == 2
    lines = [record.getMessage().split(": ")[1] for record in caplog.records if record.name == "duetts.requests"]
    assert {line.rsplit(" ", 2)[0] for line in lines} == {
        "SOCKET /v1/audio/speech/stream 101 -", "SOCKET (no route) 403 origin_not_allowed"
    }  # fmt: skip


def test_a_client_that_leaves_is_counted_once(hummed: tuple[httpx.Client, SineService]) -> None:
    http, service = hummed
    assert numbers(http).samples["duetts:stream_aborted_total", (("reason", "client_disconnect"),)] == 0
    service.knobs = Knobs(num_chunks=1000, chunk_wait_s=0.01)
    with http.stream("POST", "/v1/audio/speech", json={"input": "Hello.", "stream_format": "audio"}) as answer:
        next(answer.iter_raw())
    told = wait_for(http, 1, "requests_total", door="speech", status="200", reason="client_disconnect")
    assert told.get("stream_aborted_total", reason="client_disconnect") == 1
    assert told.get("speeches_total", door="speech", reason="client_disconnect") == 1
    with http.stream("POST", "/v1/audio/speech", json={"input": "Hello.", "stream_format": "audio"}) as answer:
        http.delete(f"/v1/audio/speech/{answer.headers['X-Speech-Id']}")
        with pytest.raises(httpx.RemoteProtocolError):
            answer.read()
    told = wait_for(http, 1, "requests_total", door="speech", status="200", reason="cancelled")
    assert told.get("stream_aborted_total", reason="cancelled") == 1


def test_pieces_that_are_not_what_they_should_be() -> None:
    metrics = Metrics()
    pieces = Pieces(5, 5, (1, 2), (Suspect(1, "too_short"), Suspect(2, "length"), Suspect(3, "length")))
    metrics.ended("length", Outcome("length", 9, 7, Timings(1, 2, 3, 4, 0.01), None, pieces), 2.0, True, 0.05)
    told = Numbers(metrics.written().decode())
    assert told.get("pieces_retried_total") == 2
    assert told.get("pieces_suspect_total", why="length") == 2
    assert told.get("pieces_suspect_total", why="too_short") == 1
    assert told.get("rtf_sum", door="other") == 2.0
    assert told.get("queue_seconds_sum") == 1.0


def test_edges_stand_around_one_frame() -> None:
    metrics = Metrics()
    for histogram in (metrics.first_audio_s, metrics.gap_s, metrics.underrun_s, metrics.queue_s):
        edges = histogram._upper_bounds
        assert any(abs(edge - FRAME_S) < 1e-9 for edge in edges)
        assert sum(0 < edge < FRAME_S for edge in edges) >= 2
        assert sum(FRAME_S < edge <= 4 * FRAME_S for edge in edges) >= 2
    assert 1.0 in metrics.rtf._upper_bounds


# -- labels --------------------------------------------------------------------------------------------------------------


def test_no_label_and_no_log_has_what_users_write(caplog: pytest.LogCaptureFixture) -> None:
    service = SineService(Limits())
    with caplog.at_level(logging.DEBUG, "duetts"), serving(create_app(service, ServerConfig((NATIVE,)))) as http:
        for path in (f"/{SECRET}", f"/v1/audio/voices/{SECRET}", f"/v1/audio/speech/{SECRET}", f"/v1/models/{SECRET}"):
            for method in ("GET", "DELETE", "POST", SECRET.upper()):
                http.request(method, f"{path}?{SECRET}={SECRET}", headers={SECRET: SECRET, "X-Request-Id": SECRET})
        for fields in ({"model": SECRET}, {"voice": SECRET}, {SECRET: SECRET}, {"input": SECRET}, {"response_format": SECRET}):
            speak(http, **fields)
            http.post("/v1/tts", json={"text": SECRET, "format": SECRET, **fields})
        service.knobs = Knobs(error=RuntimeError(SECRET), error_at=1)
        speak(http, input=SECRET)
        told = http.get("/metrics").text
    assert SECRET not in told.lower()
    assert SECRET not in "\n".join(record.getMessage() for record in caplog.records).lower()
    assert [record for record in caplog.records if record.name == "duetts.requests"]


def test_labels_have_few_values(hummed: tuple[httpx.Client, SineService]) -> None:
    http, _ = hummed
    for index in range(50):
        http.get(f"/v1/audio/voices/v{index}")
        http.get(f"/p{index}")
        http.delete(f"/v1/audio/speech/s{index}")
        http.request(f"M{index}", "/live")
    series = [key for key in numbers(http).samples if key[0] == "duetts:requests_total"]
    assert len(series) < 10
    codes = {kind.code for kind in (*EXCEPTIONS.values(), *HTTP_STATUSES.values())}
    assert None in codes  # an InvalidRequest's own, which is a word of our source


@pytest.mark.parametrize(
    ("path", "door"),
    [
        *DOORS.items(),
        ("/v1/audio/speech/speech-1", "other"),
        ("/v1/audio/voices", "voices"),
        ("/v1/audio/voice_consents/x", "voices"),
        ("/v1/references/list", "voices"),
        ("/model/x", "voices"),
        ("/v1/models/a/b", "models"),
        ("/v1/audio/models", "models"),
        ("/v1/vqgan/encode", "codec"),
        ("/metrics", "health"),
        ("/v1/test", "health"),
        ("/", "other"),
        ("/modelling", "voices"),
    ],
)
def test_doors(path: str, door: str) -> None:
    assert door_of(path) == door


# -- lines of the log ----------------------------------------------------------------------------------------------------


def test_each_request_has_a_line_with_its_route(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(SineService(Limits()), ServerConfig((NATIVE,)))
    with caplog.at_level(logging.DEBUG, "duetts.requests"), serving(app) as http:
        spoken = speak(http).headers["X-Speech-Id"]
        http.get(f"/v1/audio/voices/{SECRET}")
        http.get("/nothing")
        http.get("/live")
    lines = [(record.levelname, re.sub(r"[0-9.]+ s$", "T s", record.getMessage())) for record in caplog.records]
    assert (lines[0][0], lines[0][1]) == ("INFO", f"{spoken}: POST /v1/audio/speech 200 stop T s")
    assert re.fullmatch(r"speech-\w+: GET /v1/audio/voices/\{name:path\} 404 voice_not_found T s", lines[1][1])
    assert re.fullmatch(r"speech-\w+: GET \(no route\) 404 route_not_found T s", lines[2][1])
    assert lines[3][0] == "DEBUG"


def test_lines_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(SineService(Limits()), ServerConfig((NATIVE,), logs=LogConfig(requests=False)))
    with caplog.at_level(logging.DEBUG, "duetts.requests"), serving(app) as http:
        speak(http)
    assert not [record for record in caplog.records if record.name == "duetts.requests"]


# -- the engine ----------------------------------------------------------------------------------------------------------


def test_figures_of_a_real_engine(tiny_folder: Path) -> None:
    speaker = start_speaker(tiny_folder, EngineConfig(device="cpu", cpu_threads=1))
    synthesizer = Synthesizer(tiny_folder, speaker, Limits(max_new_tokens=60))
    try:
        with serving(create_app(synthesizer, ServerConfig((NATIVE,)))) as http:
            assert speak(http, seed=3, voice="none").status_code == 200
            assert speak(http, seed=3, voice="none", stream_format="audio").status_code == 200
            told = wait_for(http, 2, "speeches_total", door="speech", reason="stop")
            text = http.get("/metrics").text
            assert {f"duetts:{figure.name}" for figure in ENGINE_FIGURES if figure.key != "starts"} <= told.families.keys()
            stats = synthesizer.stats()
            assert [figure.key for figure in ENGINE_FIGURES if figure.key not in (*stats, "starts")] == []
            # The readiness check speaks beside these requests, so figures may move on between two looks.
            assert 0 < told.get("frames_generated_total", engine="0") <= stats["frames"]
            assert told.get("kv_pages", engine="0") == stats["pages"]
            assert told.get("engine_up", engine="0") == 1
            assert told.get("engine_finished_total", engine="0", reason="stop") == 2
            assert told.get("num_requests_running", engine="0") <= 1
            assert told.samples["process_resident_memory_bytes", ()] > 1e7
            assert told.samples[
                "duetts:build_info",
                (("device", "cpu"), ("dtype", "float32"), ("model", NATIVE), ("version", "0.1.0"), ("weights", "untrained")),
            ] == 1  # fmt: skip
            assert 'engine="0"' in text
    finally:
        asyncio.run(synthesizer.close())


class Remote(SineService):
    """With the figures of two engine processes, as `RemoteSpeaker` gives them."""

    def stats(self) -> dict[str, Any]:
        up = {"index": 0, "state": "ready", "pid": os.getpid(), "starts": 1, "running": 3, "finished": {"stop": 7, "length": 1}}
        down = {"index": 1, "state": "starting", "pid": None, "starts": 2}
        return {"alive": True, "full": False, "engines_up": 1, "restarts": 1, "reference_hits": 4, "engines": [up, down]}


def test_figures_of_engine_processes() -> None:
    with serving(create_app(Remote(Limits()), ServerConfig((NATIVE,)))) as http:
        told = numbers(http)
    assert [told.get("engine_up", engine=engine) for engine in "01"] == [1, 0]
    assert [told.get("engine_starts_total", engine=engine) for engine in "01"] == [1, 2]
    assert told.get("num_requests_running", engine="0") == 3
    assert ("duetts:num_requests_running", (("engine", "1"),)) not in told.samples
    assert told.get("engine_finished_total", engine="0", reason="stop") == 7
    assert told.get("engine_memory_bytes", engine="0") > 1e7
    assert (told.get("engines_up"), told.get("engine_restarts_total"), told.get("reference_cache_hit_total")) == (1, 1, 4)


def test_every_figure_of_the_server_is_one_that_the_synthesizer_or_the_remote_speaker_gives() -> None:
    source = "".join(
        (Path(__file__).parents[2] / "src" / "duetts" / name).read_text() for name in ("synthesizer.py", "engine/remote.py")
    )
    assert [figure.key for figure in (*SERVER_FIGURES, ENGINE_FIGURES[-1]) if f'"{figure.key}"' not in source] == []


# -- the form ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain;version=1.0.0", "application/openmetrics-text;version=1.0.0"])
def test_whatever_is_asked_for_the_form_can_be_read(hummed: tuple[httpx.Client, SineService], accept: str) -> None:
    http, _ = hummed
    speak(http, stream_format="audio")
    answer = http.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(plain(answer.text))
    assert {family.name for family in families} >= {"duetts:requests", "duetts:ttfa_seconds", "duetts:ready"}
    for family in families:
        assert family.documentation, family.name
        assert family.type != "unknown", family.name
        assert family.name.startswith(("duetts:", "process_"))


def test_the_documentation_names_every_number_with_its_labels() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(duetts:\w+)`(?: \{([\w, ]+)\})? \|", text, re.MULTILINE))
    metrics, labels = Metrics(), {}
    engine = {figure.key: 1 for figure in ENGINE_FIGURES} | {"state": "ready", "pid": os.getpid(), "finished": {"stop": 1}}
    engine["codec"] = {"state": "ready", "pid": os.getpid(), "starts": 1}
    metrics.watch(lambda: {"engines": [engine]} | {figure.key: 1 for figure in SERVER_FIGURES})
    metrics.answered("speech", 200, "stop")
    metrics.build.labels("1", "m", "trained", "cpu", "float32").set(1)
    pieces = Pieces(2, 2, (), (Suspect(1, "length"),))
    metrics.ended("stop", Outcome("stop", 9, 7, Timings(1, 2, 3, 4, 0.01), None, pieces), 2.0, True, 0.05)
    for family in (*metrics.registry.collect(), *metrics.engines.collect()):
        if family.name.startswith("duetts:"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels[name] = ", ".join(sorted(family.samples[0].labels.keys() - {"le", "engine"}))
    assert {name: ", ".join(sorted(shown.split(", "))) if shown else "" for name, shown in listed.items()} == labels


def test_two_servers_of_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.answered("speech", 200, "stop")
    assert b'duetts:requests_total{door="speech"' not in second.written()
