"""Several client processes that act as one: each has a part of the clients, and their records come together afterwards.

Times are of one clock for all processes of a machine, so that records of different processes can be compared.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from duetts.bench.client import Target
from duetts.bench.load import Clients, Measure, Point, Session, Share
from duetts.bench.metrics import Pcm, Run
from duetts.bench.program import new_event_loop
from duetts.bench.workloads import Asker
from duetts.errors import ConfigError, DuettsError

END_S = 10.0  # until a process that was told to end is killed


@dataclass(frozen=True, slots=True)
class Member:
    """What a client process is to be. `first` is the number of the crew's first request."""

    target: Target
    asker: Asker
    measure: Measure
    first: int
    share: Share

    def session(self) -> Session:
        numbers = itertools.count(self.first + self.share.index, self.share.of)
        return Session(self.target, self.asker, self.measure, numbers, self.share)


@dataclass(frozen=True, slots=True)
class Plan:
    """Who asks what of which servers, from a request's number `first` on, in how many processes."""

    targets: tuple[Target, ...]
    asker: Asker
    measure: Measure
    first: int = 0
    processes: int = 1

    def member(self, index: int) -> Member:
        """One of the processes; those of several servers take turns."""
        target = self.targets[index % len(self.targets)]
        return Member(target, self.asker, self.measure, self.first, Share(index, self.processes))


@contextmanager
def hired(plan: Plan) -> Iterator[Clients]:
    """Its clients; one process alone is this one. Raises `ConfigError` unless each server gets as many processes as another."""
    if plan.processes < 1 or plan.processes % len(plan.targets):
        raise ConfigError(f"--processes is {plan.processes}, no multiple of the {len(plan.targets)} addresses of --url")
    if plan.processes == 1:
        yield plan.member(0).session()
        return
    with Crew(plan) as crew:
        yield crew


class Crew:
    """Client processes. Use it as a context: it ends them."""

    def __init__(self, plan: Plan) -> None:
        self.measure = plan.measure
        self.pcm: Pcm = plan.targets[0].pcm
        spawning = multiprocessing.get_context("spawn")
        self._wires: list[Connection] = []
        self._processes = []
        for index in range(plan.processes):
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=obey, args=(plan.member(index), theirs), daemon=True)
            process.start()
            theirs.close()
            self._wires.append(ours)
            self._processes.append(process)

    async def warm_up(self, point: Point) -> None:
        """As `Session.warm_up`, of all."""
        await self._all("warm_up", point)

    async def run(self, point: Point) -> Run:
        """One repeat. Raises what a client process raised, or `ConnectionError` if one has ended."""
        parts: list[Run] = await self._all("run", point)
        records = [record for part in parts for record in part.records]
        return Run(
            records, point.clients, parts[0].open_loop, tuple(share for part in parts for share in part.processor_shares)
        )

    async def _all(self, what: str, point: Point) -> list[Any]:
        try:
            for wire in self._wires:
                wire.send((what, point))
            found = [await asyncio.to_thread(wire.recv) for wire in self._wires]
        except (EOFError, ConnectionError):
            raise ConnectionError("a client process has ended") from None
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for wire in self._wires:
            wire.close()
        for process in self._processes:
            process.join(END_S if kind is None else 0.1)
            if process.is_alive():
                process.kill()
                process.join()


def obey(member: Member, wire: Connection) -> None:
    """The work of a client process: does what it is told until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other end decides
    gc.disable()
    session = member.session()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        while True:
            try:
                what, point = wire.recv()
                wire.send(runner.run(_done(session, what, point)))
            except (EOFError, ConnectionError):
                return


async def _done(session: Session, what: str, point: Point) -> Any:
    try:
        return await (session.run(point) if what == "run" else session.warm_up(point))
    except (DuettsError, OSError) as error:
        return error
