"""Loads: who asks when. Closed loops, Poisson arrivals, listeners who read as fast as they hear, and a burst.

A load ends with the answers of all that it has asked. Nothing here raises for what a server does: records tell it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from duetts.bench.client import Target, ask
from duetts.bench.metrics import Pcm, Record, Run, keeps_up
from duetts.bench.workloads import Asker, Row, Workload, table

PAUSE_S = 0.2  # of a client after a failure, so that a server that refuses is not hammered
WARM_UP_FRAMES = 43  # at most, in the short form
CONFIRMING = 3  # runs that a capacity must stand
CAPACITY_STEP = 0.06  # how near the search for it comes

Send = Callable[[int, int], Awaitable[Record]]  # client and how many it has had -> what came of it


@dataclass(frozen=True, slots=True)
class Measure:
    """How much is measured. Clients ask until `seconds` have passed and each had `least` answers, but no more than `most`."""

    seconds: float = 60.0
    least: int = 3
    most: int | None = None
    repeats: int = 3
    frames: int = 0  # instead of the workload's own, for small machines
    short: bool = False
    most_clients: int = 1024  # where the search for a capacity ends


@dataclass(frozen=True, slots=True)
class Point:
    """A workload at one load."""

    workload: Workload
    load: float
    streaming: bool = True

    @property
    def clients(self) -> int:
        return 1 if self.workload.loop == "poisson" else round(self.load)


@dataclass(frozen=True, slots=True)
class Share:
    """Which clients of all are a process's own: from number `index` on every `of`-th."""

    index: int = 0
    of: int = 1

    def clients(self, count: int) -> range:
        return range(self.index, count, self.of)


class Clients(Protocol):
    """Whoever asks: a session in this process, or several processes that act as one."""

    @property
    def measure(self) -> Measure: ...

    @property
    def pcm(self) -> Pcm: ...

    async def warm_up(self, point: Point) -> None: ...

    async def run(self, point: Point) -> Run: ...


@dataclass
class Session:
    """One server that is measured. `numbers` of requests go on, so that nothing is ever asked twice."""

    target: Target
    asker: Asker
    measure: Measure = Measure()
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    share: Share = Share()

    @property
    def pcm(self) -> Pcm:
        return self.target.pcm

    async def warm_up(self, point: Point) -> None:
        """At least twice as many requests as there are clients, of other texts. They are thrown away."""
        measure = self.measure
        frames = min(WARM_UP_FRAMES, self._frames(point, table()[0])) if measure.short else 0
        clients = 4 if point.workload.loop == "poisson" else point.clients
        send = self._sender(point, clients, [], frames=frames, paced=False)
        await closed(send, clients, replace(measure, seconds=0, least=2, most=2), share=self.share)

    async def run(self, point: Point) -> Run:
        """One repeat, of this process's clients."""
        records: list[Record] = []
        clients = point.clients
        send = self._sender(point, clients, records)
        loop = point.workload.loop
        began, processor = time.monotonic(), time.process_time()
        if loop == "poisson":
            await poisson(send, point.load, self.measure, seed=next(self.numbers), share=self.share)
        elif loop == "burst":
            await asyncio.gather(*(send(client, 0) for client in self.share.clients(clients)))
        else:
            wait_s = self._frames(point, table()[0]) * self.pcm.frame_length / self.pcm.rate if loop == "readers" else 0.0
            await closed(send, clients, self.measure, wait_s, self.share)
        busy = (time.process_time() - processor) / (time.monotonic() - began) if records else 0.0
        return Run(records, clients, loop == "poisson", (busy,))

    def _frames(self, point: Point, row: Row) -> int:
        return self.measure.frames or point.workload.frames or row.frames

    def _sender(self, point: Point, clients: int, records: list[Record], frames: int = 0, paced: bool | None = None) -> Send:
        slow = point.workload.loop == "readers" if paced is None else paced

        async def send(client: int, turn: int) -> Record:
            due = time.monotonic()
            index = client + turn * clients
            row = table()[index % len(table())]
            asked = frames or self._frames(point, row)
            number = next(self.numbers)
            body, seconds = self.asker.body(point.workload, row, number, asked, point.streaming)
            record = Record(index, client, asked, point.streaming, slow, due, text_chars=row.text_chars, reference_s=seconds)
            records.append(record)
            await ask(self.target, body, record)
            return record

        return send


async def capacity(
    asking: Clients, run: Callable[[Point], Awaitable[Run]], point: Point, tell: Callable[[int, list[Run]], None]
) -> int:
    """The largest number of listeners that the server keeps up with in three runs; 0 if it is none."""

    async def stands(clients: int, runs: int) -> bool:
        at = replace(point, load=clients)
        done = []
        for _ in range(runs):
            done.append(await run(at))
            if not keeps_up(done, asking.pcm):
                break
        tell(clients, done)
        return keeps_up(done, asking.pcm)

    confirming = asking.measure.repeats if asking.measure.short else CONFIRMING
    return await search(stands, point.clients, asking.measure.most_clients, CAPACITY_STEP, confirming)


async def closed(send: Send, clients: int, measure: Measure, spread_s: float = 0.0, share: Share = Share()) -> None:
    """Each client asks again when it has its answer. Their first requests are spread over `spread_s`."""
    deadline = time.monotonic() + measure.seconds + spread_s

    async def client(number: int) -> None:
        await asyncio.sleep(spread_s * number / clients)
        turn = 0
        while (turn < measure.least or time.monotonic() < deadline) and turn != measure.most:
            record = await send(number, turn)
            turn += 1
            if record.error:
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(client(number) for number in share.clients(clients)))


async def poisson(send: Send, rate: float, measure: Measure, seed: int, share: Share = Share()) -> None:
    """Requests come `rate` times a second by chance, whether or not others have ended. Of several processes each sends its
    part of them: what comes by chance in parts comes by chance altogether."""
    generator = np.random.default_rng(seed)
    begin, due = time.monotonic(), 0.0
    asked: list[asyncio.Task[Record]] = []
    turn, most = share.index, math.inf if measure.most is None else measure.most
    while (due < measure.seconds or turn < measure.least) and turn < most:
        await asyncio.sleep(begin + due - time.monotonic())
        asked.append(asyncio.ensure_future(send(0, turn)))
        turn += share.of
        due += generator.exponential(share.of / rate)
    await asyncio.gather(*asked)


async def search(stands: Callable[[int, int], Awaitable[bool]], start: int, most: int, step: float, confirming: int) -> int:
    """The largest number that stands: doubled until it falls, halved in between until it is known to a part `step`, then
    `confirming` runs, going down while these fall. A number falls for good."""
    good, bad, trial = 0, most + 1, max(1, start)
    while trial < bad and await stands(trial, 1):
        good, trial = trial, min(2 * trial, bad - 1) if trial < bad - 1 else bad
    bad = min(bad, trial)
    while bad - good > max(1, int(step * bad)):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if await stands(middle, 1) else (good, middle)
    while good > 0 and not await stands(good, confirming):
        good = min(good - 1, int(good * (1 - step)))
    return good
