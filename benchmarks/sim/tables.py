"""Prints the tables of docs/scheduling.md from the simulations' results.

python -m benchmarks.sim.tables [--input FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.sim.run import RESULTS, SCENARIOS

Row = dict[str, Any]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    ruled = [lines[0], ["---", *["---:"] * (len(lines[0]) - 1)], *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)


def of(rows: list[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def seconds(value: float | None) -> str:
    return "never" if value is None else f"{1000 * value:.0f} ms"


def capacities(rows: list[Row]) -> str:
    def one(scenario: str) -> list[object]:
        found = {row["policy"]: row["capacity"] for row in of(rows, section="capacities", scenario=scenario)}
        before, after = found["first come, first served"], found["deadline"]
        return [scenario, before, after, f"{100 * (after / before - 1):+.0f} %"]

    return table(["asked for", "first come, first served", "deadline", "gain"], map(one, SCENARIOS))


def causes(rows: list[Row]) -> str:
    places = [("with 64 batch clients", 300), ("with 64 batch clients", 420), ("half interrupted", 440)]
    own = of(rows, section="causes")

    def one(policy: str) -> list[object]:
        cells: list[object] = [policy]
        for scenario, listeners in places:
            (row,) = of(own, policy=policy, scenario=scenario, listeners=listeners)
            cells.append(f"{100 * row['served_well']:.0f} %, {seconds(row['ttfa_p95_s'])}")
        (row,) = of(own, policy=policy, scenario="listeners", listeners=540)
        return [*cells, f"{100 * row['smooth']:.0f} %"]

    head = [
        f"{listeners} {'half interrupted' if name == 'half interrupted' else 'and 64 batch clients'}"
        for name, listeners in places
    ]
    return table(["policy", *head, "540: smooth"], map(one, dict.fromkeys(row["policy"] for row in own)))


def overload(rows: list[Row]) -> str:
    own = of(rows, section="curves", scenario="listeners")
    policies = list(dict.fromkeys(row["policy"] for row in own))

    def one(listeners: int) -> list[object]:
        found = [of(own, policy=policy, listeners=listeners)[0] for policy in policies]
        return [listeners, *(f"{row['well_listeners']:.0f} ({seconds(row['ttfa_p50_s'])})" for row in found)]

    return table(
        ["listeners", *(f"{policy}: served well (first audio, median)" for policy in policies)],
        map(one, (430, 460, 500, 560, 640)),
    )


def fleets(rows: list[Row]) -> str:
    own = of(rows, section="fleets")
    return table(
        ["devices", "listeners", "policy", "served well, at a time", "first audio, p95", "batch audio, s/s", "reading"],
        (
            [row["num_gpus"], row["listeners"], row["policy"], f"{row['well_listeners']:.0f}", seconds(row["ttfa_p95_s"]),
             f"{row['batch_audio_s']:.0f}", f"{100 * row['reading']:.1f} %"]
            for row in own
        ),
    )  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--input", type=Path, default=RESULTS)
    rows = json.loads(arguments.parse_args().input.read_text())["rows"]
    for make in (capacities, causes, overload, fleets):
        print(make.__name__.upper(), make(rows), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
