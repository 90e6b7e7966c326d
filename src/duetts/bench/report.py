"""What is written down of a measurement: one JSON file with every request in it, and a table for people. Measures nothing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from duetts.bench.client import WRONG_LENGTH
from duetts.bench.load import Clients, Point
from duetts.bench.meanwhile import fetch
from duetts.bench.metrics import Pcm, Run, figures, ttfa, ttfp, worst_wait
from duetts.conditions import card, program

COLUMNS = ("repeat", "index", "client", "frames", "text_chars", "reference_s", "due_s", "start_s", "ttfp_ms", "ttfa_ms",
           "end_s", "audio_bytes", "underrun_ms", "chunks", "status", "error")  # fmt: skip


@dataclass
class Report:
    """The file of a measurement: what was run and under which conditions, and the loads. `capacity` is the number of
    listeners, once it is known."""

    clients: Clients
    conditions: dict[str, Any] = field(default_factory=dict)
    earlier: dict[str, Any] = field(default_factory=dict)  # what a file has already, which stays

    def __post_init__(self) -> None:
        self.points: list[dict[str, Any]] = list(self.earlier.get("points", []))
        self.capacity: int | None = self.earlier.get("capacity")

    def add(self, point: Point, runs: list[Run]) -> dict[str, Any]:
        """What became of a load so far, in the place of what was known of it before."""
        found = {**summary(point, runs, self.clients.pcm), "run": len(self.earlier.get("runs", []))}
        others = [one for one in self.points if any(one[name] != found[name] for name in ("workload", "load", "streaming"))]
        self.points = [*others, found]
        return found

    @property
    def rejected(self) -> bool:
        return any(point["rejected"] for point in self.points)

    def content(self) -> dict[str, Any]:
        measure = self.clients.measure
        return {
            "kind": "duetts bench",
            "short": measure.short or self.earlier.get("short", False),
            "runs": [*self.earlier.get("runs", []), {**self.conditions, "measure": asdict(measure)}],
            "pcm": asdict(self.clients.pcm),
            "capacity": self.capacity,
            "columns": COLUMNS,
            "points": self.points,
        }


def summary(point: Point, runs: list[Run], pcm: Pcm) -> dict[str, Any]:
    """One load: its figures, unless an answer had another length than was asked for, and its requests."""
    wrong = [record.error for run in runs for record in run.records if record.error.startswith(WRONG_LENGTH)]
    found = {} if wrong else figures(runs, pcm)
    return {
        "workload": point.workload.name,
        "load": point.load,
        "streaming": point.streaming,
        "repeats": len(runs),
        "rejected": f"{len(wrong)} answers, the first: {wrong[0]}" if wrong else "",
        "figures": found,
        "engine_frames": [run.engine_frames for run in runs],
        "events": [_event(run) for run in runs if run.event],
        "rows": list(_rows(runs, pcm)),
    }


def _event(run: Run) -> dict[str, Any]:
    """What was done in the middle of a run. Its times are those of the rows, whose zero is `origin_s` of the system's clock."""
    origin = _origin(run)
    found = dict(run.event or {})
    times = {f"{name}_s": found.pop(name) - origin for name in ("began", "ended") if name in found}
    return {**found, **times, "origin_s": origin}


def _origin(run: Run) -> float:
    return min((record.start for record in run.records), default=0.0)


def _rows(runs: list[Run], pcm: Pcm) -> Iterable[list[Any]]:
    for number, run in enumerate(runs):
        origin = _origin(run)
        for one in run.records:
            yield [number, one.index, one.client, one.frames, one.text_chars, one.reference_s, one.due - origin,
                   one.start - origin, 1e3 * ttfp(one), 1e3 * ttfa(one), one.end - origin, one.audio_bytes,
                   1e3 * worst_wait(one, pcm), len(one.chunks), one.status, one.error]  # fmt: skip


def conditions(command: list[str], note: str, urls: list[str], api_key: str = "") -> dict[str, Any]:
    """What is run, when and where: this program, and what the (first) server tells of itself and of its machine."""
    paths = ("/version", "/health", "/v1/models")
    return {
        "command": command,
        "note": note,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": program(),
        "server": {"url": urls[0], "others": urls[1:], **{path: get(urls[0] + path, api_key) for path in paths}},
        "card": card(),
    }


def get(url: str, api_key: str = "") -> Any:
    """The JSON of an address; None if there is none."""
    try:
        return json.loads(fetch(url, api_key) or b"null")
    except ValueError:
        return None


SHOWN = (
    ("requests", "n", 0), ("failures", "failed", 0), ("ttfa_ms_p50", "TTFA p50", 1), ("ttfa_ms_p95", "p95 ms", 1),
    ("rtf_p50", "RTF p50", 3), ("decode_rtf_p50", "decode", 3), ("audio_s_per_s", "audio-s/s", 2),
    ("goodput_per_s", "goodput/s", 2), ("continuity", "unbroken", 3), ("underrun_ms_p99", "wait p99 ms", 1),
    ("gap_ms_p99", "gap p99 ms", 1), ("client_busiest_share", "client", 2), ("server_processor_share", "server", 2),
)  # fmt: skip


def heading() -> str:
    return f"{'load':<16}" + "".join(f"{title:>13}" for _, title, _ in SHOWN)


def line(point: dict[str, Any]) -> str:
    """A load in one line; of figures from several repeats half the width of the interval is behind the throughput."""
    name = f"{point['workload']} {point['load']:g}{'' if point['streaming'] else ' whole'}"
    if point["rejected"]:
        return f"{name:<16}  REJECTED: {point['rejected']}"
    return f"{name:<16}" + "".join(f"{_shown(point['figures'][key], digits):>13}" for key, _, digits in SHOWN)


def _shown(found: list[float | None], digits: int) -> str:
    value, low, high = found
    if value is None or math.isnan(value):
        return "-"
    spread = f"±{(high - low) / 2:.{digits}f}" if low is not None and high is not None and high - low < math.inf else ""
    return f"{value:.{digits}f}{spread if digits == 2 else ''}"
