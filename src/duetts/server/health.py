"""Whether the server works, told by progress and not by a process that is there; and the routes that tell it. No torch.

A server is ready after it has spoken: its engine made audio for a text, through everything that a request goes through. An
engine that was started anew has to speak again.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from duetts.config import ServerConfig
from duetts.errors import DuettsError, EmptyGeneration, EngineFailure, NotReady, Overloaded
from duetts.server.metrics import CONTENT_TYPE, Metrics
from duetts.server.peers import Peers
from duetts.service import SpeechService
from duetts.types import SpeechRequest

TEXT = "Hello."  # of the speech that proves the engine
FRAMES = 4
LIMIT_S = 120.0
TRIES = 3  # a model may end before its first frame
VERSION = version("duetts")
LIBRARIES = ("torch", "triton", "numpy", "av")

log = logging.getLogger("duetts.server")


class Health:
    """Used from one event loop. It knows no service until `watch`; `phase` says what is done until then."""

    def __init__(self, watchdog_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.phase = "the model is loading"
        self.draining = False
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._service: SpeechService | None = None
        self._proven: set[tuple[int, ...]] = set()  # engines that have spoken, and in which of their lives
        self._proof: asyncio.Task[None] | None = None
        self._seen: tuple[Any, ...] = ()
        self._moved = clock()  # when somebody last saw progress, or nothing to do

    @property
    def service(self) -> SpeechService | None:
        return self._service

    def watch(self, service: SpeechService) -> None:
        """From now on the state is that of this service."""
        self._service = service
        self._moved = self._clock()

    def sick(self) -> str:
        """Why the server does not work; empty if it does."""
        if self._service is None:
            return self.phase
        stats = self._service.stats()
        if not stats.get("alive", True):
            return f"no engine is up{_whereabouts(stats)}"
        stalled_s = max(stats.get("stalled_s", 0.0), self._standing_s(stats))
        return f"work is open and nothing has moved for {stalled_s:.0f} s" if stalled_s > self._watchdog_s else ""

    def busy(self) -> str:
        """Why a new request would not be taken; empty if it would."""
        if self.draining:
            return "the server is stopping"
        if trouble := self.sick():
            return trouble
        assert self._service is not None, "without a service it is sick"
        if not self._proven & _lives(self._service.stats()):
            self._prove_soon(self._service)
            return "the engine has not spoken yet"
        return "every place is taken" if self._service.stats().get("full", False) else ""

    async def prove(self, service: SpeechService) -> None:
        """Has a few frames spoken. Raises what a request would, `EngineFailure` if nothing comes of several tries."""
        began = self._clock()
        for seed in range(TRIES):
            lives = _lives(service.stats())
            request = SpeechRequest(
                TEXT,
                voice="none",
                seed=seed,
                max_new_tokens=FRAMES,
                timeout_s=LIMIT_S,
                streaming=True,
                request_id="first-words",
            )
            try:
                async with aclosing(await service.start(request)) as speech:
                    num_frames = sum([chunk.num_frames async for chunk in speech])
            except EmptyGeneration:
                continue
            if num_frames:
                self._proven = lives & _lives(service.stats())
                log.info("the engine has spoken %d frames in %.2f s", num_frames, self._clock() - began)
                return
        raise EngineFailure(f"the model has made no audio for {TEXT!r} in {TRIES} tries")

    def _prove_soon(self, service: SpeechService) -> None:
        if self._proof is None or self._proof.done():
            self._proof = asyncio.create_task(self._try_to_prove(service))

    async def _try_to_prove(self, service: SpeechService) -> None:
        try:
            await self.prove(service)
        except (NotReady, Overloaded) as error:
            log.info("the engine could not be tried: %s", type(error).__name__)
        except DuettsError as error:
            log.error("the engine does not speak: %s", type(error).__name__)

    def _standing_s(self, stats: dict[str, Any]) -> float:
        """How long, as far as anybody has looked, work has been open without a step, frame or end anywhere. This also sees
        work that is stuck behind the engine's loop."""
        seen = tuple(
            (each.get("steps"), each.get("frames"), each.get("starts"), sum(each.get("finished", {}).values()))
            for each in stats.get("engines") or [stats]
        )
        now = self._clock()
        if seen != self._seen or not stats.get("open", 0):
            self._seen, self._moved = seen, now
        return now - self._moved


