"""Runs the simulations behind docs/scheduling.md and writes what they say as JSON.

    python -m benchmarks.sim.run [--sections curves capacities causes fleets constants] [--processes N] [--output FILE]

Every number is a function of the code and the seeds. Say `--sections` to run a part of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.sim.gpu import BLOCK, ROWS, SLOTS
from benchmarks.sim.listeners import Load
from benchmarks.sim.model import Card
from benchmarks.sim.policies import (
    DEADLINE,
    FCFS,
    REFUSING,
    SHORTEST_QUEUE,
    FixedChunks,
    Policy,
    by_arrival,
    constants,
    least_work,
)
from benchmarks.sim.results import WARM_S, WINDOW_S, Result, simulate

RESULTS = Path(__file__).parents[1] / "results" / "simulation.json"
LONG_S = 60.0
BATCH = 64  # clients who fetch complete answers, of one device

# What is asked for, of one device.
SCENARIOS: dict[str, Load] = {
    "listeners": Load(0),
    "Poisson arrivals": Load(0, arrivals="poisson"),
    "half interrupted": Load(0, interrupted=0.5),
    "with 32 batch clients": Load(0, batch_clients=32),
    "with 64 batch clients": Load(0, batch_clients=BATCH),
    "with 128 batch clients": Load(0, batch_clients=128),
}

# First come, first served as peers do it and with small chunks; ours with one part taken away.
CAUSES = [
    replace(FCFS, name="first come, first served, chunks of 16", chunks=FixedChunks(16, 16)),
    replace(FCFS, name="first come, first served, chunks of 4", chunks=FixedChunks(4, 4)),
    FCFS,
    replace(FCFS, name="first come, first served, our chunks", chunks=DEADLINE.chunks),
    replace(DEADLINE, name="deadline, by arrival instead", order=by_arrival),
    replace(DEADLINE, name="deadline, complete answers not told apart", tells_apart=False),
    replace(DEADLINE, name="deadline, chunks of 8", chunks=FCFS.chunks),
    replace(DEADLINE, name="deadline, nobody stands back", stands_back=False),
    replace(DEADLINE, name="deadline, everybody let in", admits_by_lateness=False),
    DEADLINE,
]

VARIATIONS: list[dict[str, float]] = [
    {}, {"SHARE": 0.8}, {"SHARE": 0.9}, {"SHARE": 0.95}, {"COMFORT_S": 1.0}, {"COMFORT_S": 4.0}, {"NEED_S": 0.1},
    {"NEED_S": 0.5}, {"OPENING_FRAMES": 2}, {"OPENING_FRAMES": 8}, {"BRISK": 0.3}, {"BRISK": 0.7},
    {"MAX_STREAMS": 64}, {"MAX_CALLS": 1}, {"SAFETY": 1.0}, {"SAFETY": 2.0},
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation."""

    section: str
    scenario: str
    load: Load
    policy: Policy
    num_gpus: int = 1
    warm_s: float = WARM_S
    window_s: float = WINDOW_S
    constants: dict[str, float] = field(default_factory=dict)

    def run(self) -> Result:
        with constants(**self.constants):
            return simulate(
                self.load, self.policy, self.num_gpus, scenario=self.scenario, warm_s=self.warm_s, window_s=self.window_s
            )


@dataclass(frozen=True, slots=True)
class Search:
    """The largest number of listeners, in steps of `step`, that a policy carries (`Result.holds`): bisection from `low`."""

    point: Point
    low: int
    high: int
    step: int

    def run(self) -> tuple[int, list[Result]]:
        """0 if even `low` is too many."""
        low, high, results = self.low - self.step, self.high + self.step, []
        while high - low > self.step:
            middle = low + (high - low) // (2 * self.step) * self.step
            result = replace(self.point, load=replace(self.point.load, listeners=middle)).run()
            results.append(result)
            low, high = (middle, high) if result.holds else (low, middle)
        return (low if low >= self.low else 0), results


Work = Point | Search


def curves() -> Iterator[Work]:
    """Offered listeners against those served well, on one device."""
    for name in ("listeners", "with 64 batch clients"):
        for policy in (FCFS, DEADLINE, REFUSING):
            for listeners in (100, 200, 280, 340, 400, 430, 460, 500, 560, 640):
                if policy is not REFUSING or listeners >= 430:
                    yield Point("curves", name, replace(SCENARIOS[name], listeners=listeners), policy)


