"""An engine that another process of this server keeps: reached as that process tells, never started or ended. No torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq.asyncio

from duetts.config import ProcessConfig
from duetts.engine.life import Life
from duetts.engine.link import Link
from duetts.engine.supervisor import settle_first
from duetts.errors import EngineFailure
from duetts.types import SpeakerInfo

GONE = ("ending", "restarting", "stopped")  # states, as its keeper tells them, in which it takes nothing new


class Visitor:
    """One engine's place, seen from elsewhere. `changed` is called whenever it may have become able or unable to work."""

    def __init__(self, index: int, config: ProcessConfig, context: zmq.asyncio.Context, changed: Callable[[], None]) -> None:
        self.index = index
        self._config, self._context, self._changed = config, context, changed
        self.life = Life(index)
        self.link: Link | None = None
        self.first: asyncio.Future[SpeakerInfo] = asyncio.get_running_loop().create_future()
        self._is_silent = False  # changes only together with a call of `changed`
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._on_run_end)

    def hear(self, life: Life) -> None:
        """What its keeper tells of it now."""
        self.life = life
        if life.info is not None and not self.first.done():
            self.first.set_result(life.info)
        self._news.set()
        self._changed()

    @property
    def takes_work(self) -> bool:
        """Whether it is ready, here and for its keeper, and has been heard lately."""
        link = self.link
        is_ready = link is not None and not link.failed and link.state == "ready"
        return is_ready and not self._is_silent and self.life.state not in GONE

    @property
    def state(self) -> str:
        """One word for people: the keeper's, unless it is only here that nothing is heard."""
        return "silent" if self.life.state == "ready" and not self.takes_work else self.life.state

    @property
    def pid(self) -> int | None:
        return self.life.pid

    @property
    def starts(self) -> int:
        return self.life.starts

    @property
    def start_s(self) -> float:
        return self.life.start_s

    @property
    def expected_s(self) -> float:
        """Seconds until it may be up; 0 for one that is up and only silent."""
        return max(0.0, self.life.expected_at - time.monotonic())

    async def stop(self) -> None:
        """Ends the visits; the engine lives on."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _on_run_end(self, task: asyncio.Task[None]) -> None:
        settle_first(self.first, task, f"engine {self.index}")
        self._changed()

    async def _run(self) -> None:
        while True:
            if self.life.incarnation:
                await self._visit(self.life)
            await self._listen()

    async def _visit(self, life: Life) -> None:
        """One life of the engine, to its end or that of the link, which the next visit replaces."""
        link = self.link = Link(self._context, life.address, life.incarnation, self._changed)
        self._is_silent = False
        try:
            while self.life.incarnation == life.incarnation and not link.failed:
                link.beat()
                await self._listen()
                is_silent = time.monotonic() - link.heard > self._config.silence_s
                if is_silent != self._is_silent:
                    self._is_silent = is_silent
                    self._changed()
            await link.settle()
            link.fail(EngineFailure(self.life.failure or f"engine {self.index} is gone"))
        finally:
            self.link = None
            await link.close()
            self._changed()

    async def _listen(self) -> None:
        """Until there is news, or it is time for a sign of life."""
        try:
            async with asyncio.timeout(self._config.heartbeat_s):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()
