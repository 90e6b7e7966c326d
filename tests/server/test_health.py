"""Life, health and readiness: while loading, from progress, after an engine's restart; and what is told of versions."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from duetts.config import AccessConfig, Limits, ServerConfig
from duetts.errors import EmptyGeneration, EngineFailure, NotReady, Overloaded
from duetts.server.app import create_app, create_waiting_app
from duetts.server.gate import Gate
from duetts.server.health import Health
from duetts.server.metrics import Metrics
from tests.server.conftest import NATIVE, error_of
from tests.server.sine import Knobs, SineService
from tests.server.test_auth import serving
from tests.waiting import until

CONFIG = ServerConfig((NATIVE,))


class Service(SineService):
    """The hum with figures that tests set."""

    figures: dict[str, Any] = {}  # noqa: RUF012

    def stats(self) -> dict[str, Any]:
        return {"alive": True, **self.figures}


def engine(index: int, starts: int = 1, state: str = "ready", **more: Any) -> dict[str, Any]:
    return {"index": index, "starts": starts, "state": state, **more}


@pytest.fixture
def service() -> Service:
    made = Service(Limits())
    made.figures = {}
    return made


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def health(service: Service, clock: list[float]) -> Health:
    made = Health(60, lambda: clock[0])
    made.watch(service)
    return made


# -- readiness -----------------------------------------------------------------------------------------------------------


async def settled(health: Health) -> str:
    """What `busy` says when a proof that it began is over. That may begin the next one."""
    for _ in range(2):
        if health._proof is not None:
            await asyncio.wait([health._proof])
        told = health.busy()
    return told


async def test_ready_after_a_real_synthesis_only(health: Health, service: Service) -> None:
    assert health.sick() == ""
    assert health.busy() == "the engine has not spoken yet"
    assert health.busy() == "the engine has not spoken yet"  # one proof at a time
    assert await settled(health) == ""
    assert [(one.text, one.voice, one.max_new_tokens) for one in service.requests] == [("Hello.", "none", 4)]
    health.draining = True
    assert health.busy() == "the server is stopping"
    assert health.sick() == ""


@pytest.mark.parametrize("error", [EngineFailure("x"), NotReady("x"), Overloaded("x", retry_after_s=1), EmptyGeneration("x")])
async def test_not_ready_while_nothing_comes_of_a_synthesis(health: Health, service: Service, error: Exception) -> None:
    for at in (-1, 0, 1):
        service.knobs = Knobs(error=error, error_at=at)
        assert await settled(health) == "the engine has not spoken yet"
        with pytest.raises(type(error) if not isinstance(error, EmptyGeneration) else EngineFailure):
            await health.prove(service)
    service.knobs = Knobs(num_chunks=0)
    assert await settled(health) == "the engine has not spoken yet"
    with pytest.raises(EngineFailure, match=r"no audio for 'Hello\.' in 3 tries"):
        await health.prove(service)
    service.knobs = Knobs()
    assert await settled(health) == ""


async def test_an_engine_that_was_started_anew_has_to_speak_again(health: Health, service: Service) -> None:
    service.figures = {"engines": [engine(0), engine(1)]}
    assert await settled(health) == ""
    service.figures = {"engines": [engine(0), engine(1, 2, "starting")]}
    assert health.busy() == ""  # the other one goes on
    service.figures = {"engines": [engine(0), engine(1, 2)]}
    assert health.busy() == ""
    service.figures = {"engines": [engine(0, 2), engine(1, 2)]}
    assert health.busy() == "the engine has not spoken yet"
    assert await settled(health) == ""
    assert len(service.requests) == 2


async def test_a_proof_does_not_hold_for_an_engine_that_died_meanwhile(health: Health, service: Service) -> None:
    service.figures = {"engines": [engine(0)]}
    service.knobs = Knobs(chunk_wait_s=0.2)
    proof = asyncio.create_task(health.prove(service))
    await until(lambda: service.requests)
    service.figures = {"engines": [engine(0, 2)]}
    await proof
    assert health.busy() == "the engine has not spoken yet"
    await settled(health)


async def test_full_is_not_ready_and_no_engine_is_sick(health: Health, service: Service) -> None:
    assert await settled(health) == ""
    service.figures = {"full": True}
    assert (health.busy(), health.sick()) == ("every place is taken", "")
    service.figures = {"alive": False}
    assert (health.busy(), health.sick()) == ("no engine is up", "no engine is up")


# -- progress ------------------------------------------------------------------------------------------------------------


async def test_a_loop_that_stands_is_sick(health: Health, service: Service) -> None:
    service.figures = {"stalled_s": 59.0}
    assert health.sick() == ""
    service.figures = {"stalled_s": 61.0}
    assert health.sick() == "work is open and nothing has moved for 61 s"
    assert health.busy() == health.sick()


@pytest.mark.parametrize("moves", ["steps", "frames", "finished", "starts"])
async def test_open_work_must_move_somewhere(health: Health, service: Service, clock: list[float], moves: str) -> None:
    """Also behind the loop, for example in the codec: there `stalled_s` stays 0."""
    moved: dict[str, Any] = {"steps": 5, "frames": 9, "starts": 1, "finished": {"stop": 1}}
    service.figures = {"open": 1, "engines": [engine(0, **moved)]}
    for now in (0.0, 30.0, 60.0):
        clock[0] = now
        assert health.sick() == ""
    clock[0] = 61
    assert health.sick() == "work is open and nothing has moved for 61 s"
    moved[moves] = {"stop": 2} if moves == "finished" else moved[moves] + 1
    service.figures = {"open": 1, "engines": [engine(0, **moved)]}
    assert health.sick() == ""
    clock[0] = 130
    assert health.sick() != ""
    service.figures = {"open": 0, "engines": [engine(0, **moved)]}
    assert health.sick() == ""
    clock[0] = 500
    assert health.sick() == ""
    service.figures = {"open": 1, "engines": [engine(0, **moved)]}
    clock[0] = 501
    assert health.sick() == ""  # new work has its time


# -- over HTTP -----------------------------------------------------------------------------------------------------------


def test_the_answers_of_a_server_at_work() -> None:
    service = Service(Limits())
    with serving(create_app(service, CONFIG)) as http:
        assert http.get("/live").json() == {"status": "alive"}
        assert http.get("/health").json() == {"status": "healthy"}
        first = http.get("/ready")
        assert (first.status_code, first.json()["status"]) == (503, "not ready")
        while http.get("/ready").status_code != 200:
            pass
        assert http.get("/ready").json() == {"status": "ready"}
        for answer in (http.get("/v1/health"), http.post("/v1/health"), http.get("/v1/test"), http.post("/v1/health/")):
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        told = http.get("/version").json()
        assert (told["version"], told["model"], told["model_type"]) == ("0.1.0", NATIVE, "sine")
        assert told["torch"].startswith("2.")
        assert told["licence"] == "Apache-2.0"
        service.figures = {"alive": False}
        for path in ("/health", "/ready", "/v1/health"):
            assert http.get(path).status_code == 503
        assert http.get("/health").json() == {"status": "unhealthy", "reason": "no engine is up"}
        assert http.get("/live").status_code == 200
        service.figures = {}


@pytest.fixture(params=[(), ("a-key",)], ids=["open", "keys"])
def loading(request: pytest.FixtureRequest) -> Iterator[tuple[httpx.Client, Gate, ServerConfig, Metrics, Health]]:
    config = ServerConfig((NATIVE,), access=AccessConfig(request.param))
    metrics, health = Metrics(), Health(60)
    gates: list[Gate] = []

    async def front(scope: Any, receive: Any, send: Any) -> None:
        if not gates:  # the gate belongs to the server's loop
            gates.append(Gate(create_waiting_app(config, metrics, health)))
        await gates[0](scope, receive, send)

    with serving(front) as http:
        http.get("/live")
        yield http, gates[0], config, metrics, health


def test_while_loading(loading: tuple[httpx.Client, Gate, ServerConfig, Metrics, Health]) -> None:
    http, gate, config, metrics, health = loading
    keyed = bool(config.access.keys)
    assert http.get("/live").json() == {"status": "alive"}
    health.phase = "the engine speaks its first words"
    for path in ("/health", "/health/"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()["status"]) == (503, "starting")
        assert answer.json()["reason"] == "the engine speaks its first words"
    assert http.get("/ready").status_code == 503
    assert http.get("/v1/health").status_code == 503
    assert http.get("/version").json()["model"] == NATIVE
    with_key = {"Authorization": "Bearer a-key"}
    numbers = http.get("/metrics", headers=with_key)
    assert (numbers.status_code, "duetts:ready 0.0" in numbers.text) == (200, True)
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/audio/speech"), ("GET", "/"), ("DELETE", "/live")):
        if keyed and path != "/live":
            error_of(http.request(method, path), 401, "invalid_api_key", None)
        answer = http.request(method, path, headers=with_key, json={"input": "Hello."})
        error_of(answer, 503, "not_ready", None)
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers["Connection"] == "close"
    assert http.post("/v1/tts", headers=with_key).json()["statusCode"] == 503
    assert refused_socket(http) == 503
    service = Service(Limits())
    gate.open(create_app(service, config, metrics, health))
    assert http.post("/v1/audio/speech", json={"input": "Hello."}, headers=with_key).status_code == 200
    assert http.get("/health").json() == {"status": "healthy"}
    counted = http.get("/metrics", headers=with_key).text
    assert 'duetts:requests_total{door="speech",reason="not_ready",status="503"} 1.0' in counted
    assert 'duetts:requests_total{door="speech",reason="stop",status="200"} 1.0' in counted


def refused_socket(http: httpx.Client) -> int:
    async def run() -> int:
        with pytest.raises(InvalidStatus) as raised:
            await connect(str(http.base_url).replace("http", "ws").rstrip("/") + "/v1/audio/speech/stream")
        assert int(raised.value.response.headers["Retry-After"]) >= 1
        return raised.value.response.status_code

    return asyncio.run(run())