def capacities() -> Iterator[Work]:
    """The most listeners of one device, by what else is asked of it. Buffers of 2 s hide an overload for a while: therefore a
    long window."""
    for name, load in SCENARIOS.items():
        yield Search(Point("capacities", name, load, FCFS, window_s=LONG_S), 200, 460, 10)
        yield Search(Point("capacities", name, load, DEADLINE, window_s=LONG_S), 420, 490, 10)


def causes() -> Iterator[Work]:
    """One device with some parts of the policy: within its capacity beside batch clients, with half of the listeners
    interrupting, and in an overload."""
    for policy in CAUSES:
        for name, listeners in (("with 64 batch clients", 300), ("with 64 batch clients", 420), ("half interrupted", 440)):
            yield Point("causes", name, replace(SCENARIOS[name], listeners=listeners), policy)
        yield Point("causes", "listeners", Load(540), policy, window_s=LONG_S)


def fleets() -> Iterator[Work]:
    """Several devices with many voices: by turns, to the shortest queue, by work and voice, by work alone."""
    for num_gpus in (2, 4, 8):
        for each in (340, 420, 625) if num_gpus == 8 else (340, 420):
            load = Load(each * num_gpus, batch_clients=32 * num_gpus, voices=1000)
            for policy in (FCFS, SHORTEST_QUEUE, DEADLINE, replace(DEADLINE, name="deadline, least work", route=least_work)):
                if num_gpus == 8 or policy is not FCFS:
                    yield Point("fleets", f"{num_gpus} devices", load, policy, num_gpus, warm_s=12.0, window_s=10.0)


def variations() -> Iterator[Work]:
    """Other constants, in an overload and with batch clients."""
    for values in VARIATIONS:
        name = ", ".join(f"{name} {value:g}" for name, value in values.items()) or "as they are"
        for load in (Load(540), Load(420, batch_clients=BATCH)):
            yield Point("constants", name, load, DEADLINE, constants=values)


SECTIONS: dict[str, Callable[[], Iterator[Work]]] = {
    "curves": curves, "capacities": capacities, "causes": causes, "fleets": fleets, "constants": variations
}  # fmt: skip


def describe(work: Work, found: Any) -> dict[str, Any]:
    """A piece of work and what came of it, for JSON."""
    if isinstance(work, Point):
        assert isinstance(found, Result)
        return {"section": work.section, **found.as_json()}
    capacity, results = found
    point = work.point
    return {
        "section": point.section,
        "scenario": point.scenario,
        "policy": point.policy.name,
        "capacity": capacity,
        "points": [result.as_json() for result in results],
    }


def run(work: Work) -> Any:
    return work.run()


def report(chosen: list[str], processes: int) -> list[dict[str, Any]]:
    """Everything of the chosen sections, in order; a line of each is printed when it is known."""
    works = [work for name in chosen for work in SECTIONS[name]()]
    rows = []
    with ProcessPoolExecutor(processes) as pool:
        for work, found in zip(works, pool.map(run, works) if processes > 1 else map(run, works), strict=True):
            rows.append(describe(work, found))
            print({name: value for name, value in rows[-1].items() if name != "points"}, flush=True)
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS)[:4])
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--output", type=Path, default=RESULTS)
    options = arguments.parse_args()
    began = time.monotonic()
    rows = report(options.sections, options.processes)
    known = json.loads(options.output.read_text()) if options.output.exists() else {"rows": [], "minutes": {}}
    minutes = (time.monotonic() - began) / 60
    text = json.dumps(
        {
            "command": ["python", "-m", "benchmarks.sim.run", *sys.argv[1:]],
            "python": platform.python_version(),
            "card": asdict(Card()),
            "room": {"slots": SLOTS, "rows": ROWS, "block": BLOCK},
            "minutes": {**known["minutes"], " ".join(options.sections): round(minutes, 1)},
            "rows": [row for row in known["rows"] if row["section"] not in options.sections] + rows,
        },
        indent=1,
    )
    options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
