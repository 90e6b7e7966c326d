"""One process's place: it is started, watched, ended and started again, whatever happens to it. No torch. The server has one
for each engine, and an engine one for its codec process.

A life of a process has its own private socket and its own secret, so that nothing of an earlier life can be taken for an
answer of the present one. The socket is held before the process begins, so that its name is gone by then, whoever dies; only
where other processes are to reach it, too, does the name last as long as the life. The process notices by the end of its
standard input that whoever started it is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from duetts.config import EngineConfig, ProcessConfig
from duetts.engine.life import Life, Orders, Role
from duetts.engine.link import Link
from duetts.errors import CheckpointError, ConfigError, DuettsError, EngineFailure, NotEnoughMemory
from duetts.types import SpeakerInfo

ENGINE_COMMAND = (sys.executable, "-P", "-m", "duetts.engine.process")  # -P: no module of the current folder is taken for ours
FATAL = (ConfigError, CheckpointError, NotEnoughMemory)  # of the first start: trying again cannot help
FIRST_STARTS = 3  # of an engine that has never been up
END_S = 10.0  # between the order to end and the kill

log = logging.getLogger("duetts.engine")


class Supervisor:
    """Keeps one process running until `stop`. `changed` is called whenever it may have become able or unable to work."""

    def __init__(
        self,
        index: int,
        folder: Path,
        engine: EngineConfig,
        config: ProcessConfig,
        context: zmq.asyncio.Context,
        changed: Callable[[], None],
        command: Sequence[str] = ENGINE_COMMAND,
        role: Role = "engine",
        is_visited: bool = False,
    ) -> None:
        self.index = index
        self._is_visited = is_visited  # by other processes
        self._address = self._incarnation = self._failure = ""
        self._role, self._name = role, f"{role} {index}"
        self._folder, self._engine, self._config, self._context = folder, engine, config, context
        self._changed = changed
        self._command = command
        self._stopping = asyncio.Event()
        self._failures = 0  # starts or short lives in a row
        self._began = time.monotonic()  # of this life
        self._awake = 0.0  # when this process was last found to have slept
        self._silent = False  # changes only together with a call of `changed`, so that nobody waits for what has passed
        self._ending = False  # the process has ended, or is being ended
        self.link: Link | None = None
        self.info: SpeakerInfo | None = None  # of all lives: the text side relies on it
        self.pid: int | None = None
        self.starts = 0
        self.start_s = 0.0  # how long the last start took
        self.next_start: float | None = None  # while it waits for its next start
        self.first: asyncio.Future[SpeakerInfo] = asyncio.get_running_loop().create_future()  # the first time that it is up
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._on_run_end)

    @property
    def takes_work(self) -> bool:
        """Whether it is ready and has been heard lately."""
        link = self.link
        return link is not None and not link.failed and link.state == "ready" and not self._silent and not self._ending

    @property
    def state(self) -> str:
        """One word for people."""
        if self.link is None:
            return "stopped" if self._stopping.is_set() else "restarting"
        return "ending" if self._ending else "silent" if self._silent else self.link.state

    @property
    def expected_s(self) -> float:
        """Seconds until it may be up, from what its last start took; 0 for one that is up and only silent. An engine without
        its codec process tells when that may be back."""
        now = time.monotonic()
        if self.next_start is not None:
            return max(0.0, self.next_start - now) + self.start_s
        if self.link is None or self.link.ready_at is None:
            return max(0.0, self._began + self.start_s - now)
        if self.link.state == "loading" and not self._ending:
            return float(self.link.stats.get("codec", {}).get("expected_s", self.start_s))
        return 0.0 if self.link.state == "ready" and not self._ending else self.start_s

    @property
    def life(self) -> Life:
        """What others need to know to reach it."""
        reached = (self._address, self._incarnation) if self.link is not None else ("", "")
        expected_at = time.monotonic() + self.expected_s
        return Life(
            self.index, self.state, *reached, self.pid, self.starts, self.start_s, expected_at, self._failure, self.info
        )  # fmt: skip

    async def stop(self) -> None:
        """Ends the process, its requests as aborted, and the watch over it."""
        self._stopping.set()
        await asyncio.gather(self._task, return_exceptions=True)

    # -- lives -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            failure = await self._live()
            if self._stopping.is_set():
                return
            if not self.first.done() and (isinstance(failure, FATAL) or self.starts >= FIRST_STARTS):
                self.first.set_exception(failure)
                return
            self._failures = 0 if time.monotonic() - began > self.start_s + self._config.steady_s else self._failures + 1
            delay = backoff_s(self._failures, self._config)
            log.error("%s: %s; it is started again in %.1f s", self._name, failure, delay)
            self.next_start = time.monotonic() + delay
            self._changed()  # whoever waits may learn that it would be in vain
            await self._pause(delay)
            self.next_start = None

    def _on_run_end(self, task: asyncio.Task[None]) -> None:
        settle_first(self.first, task, self._name)
        self._changed()

    async def _live(self) -> DuettsError:
        """One life of the process, from its start to its end, and why it ended."""
        self.starts += 1
        self._began = time.monotonic()
        try:
            folder = tempfile.TemporaryDirectory(prefix="duetts-", dir=short_folder())
        except OSError as error:
            return EngineFailure(f"{self._name} cannot be started: {error}")
        with folder:
            return await self._live_in(folder)

    async def _live_in(self, folder: tempfile.TemporaryDirectory[str]) -> DuettsError:
        """A life whose socket has its name in a folder."""
        address = self._config.address(self.index) if self._config.listen else f"ipc://{folder.name}/engine"
        incarnation = secrets.token_hex(16)
        link = None
        try:
            with listen_at(address) as listener:
                link = Link(self._context, address, incarnation, self._changed)
                await asyncio.to_thread(select.select, [listener], [], [], END_S)  # until the link holds it, too
                if not self._is_visited:
                    folder.cleanup()
                orders = Orders(
                    self.index, address, listener.fileno(), incarnation, os.getpid(), str(self._folder), self._engine,
                    self._config, self._role,
                )  # fmt: skip
                process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True
                )
        except OSError as error:
            if link is not None:
                await link.close()
            return EngineFailure(f"{self._name} cannot be started: {error}")
        self._address, self._incarnation = address, incarnation
        self.link, self.pid, self._silent, self._ending = link, process.pid, False, False
        try:
            await _give(process, orders)
            failure = await self._watch(process, link)
            self._ending = True
            self._changed()
            loads = self._role == "codec" and link.ready_at is None  # an engine that loads may have a codec process to end
            await self._end(process, gently=failure is None and not loads)
            await link.settle()
            reason = failure or link.error or EngineFailure(f"{self._name} ended with code {process.returncode}")
            told = reason if isinstance(reason, EngineFailure) else EngineFailure(f"{self._name}: {reason}")
            self._failure = str(told)
            link.fail(told)
            return reason
        finally:
            if process.returncode is None:
                _kill(process)
            self.link = self.pid = None
            await link.close()

    async def _watch(self, process: asyncio.subprocess.Process, link: Link) -> DuettsError | None:
        """Until the process ends by itself, must be ended (the reason is returned) or the watch stops."""
        began, tick = self._began, time.monotonic()
        ends = [asyncio.ensure_future(process.wait()), asyncio.ensure_future(self._stopping.wait())]
        try:
            while not any(end.done() for end in ends):
                link.beat()
                await asyncio.wait(ends, timeout=self._config.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
                now = time.monotonic()
                if now - tick > 3 * self._config.heartbeat_s:
                    self._awake = now  # what has come meanwhile is read before anybody is held to be silent
                tick = now
                reason = self._judge(link, began, now)
                if reason is not None:
                    return reason
                self._note(link, began, now)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        return None

    def _judge(self, link: Link, began: float, now: float) -> DuettsError | None:
        """Why the process must be ended, if it must."""
        if link.failed:
            return link.error
        if link.ready_at is None:
            limit = self._config.start_limit_s
            return EngineFailure(f"{self._name} was not ready within {limit:g} s") if now - began > limit else None
        if self.info is not None and replace(link.info or self.info, device="") != replace(self.info, device=""):
            return EngineFailure(f"{self._name} came back as another model: {link.info}")
        silent_s = now - max(link.heard, self._awake)
        if silent_s > self._config.stuck_s:
            return EngineFailure(f"{self._name} was silent for {silent_s:.1f} s")
        return None

    def _note(self, link: Link, began: float, now: float) -> None:
        """Keeps what outlives this life, and tells when the engine falls silent or is heard again."""
        if link.ready_at is not None:
            assert link.info is not None, "an engine that was ready has told what it is"
            self.info = link.info
            self.start_s = link.ready_at - began
            if not self.first.done():
                self.first.set_result(link.info)
            silent = now - max(link.heard, self._awake) > self._config.silence_s
            if silent != self._silent:
                self._silent = silent
                self._changed()

    async def _end(self, process: asyncio.subprocess.Process, gently: bool) -> None:
        """The end of its input ends a process that can still hear; whoever does not is killed."""
        if process.stdin is not None:
            process.stdin.close()
        if not gently:
            _kill(process)
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            log.error("%s did not end within %.0f s and is killed", self._name, END_S)
            _kill(process)
            await process.wait()

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return


def settle_first(first: asyncio.Future[Any], task: asyncio.Task[None], name: str) -> None:
    """When the watch over a process has ended: nobody waits for ever for a first start that will not come."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("%s: its watch has failed", name, exc_info=error)
    if not first.done():
        first.set_exception(error or EngineFailure(f"{name} was stopped before it was up"))
    first.exception()  # seen, also if nobody asks


