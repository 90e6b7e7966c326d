"""A server of several HTTP processes: this one has the port and the engines, and keeps the others. No torch.

Each HTTP process has a listening socket of its own at the same port, among which the kernel shares connections out (where it
cannot, all have the same one). The sockets are this process's, too: connections to an HTTP process that is started anew wait.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from duetts import serving
from duetts.config import ServerConfig
from duetts.engine import wire
from duetts.engine.remote import RemoteSpeaker, keeping
from duetts.engine.supervisor import END_S
from duetts.serving import HURRIED, Plan, Signals, bind, check_tls, engine_command, first_of, listen, listening, look_for
from duetts.workers.place import WorkerPlace

ANSWERS_S = 2.5  # less than those who ask wait for

log = logging.getLogger("duetts")


def run(plan: Plan) -> int:
    """Serves until SIGTERM or SIGINT, by one process or several. Returns and raises as `serving.serve`."""
    return serving.run(plan) if plan.server.workers == 1 else asyncio.run(serve(plan))


async def serve(plan: Plan) -> int:
    """As `serving.serve`, by several HTTP processes."""
    check_tls(plan.server.tls)
    with listeners(plan.server) as sockets:
        signals = Signals()
        signals.catch()
        return await Keeper(plan, sockets, signals).run()


@contextmanager
def listeners(config: ServerConfig) -> Iterator[list[socket.socket]]:
    """A listening socket for each HTTP process. Raises `ConfigError` as `listen` does."""
    with ExitStack() as stack:
        if config.uds is not None or sys.platform != "linux":
            yield [stack.enter_context(listening(config))] * config.workers
            return
        with bind(config) as alone:  # the only way to learn that nobody else listens there
            own = replace(config, port=alone.getsockname()[1])
        first = stack.enter_context(listen(own, is_shared=True))
        yield [first, *(stack.enter_context(bind(own, is_shared=True)) for _ in range(1, config.workers))]


class Keeper:
    """The engines, the HTTP processes, and what each of them is told of the others."""

    def __init__(self, plan: Plan, sockets: list[socket.socket], signals: Signals) -> None:
        self._plan, self._signals = plan, signals
        self._folder: Path | None = None
        self._speaker: RemoteSpeaker | None = None
        self._workers = [WorkerPlace(index, plan, each, self) for index, each in enumerate(sockets)]

    async def run(self) -> int:
        """Until a signal comes. Returns the exit code; raises what keeps a server from starting."""
        stopped = asyncio.create_task(self._signals.first.wait())
        starting = asyncio.create_task(self._start_engines())
        failing = asyncio.create_task(self._watch_first_starts())  # ends only by what it raises
        try:
            await first_of(starting, stopped, failing)
            if starting.done() and not stopped.done():
                starting.result()
                await first_of(stopped, failing)
            if failing.done() and not stopped.done():
                failing.result()
            return await self._drain()
        finally:
            for task in (stopped, starting, failing):
                task.cancel()
            await asyncio.gather(stopped, starting, failing, return_exceptions=True)
            await asyncio.gather(*(worker.end("hurry") for worker in self._workers))
            if self._speaker is not None:
                await self._speaker.close()

    async def _start_engines(self) -> None:
        plan = self._plan
        self._folder = await look_for(plan)
        engines = keeping(self._folder, plan.engine, plan.processes, engine_command(plan), are_visited=True)
        self._speaker = RemoteSpeaker(engines, plan.engine, plan.processes, self._tell_all)
        await self._speaker.up()
        self._tell_all()

    async def _watch_first_starts(self) -> None:
        """Raises what an HTTP process raised when it could not start; those that have been up are started again for ever."""
        done, _ = await asyncio.wait([worker.first for worker in self._workers], return_when=asyncio.FIRST_EXCEPTION)
        for first in done:
            first.result()
        log.info("%s is ready, by %d HTTP processes", self._plan.model, len(self._workers))
        await asyncio.Event().wait()

    async def _drain(self) -> int:
        """Has the HTTP processes end what is open; a second signal ends them at once."""
        draining = asyncio.create_task(self._drain_all())
        hurried = asyncio.create_task(self._signals.second.wait())
        try:
            await first_of(draining, hurried)
            if not draining.done():
                return HURRIED
            draining.result()
            return 0
        finally:
            draining.cancel()
            hurried.cancel()
            await asyncio.gather(draining, hurried, return_exceptions=True)

    async def _drain_all(self) -> None:
        """Those that have nothing open stay at the port until none has: the kernel goes on giving them connections."""
        for worker in self._workers:
            worker.tell_end("drain")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._plan.processes.drain_s + END_S):
                for worker in self._workers:
                    await worker.drained.wait()
        await asyncio.gather(*(worker.end("release") for worker in self._workers))

    # -- what HTTP processes are told, and ask

    def news(self) -> dict[str, Any]:
        """Where the model is, and how its engines can be reached; empty while there is no model."""
        lives = [] if self._speaker is None else [wire.to_plain(life) for life in self._speaker.lives]
        return {"folder": str(self._folder), "lives": lives} if self._folder is not None else {}

    def _tell_all(self) -> None:
        for worker in self._workers:
            worker.tell_news()

    async def of_speech(self, owner: str, speech_id: str, cancel: bool) -> dict[str, Any] | None:
        """What the HTTP process of that name knows of a speech."""
        place = next((worker for worker in self._workers if worker.name == owner), None)
        return None if place is None else await place.ask("speech", ANSWERS_S, speech_id=speech_id, cancel=cancel)

    async def numbers(self, asking: WorkerPlace) -> dict[str, bytes]:
        """The numbers of the other HTTP processes that answer, by name."""
        others = [worker for worker in self._workers if worker is not asking]
        told = await asyncio.gather(*(worker.ask("numbers", ANSWERS_S) for worker in others))
        return {worker.name: numbers for worker, numbers in zip(others, told, strict=True) if numbers is not None}
