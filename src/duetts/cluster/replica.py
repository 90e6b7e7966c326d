"""One replica of Ray Serve: a whole server without a port, its engine processes on the GPUs that Ray has given to it.

The application, its engines and the proof that they speak are those of `duetts serve`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from duetts.cluster.door import Door
from duetts.cluster.fleet import read_line
from duetts.cluster.policy import unhealthy
from duetts.config import LogConfig
from duetts.errors import EngineDead, UnknownSpeech
from duetts.server.app import create_app
from duetts.server.health import Health, written
from duetts.server.metrics import Metrics
from duetts.server.peers import numbers_of_all
from duetts.serving import start_synthesizer
from duetts.synthesizer import Synthesizer

OTHERS_S = 3.0  # that the other replicas may take to answer
SILENT_S = 10.0  # without a look at its health a replica is no longer one that gets requests

log = logging.getLogger("duetts.cluster")


class Replica:
    """What Ray Serve starts as an actor. `line` has settings by name, as on a command line or in a file."""

    def __init__(self, line: dict[str, Any]) -> None:
        self._line = line
        self._health: Health | None = None
        self._synthesizer: Synthesizer | None = None
        self._app: FastAPI | None = None
        self._metrics = Metrics()
        self._watch: asyncio.Task[None] | None = None
        self._checked = time.monotonic()  # when Ray last looked at the health
        self._was_up = time.monotonic()  # when an engine was last seen up
        self._underruns = 0
        self._places = 0

    async def __serve_build_asgi_app__(self) -> Door:
        """Ray's name for what makes the application, in the event loop that will run it. Then the replica is ready."""
        plan, notes = read_line(self._line)
        start_log(plan.server.logs)
        for note in notes:
            log.warning("%s", note)
        health = Health(plan.server.watchdog_s)
        self._places = plan.processes.engines * plan.engine.max_num_seqs
        self._metrics.places.set(self._places)
        self._synthesizer = await start_synthesizer(plan, health)
        peers = Others()
        self._app = create_app(self._synthesizer, plan.server, self._metrics, health, peers)
        info = self._synthesizer.info
        log.info("%s (%s weights) is ready on %s as %s", plan.model, info.weights, info.device, peers.name)
        self._health, self._was_up = health, time.monotonic()
        door = Door(self._app)
        self._checked = time.monotonic()
        self._watch = asyncio.create_task(self._watch_draining(door))
        return door

    # -- what Ray asks

    async def check_health(self) -> None:
        """Raises when the replica should be replaced. An engine that is started anew has the time that its start takes."""
        self._checked = time.monotonic()
        if self._health is None or self._synthesizer is None:
            return
        if why := unhealthy(self._health.sick(), self._synthesizer.stats(), self._was_up, self._checked):
            raise EngineDead(why)
        if self._synthesizer.stats().get("alive", True):
            self._was_up = self._checked

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `policy.py` decides by."""
        if self._synthesizer is None:
            return {}
        stats = self._synthesizer.stats()
        underruns, before = int(stats.get("underruns", 0)), self._underruns
        self._underruns = underruns
        return {
            "places": float(self._places),
            "running": float(stats.get("running", 0)),
            "waiting": float(stats.get("waiting", 0)),
            "late": float(stats.get("smallest_buffer_s", 0.0) < 0 or underruns > before),
        }

    # -- what other replicas ask

    async def known(self, owner: str, speech_id: str, cancel: bool) -> dict[str, Any] | None:
        """As `Peers.ask`, if this is the owner: Ray sends it to any replica when that one is gone."""
        if self._app is None or serve.get_replica_context().replica_tag != owner:
            return None
        outcomes = self._app.state.outcomes
        with suppress(UnknownSpeech):
            return dict(outcomes.cancel(speech_id) if cancel else outcomes.ended(speech_id))
        return None

    async def numbers(self, asking: str) -> tuple[str, bytes] | None:
        """This replica's name and numbers, for another one."""
        name = serve.get_replica_context().replica_tag
        return None if self._health is None or name == asking else (name, b"".join(written(self._health, self._metrics)))

    async def __del__(self) -> None:
        """Ray calls this when the replica has drained."""
        if self._watch is not None:
            self._watch.cancel()
        if self._synthesizer is not None:
            await self._synthesizer.close()

    async def _watch_draining(self, door: Door) -> None:
        """Ray does not tell a replica that it drains, but it no longer looks at its health. Idle sockets would hold it up."""
        while True:
            await asyncio.sleep(1.0)
            is_silent = time.monotonic() - self._checked > SILENT_S
            if is_silent and not door.draining.is_set():
                log.info("no more requests are expected: idle sockets end")
                door.draining.set()
            elif not is_silent and door.draining.is_set():
                door.draining = asyncio.Event()  # Ray was slow: sockets that come from now on stay


class Others:
    """The other replicas, as the application of this one asks them: its `Peers`."""

    def __init__(self) -> None:
        self._context = serve.get_replica_context()
        self.name = self._context.replica_tag

    async def ask(self, owner: str, speech_id: str, cancel: bool) -> dict[str, Any] | None:
        """Of the owner alone: `routing.py` knows `known` and its first argument."""
        with suppress(TimeoutError, RayError, RayServeException):
            async with asyncio.timeout(OTHERS_S):
                return await self._handle().known.remote(owner, speech_id, cancel)  # type: ignore[no-any-return]
        return None

    async def numbers(self, own: bytes, engines: bytes) -> bytes:
        told: list[Any] = []
        with suppress(TimeoutError):
            asked = self._handle().broadcast("numbers", self.name)
            told = await asked.results_async(timeout_s=OTHERS_S, return_exceptions=True)
        return numbers_of_all({self.name: own + engines} | dict(one for one in told if isinstance(one, tuple)), "replica")

    def _handle(self) -> Any:
        return serve.get_deployment_handle(self._context.deployment, self._context.app_name)


def start_log(config: LogConfig) -> None:
    """Lines of the replica to its standard error, which Ray keeps, or to the file."""
    root = logging.getLogger("duetts")
    root.setLevel(config.level.upper())
    handler = logging.StreamHandler() if config.file is None else logging.FileHandler(config.file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.handlers = [handler]
    root.propagate = False
