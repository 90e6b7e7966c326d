"""Plots of measurements beside the floor of physics and the target. Needs matplotlib, which is no dependency of duetts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from duetts.roofline import TARGET_MS, codec_floor_s, frame_floor_s, throughput

CONTEXT = 500  # positions of the floor's lines
CURVES = {"T": "-o", "C1": "--s", "C2": ":^"}


def draw(measured: Mapping[str, Mapping[str, Any]], path: Path, *, floors: bool = True) -> None:
    """Throughput and first audio by streams. `measured` are contents of files of `duetts bench` by a name for each. Lines of
    floor and target are S2 Pro's on an H200; without `floors` they are left out. Raises `OSError`."""
    chart = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = chart.subplots(1, 2)
    for name, content in measured.items():
        for workload, style in CURVES.items():
            points = [one for one in content["points"] if one["workload"] == workload and one["streaming"] and one["figures"]]
            points.sort(key=itemgetter("load"))
            loads = [one["load"] for one in points]
            if points:
                left.plot(loads, [one["figures"]["audio_s_per_s"][0] for one in points], style, label=f"{name} {workload}")
            for percent in (50, 95) if points else ():
                values = [one["figures"][f"ttfa_ms_p{percent}"][0] for one in points]
                finite = [math.nan if isinstance(value, str) else value for value in values]
                right.plot(loads, finite, style, label=f"{name} {workload} p{percent}")
    if floors:
        _floors(left)
    for axes, title in ((left, "seconds of audio a second"), (right, "first audio, ms")):
        axes.set(xlabel="streams at once", title=title)
        axes.grid(alpha=0.3)
        if any(np.nanmax(line.get_ydata(), initial=0.0) > 0 for line in axes.lines):  # else there is no logarithm
            axes.set(xscale="log", yscale="log")
            axes.legend(fontsize=7)
    chart.savefig(path, format="svg")


def _floors(axes: Axes) -> None:
    loads = [2**power for power in range(9)]
    for label, codec_s, style in (("floor, no codec", 0.0, "k-"), ("floor with codec", codec_floor_s(), "k--")):
        axes.plot(loads, [throughput(load, frame_floor_s(load, CONTEXT), codec_s) for load in loads], style, label=label, lw=1)
    axes.plot(list(TARGET_MS), [throughput(load, ms / 1e3) for load, ms in TARGET_MS.items()], "g:", label="target, no codec")
