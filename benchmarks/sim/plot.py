"""Draws docs/scheduling.svg from the simulations' results. Needs matplotlib, which nothing else here does.

python -m benchmarks.sim.plot [--input FILE] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.sim.run import RESULTS, SCENARIOS

OUTPUT = Path(__file__).parents[2] / "docs" / "scheduling.svg"
COLOURS = {
    "first come, first served": "#c0392b", "shortest queue": "#e08e0b", "deadline": "#1f6fb2",
    "deadline, refusing": "#2a9d5c", "deadline, least work": "#8e6bbf",
}  # fmt: skip

Row = dict[str, Any]


def lines(axes: Any, rows: list[Row], x: str, y: str) -> None:
    """A line for each policy; what is infinite is not drawn."""
    for policy, colour in COLOURS.items():
        own = [row for row in rows if row["policy"] == policy and row[y] is not None]
        if own:
            axes.plot([row[x] for row in own], [row[y] for row in own], "o-", ms=3, lw=1.4, color=colour, label=policy)


def draw_curves(axes: list[Any], rows: list[Row], scenario: str, title: str) -> None:
    own = [row for row in rows if row["section"] == "curves" and row["scenario"] == scenario]
    served, first = axes
    served.plot([0, 640], [0, 640], ":", lw=0.8, color="grey")
    lines(served, own, "listeners", "well_listeners")
    served.set(title=title, xlabel="listeners", ylabel="served well, at a time", xlim=(0, 660), ylim=(0, 560))
    lines(first, own, "listeners", "ttfa_p95_s")
    first.axhline(0.5, ls=":", lw=0.8, color="grey")
    first.set(title=title, xlabel="listeners", ylabel="time to first audio, p95, s", xlim=(0, 660), ylim=(0, 2))


def draw_capacities(axes: Any, rows: list[Row]) -> None:
    own = {(row["scenario"], row["policy"]): row["capacity"] for row in rows if row["section"] == "capacities"}
    for place, scenario in enumerate(SCENARIOS):
        for shift, policy in ((0.2, "first come, first served"), (-0.2, "deadline")):
            value = own[scenario, policy]
            axes.barh(-place + shift, value, 0.36, color=COLOURS[policy])
            axes.text(value + 6, -place + shift, str(value or "< 160"), va="center", fontsize=7)
    axes.set(title="capacity of one device", xlabel="listeners", xlim=(0, 560))
    axes.set_yticks([-place for place in range(len(SCENARIOS))], list(SCENARIOS), fontsize=7)


def draw_fleets(axes: Any, rows: list[Row]) -> None:
    own = [row for row in rows if row["section"] == "fleets" and row["num_gpus"] == 8]
    lines(axes, own, "listeners", "well_listeners")
    axes.plot([0, 5000], [0, 5000], ":", lw=0.8, color="grey")
    axes.set(title="8 devices, 32 batch clients each", xlabel="listeners", ylabel="served well, at a time",
             xlim=(2400, 5200), ylim=(0, 4000))  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--input", type=Path, default=RESULTS)
    arguments.add_argument("--output", type=Path, default=OUTPUT)
    options = arguments.parse_args()
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "duetts"})
    from matplotlib import pyplot

    rows = json.loads(options.input.read_text())["rows"]
    figure, grid = pyplot.subplots(2, 3, figsize=(11, 6), layout="constrained")
    draw_curves([grid[0, 0], grid[0, 1]], rows, "listeners", "listeners only")
    draw_curves([grid[1, 0], grid[1, 1]], rows, "with 64 batch clients", "with 64 batch clients")
    draw_capacities(grid[0, 2], rows)
    draw_fleets(grid[1, 2], rows)
    grid[1, 2].legend(fontsize=7, loc="lower left")
    grid[0, 0].legend(fontsize=7, loc="lower right")
    figure.savefig(options.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