def _lives(stats: dict[str, Any]) -> set[tuple[int, ...]]:
    """The engines that are up, and in which of their lives they and their codec processes are."""
    engines = stats.get("engines")
    if engines is None:
        return {(0, 0)} if stats.get("alive", True) else set()
    up = [each for each in engines if each["state"] == "ready"]
    return {(each["index"], each["starts"], each.get("codec", {}).get("starts", 0)) for each in up}


def _whereabouts(stats: dict[str, Any]) -> str:
    """What the processes of both roles do, in words."""
    told = []
    for each in stats.get("engines") or []:
        told.append(f"engine {each['index']} is {each['state']}")
        if "codec" in each:
            told.append(f"its codec is {each['codec']['state']}")
    return f": {', '.join(told)}" if told else ""


def health_router(health: Health, metrics: Metrics, config: ServerConfig, peers: Peers | None = None) -> APIRouter:
    """/live, /ready, /health, /version, /metrics, and what some clients ask to know a server by."""
    router = APIRouter()
    libraries = {name: _version(name) for name in LIBRARIES}

    @router.get("/live")
    async def live() -> dict[str, str]:
        """200 while the process runs."""
        return {"status": "alive"}

    @router.get("/health")
    async def state() -> JSONResponse:
        """200 while the server works: a model is loaded, an engine is up, and open work makes progress."""
        reason = health.sick()
        if not reason:
            return JSONResponse({"status": "healthy"})
        return JSONResponse({"status": "unhealthy" if health.service else "starting", "reason": reason}, 503)

    @router.get("/v1/health")
    @router.post("/v1/health")
    async def fish_state() -> JSONResponse:
        """The same, as Fish Audio's clients ask for it."""
        return JSONResponse({"status": "ok"}) if not health.sick() else JSONResponse({"status": "unavailable"}, 503)

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """200 while a new request would be taken: the engine has spoken, works, and has a place."""
        reason = health.busy()
        return JSONResponse({"status": "not ready", "reason": reason}, 503) if reason else JSONResponse({"status": "ready"})

    @router.get("/v1/test")
    async def test() -> dict[str, str]:
        """By this a bridge to Home Assistant knows a server whose voices it can list."""
        return {"status": "ok"}

    @router.get("/version")
    async def versions() -> dict[str, Any]:
        """What runs here."""
        return describe(health.service, config) | libraries

    @router.get("/metrics", response_class=Response)
    async def numbers() -> Response:
        """Numbers for Prometheus."""
        own, engines = written(health, metrics)
        told = own + engines if peers is None else await peers.numbers(own, engines)
        return Response(told, 200, {"Content-Type": CONTENT_TYPE})

    return router


def written(health: Health, metrics: Metrics) -> tuple[bytes, bytes]:
    """The numbers as they are now: the server's, and those of its engines."""
    metrics.ready.set(not health.busy())
    return metrics.of_server(), metrics.of_engines()


def describe(service: SpeechService | None, config: ServerConfig) -> dict[str, Any]:
    """What program this is, and what model once it is loaded. The licence is the program's: the weights have their own."""
    found = {"version": VERSION, "licence": "Apache-2.0", "python": ".".join(map(str, sys.version_info[:3]))}
    model: dict[str, Any] = {"model": config.served_model_names[0]}
    if service is not None:
        info = service.info
        model |= {
            "model_type": info.model_type, "weights": info.weights, "device": info.device, "dtype": info.dtype,
            "sample_rate": info.sample_rate, "max_model_len": info.max_model_len, "codec_id": info.codec_id,
            "codec_device": info.codec_device or info.device,
        }  # fmt: skip
    return found | model


def _version(name: str) -> str | None:
    """Without importing it. None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