def backoff_s(failures: int, config: ProcessConfig) -> float:
    """The wait before the next start, after so many short lives in a row."""
    return min(config.restart_max_s, config.restart_s * 2.0 ** min(20, max(0, failures - 1)))


async def _give(process: asyncio.subprocess.Process, orders: Orders) -> None:
    assert process.stdin is not None, "the process was started with a pipe"
    process.stdin.write(orders.pack())
    try:
        await process.stdin.drain()
    except ConnectionError:  # it has ended already, which the watch sees
        return


def _kill(process: asyncio.subprocess.Process) -> None:
    try:
        process.kill()
    except ProcessLookupError:  # it has just ended
        return


def listen_at(address: str) -> socket.socket:
    """A socket that listens at ipc://path or tcp://host:port. Raises `OSError`."""
    scheme, _, place = address.partition("://")
    if scheme == "tcp":
        host, port = place.rsplit(":", 1)
        return socket.create_server((host, int(port)))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    return listener


def short_folder() -> str:
    """A folder for temporary files in which the path of a socket is short enough. Raises `ConfigError`."""
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        path = os.path.join(parent, "duetts-12345678", "engine")
        if len(os.fsencode(path)) <= zmq.IPC_PATH_MAX_LEN and os.access(parent, os.W_OK):
            return parent
    raise ConfigError(f"no folder for temporary files has a path short enough for a socket ({zmq.IPC_PATH_MAX_LEN} bytes)")
