"""One HTTP process's place: it is started, watched, ended and started again, whatever happens to it. No torch."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import sys
import time
from contextlib import suppress
from typing import Any, Protocol

from duetts.engine import wire
from duetts.engine.supervisor import END_S, FIRST_STARTS, backoff_s, settle_first
from duetts.errors import DuettsError, EngineFailure
from duetts.serving import LAST_WORDS_S, Plan
from duetts.workers.channel import Channel
from duetts.workers.process import Orders

WORKER_COMMAND = (sys.executable, "-P", "-m", "duetts.workers.process")
PING_S = 5.0  # between two questions whether it still answers
STUCK_S = 30.0  # without an answer: longer than anything that holds an event loop

log = logging.getLogger("duetts")


class Office(Protocol):
    """What an HTTP process's place asks of its keeper."""

    def news(self) -> dict[str, Any]:
        """What an HTTP process needs to know; empty while there is nothing."""
        ...

    async def of_speech(self, owner: str, speech_id: str, cancel: bool) -> dict[str, Any] | None:
        """What the HTTP process of that name knows of a speech."""
        ...

    async def numbers(self, asking: WorkerPlace) -> dict[str, bytes]:
        """The numbers of the others, by name."""
        ...


class WorkerPlace:
    """Keeps one HTTP process running until `end`. Then its listening socket is closed here, too: the kernel gives connections
    to the others, if there are any, in place of keeping them for nobody."""

    def __init__(self, index: int, plan: Plan, listener: socket.socket, office: Office) -> None:
        self.name = f"w{index}"
        self._index, self._plan, self._listener, self._office = index, plan, listener, office
        self._channel: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._told: DuettsError | None = None  # why it says that it cannot start
        self._failures = 0  # starts or short lives in a row
        self._starts = 0
        self._ending = asyncio.Event()
        self.drained = asyncio.Event()  # after `drain`: nothing is open in it, or it has ended
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the first time that it is ready
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._on_run_end)

    def tell_news(self) -> None:
        """Tells it what its keeper knows."""
        if self._channel is not None and (news := self._office.news()):
            self._channel.tell("news", **news)

    async def ask(self, kind: str, limit_s: float, **values: Any) -> Any:
        """Its answer; None if there is none."""
        if self._channel is None:
            return None
        try:
            return await self._channel.ask(kind, limit_s, **values)
        except (TimeoutError, ConnectionError):
            return None

    def tell_end(self, how: str) -> None:
        """Has it `drain`, be `release`d from that, or `hurry`. It is not started again."""
        self._ending.set()
        if self._channel is not None:
            self._channel.tell(how)

    async def end(self, how: str) -> None:
        """Has it end now, and kills it if that takes long."""
        self.tell_end(how)
        _, late = await asyncio.wait([self._task], timeout=LAST_WORDS_S + END_S)
        if late:
            log.error("%s did not end in time and is killed", self._who)
            self._kill()
            await asyncio.wait([self._task])

    # -- what it says and asks

    def hear(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "ready":
            if not self.first.done():
                self.first.set_result(None)
        elif kind == "drained":
            self.drained.set()
        elif kind == "failed":
            self._told = wire.error_from_plain(values["error"])
        else:
            raise ValueError(f"{kind} is unknown")

    async def answer(self, kind: str, values: dict[str, Any]) -> Any:
        if kind == "speech":
            return await self._office.of_speech(**values)
        if kind == "numbers":
            return await self._office.numbers(self)
        raise ValueError(f"{kind} is unknown")

    # -- lives

    @property
    def _who(self) -> str:
        return f"HTTP process {self._index}"

    async def _run(self) -> None:
        while not self._ending.is_set():
            began = time.monotonic()
            failure = await self._live()
            if self._ending.is_set():
                return
            if not self.first.done() and (self._told is not None or self._starts >= FIRST_STARTS):
                self.first.set_exception(failure)
                return
            config = self._plan.processes
            self._failures = 0 if time.monotonic() - began > config.steady_s else self._failures + 1
            delay = backoff_s(self._failures, config)
            log.error("%s: %s; it is started again in %.1f s", self._who, failure, delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), delay)

    def _on_run_end(self, task: asyncio.Task[None]) -> None:
        settle_first(self.first, task, self._who)
        self.drained.set()
        if self._ending.is_set():  # in the others, too: where all have the same socket, none inherits it any more
            self._listener.close()

    async def _live(self) -> DuettsError:
        """One life of the process, and why it ended."""
        self._starts += 1
        self._told = None
        own, other = socket.socketpair()
        with other:
            orders = pickle.dumps(Orders(self._index, self._plan, self._listener.fileno(), other.fileno()))
            try:
                process = await asyncio.create_subprocess_exec(
                    *WORKER_COMMAND, stdin=asyncio.subprocess.PIPE, start_new_session=True,
                    pass_fds=[self._listener.fileno(), other.fileno()],
                )  # fmt: skip
            except OSError as error:
                own.close()
                return EngineFailure(f"it cannot be started: {error}")
        channel = await Channel.open(own, self)
        self._process, self._channel = process, channel
        hearing, pinging = asyncio.create_task(channel.run()), asyncio.create_task(self._ping())
        try:
            self.tell_news()
            if self._ending.is_set():  # it was to end before it could be told
                channel.tell("hurry")
            await process.communicate(orders)
            await asyncio.wait([hearing], timeout=LAST_WORDS_S)  # its last words are on the way
            return self._told or EngineFailure(f"it ended with code {process.returncode}")
        finally:
            self._kill()
            self._process = self._channel = None
            for task in (hearing, pinging):
                task.cancel()
            await asyncio.gather(hearing, pinging, return_exceptions=True)
            await channel.close()

    async def _ping(self) -> None:
        """Ends a process that does not answer. Its first answer may take as long as a start."""
        limit_s = self._plan.processes.start_limit_s
        while self._channel is not None:
            try:
                await self._channel.ask("ping", limit_s)
                limit_s = STUCK_S
                await asyncio.sleep(PING_S)
            except TimeoutError:
                log.error("%s has not answered for %g s and is killed", self._who, limit_s)
                self._kill()
                return
            except ConnectionError:
                return

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
