"""One replica of Ray Serve: a whole server without a port, its engine processes on the GPUs that Ray has given to it.

The application, its engines and the proof that they speak are those of `duetts serve`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from ray import serve

from duetts.cluster.door import Answer, Door, Question
from duetts.cluster.fleet import read_line
from duetts.cluster.policy import unhealthy
from duetts.config import LogConfig
from duetts.errors import EngineDead
from duetts.server.app import create_app
from duetts.server.health import Health
from duetts.server.metrics import Metrics
from duetts.serving import Plan, start_synthesizer
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
        self._door: Door | None = None
        self._watch: asyncio.Task[None] | None = None
        self._checked = time.monotonic()  # when Ray last looked at the health
        self._was_up = time.monotonic()  # when an engine was last seen up
        self._underruns = 0
        self._places = 0

    async def __serve_build_asgi_app__(self) -> Door:
        """Ray's name for what makes the application, in the event loop that will run it. Then the replica is ready."""
        settings, notes = read_line(self._line)
        start_log(settings.server.logs)
        for note in notes:
            log.warning("%s", note)
        metrics, health = Metrics(), Health(settings.server.watchdog_s)
        self._places = settings.processes.engines * settings.engine.max_num_seqs
        metrics.places.set(self._places)
        name = settings.name
        plan = Plan(name, settings.model.revision, settings.engine, settings.processes, settings.server)
        self._synthesizer = await start_synthesizer(plan, health)
        app = create_app(self._synthesizer, settings.server, metrics, health)
        info = self._synthesizer.info
        context = serve.get_replica_context()
        log.info("%s (%s weights) is ready on %s as %s", name, info.weights, info.device, context.replica_tag)
        self._health, self._was_up = health, time.monotonic()
        self._door = Door(app, context.replica_tag, self._ask_others)
        self._checked = time.monotonic()
        self._watch = asyncio.create_task(self._watch_draining(self._door))
        return self._door

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

    async def answer(self, question: Question, asking: str) -> Answer | None:
        """This replica's answer to what another one was asked."""
        if self._door is None or serve.get_replica_context().replica_tag == asking:
            return None
        return await self._door.answer(question)

    async def __del__(self) -> None:
        """Ray calls this when the replica has drained."""
        if self._watch is not None:
            self._watch.cancel()
        if self._synthesizer is not None:
            await self._synthesizer.close()

    # -- what it asks

    async def _ask_others(self, question: Question) -> list[Answer]:
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        told: list[Any] = []
        with suppress(TimeoutError):
            asked = handle.broadcast("answer", question, context.replica_tag)
            told = await asked.results_async(timeout_s=OTHERS_S, return_exceptions=True)
        return [one for one in told if isinstance(one, Answer)]

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


def start_log(config: LogConfig) -> None:
    """Lines of the replica to its standard error, which Ray keeps, or to the file."""
    root = logging.getLogger("duetts")
    root.setLevel(config.level.upper())
    handler = logging.StreamHandler() if config.file is None else logging.FileHandler(config.file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.handlers = [handler]
    root.propagate = False
