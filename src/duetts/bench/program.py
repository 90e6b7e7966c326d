"""`duetts bench`: workloads one after another against one server, saved as they go. Prints nothing itself."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from duetts.bench import report
from duetts.bench.load import Clients, Point, capacity
from duetts.bench.meanwhile import Meanwhile
from duetts.bench.metrics import Pcm, Run, keeps_up
from duetts.bench.report import Report
from duetts.bench.workloads import PEAK_SHARES, WORKLOADS, Workload, mean_frames
from duetts.conditions import write_json
from duetts.errors import ConfigError

try:
    import uvloop

    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
except ImportError:
    new_event_loop = asyncio.new_event_loop


def run_in_loop(work: Coroutine[Any, Any, None]) -> None:
    """Runs in the fastest event loop that is installed. No collector of garbage stops the clock of an answer that arrives."""
    gc.disable()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


def choose(names: list[str]) -> list[Workload]:
    """The workloads of these names. Raises `ConfigError`."""
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise ConfigError(f"the workload {unknown[0]} is unknown; there are {', '.join(WORKLOADS)} and K")
    return [WORKLOADS[name] for name in names]


def rate_of(share: float, peak: float, pcm: Pcm) -> float:
    """Requests of P a second that make this share of a throughput in audio-s/s."""
    return round(share * peak / (mean_frames() * pcm.frame_length / pcm.rate), 2)


class Program:
    """`loads` take the place of the workloads' own, for all of them. `peak` is the best throughput of T in audio-s/s, which P
    takes shares of; without it the best that was measured before. `meanwhile` is what happens beside each run."""

    def __init__(
        self, clients: Clients, told: Report, tell: Callable[[str], None], *, output: Path | None = None,
        loads: tuple[float, ...] = (), peak: float = 0.0, whole: bool = True, meanwhile: Meanwhile | None = None,
    ) -> None:  # fmt: skip
        self._clients, self._report, self._tell = clients, told, tell
        self._output, self._loads, self._peak, self._whole = output, loads, peak, whole
        self._meanwhile = meanwhile or Meanwhile()

    async def run(self, workloads: list[Workload]) -> None:
        """All of them. Raises `OSError` if the file cannot be written."""
        self._tell(report.heading())
        for workload in workloads:
            if workload.loop == "readers" and len(self._loads) < 2:
                await self._search(workload)
                continue
            stood = []
            for point in self.points(workload):
                runs = await self._measure(point)
                if workload.loop == "readers" and keeps_up(runs, self._clients.pcm):
                    stood.append(point.clients)
            if workload.loop == "readers":
                self._know_capacity(max(stood, default=0))

    def points(self, workload: Workload) -> list[Point]:
        """The loads of a workload."""
        loads = self._loads or workload.loads
        if workload.loop == "poisson" and not self._loads:
            shares = (rate_of(share, self._best(), self._clients.pcm) for share in PEAK_SHARES)
            loads = tuple(sorted({*loads, *shares} - {0.0}))
        return [Point(workload, load, streaming) for streaming in workload.streaming for load in dict.fromkeys(loads)
                if streaming or self._whole]  # fmt: skip

    def _best(self) -> float:
        found = [point["figures"]["audio_s_per_s"][0] for point in self._report.points
                 if point["workload"] == "T" and point["figures"]]  # fmt: skip
        return self._peak or max(found, default=0.0)

    async def _measure(self, point: Point) -> list[Run]:
        await self._clients.warm_up(point)
        runs: list[Run] = []
        for _ in range(self._clients.measure.repeats):
            runs.append(await self._run(point))
            found = self._report.add(point, runs)
            self._save()
        self._tell(report.line(found))
        return runs

    async def _search(self, workload: Workload) -> None:
        point = Point(workload, self._loads[0] if self._loads else workload.loads[0])
        await self._clients.warm_up(point)

        def tell(clients: int, runs: list[Run]) -> None:
            found = self._report.add(Point(workload, clients), runs)
            self._save()
            self._tell(report.line(found))

        self._know_capacity(await capacity(self._clients, self._run, point, tell))

    async def _run(self, point: Point) -> Run:
        return await self._meanwhile.beside(self._clients.run, point)

    def _know_capacity(self, clients: int) -> None:
        self._report.capacity = clients
        self._save()
        self._tell(f"capacity: {clients} listeners")

    def _save(self) -> None:
        if self._output is not None:
            write_json(self._output, self._report.content())
