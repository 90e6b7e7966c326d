"""What benchmarks/h200x8.sh needs besides `duetts bench`: which loads are missing, a replica's end, and the report.

    python benchmarks/host.py missing FILE WORKLOAD 8,64 [--repeats 3]   the loads that FILE does not have yet
    python benchmarks/host.py half FILE                                  half of the listeners that it found to be served well
    python benchmarks/host.py kill URL PID                               kills an engine of that server, waits until it is back
    python benchmarks/host.py report FOLDER [--engines 8]                summary.json, table.md and plot.svg of its files

The report judges: so many engines against one, first audio at half of the capacity, what the end of a replica cost, and whether
the clients were the limit. What was not measured is not judged.
"""

import argparse
import json
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from duetts.bench.metrics import CAPACITY_CONTINUITY, CAPACITY_TTFA_S
from duetts.conditions import write_json

RATIO, TTFA_MS, HEADROOM, BUSIEST = 7.6, 60.0, 10.0, 0.9
RATIO_OF = 8  # engines that RATIO is for
NOTICED_S = 2.0  # after its end an engine is given nothing any more, and its streams have broken off
STALE_S = 0.5  # how old what /metrics tells of engines may be
BACK_S = 240.0
CONFIGURATIONS = {"one": "one replica", "eight": "all replicas behind one server", "single": "the same, one HTTP process",
                  "split": "codecs on GPUs of their own"}  # fmt: skip
OPEN = re.compile(r'^duetts:num_requests_open{engine="(\d+)"} (\S+)$', re.MULTILINE)
UP = re.compile(r'^duetts:engine_up{engine="(\d+)"} (\S+)$', re.MULTILINE)
STARTS = re.compile(r'^duetts:engine_starts_total{engine="(\d+)"} (\S+)$', re.MULTILINE)


def read(path: Path) -> dict[str, Any]:
    """A file of `duetts bench`; without points if it is not there."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"points": []}
    return found


def missing(content: dict[str, Any], workload: str, loads: list[float], repeats: int) -> list[float]:
    """The loads whose repeats are not all there."""
    there = {point["load"] for point in content["points"] if point["workload"] == workload and point["repeats"] >= repeats}
    return [load for load in loads if load not in there]


def value(point: dict[str, Any], name: str) -> float:
    """A figure; nan if there is none, as in a point that was rejected."""
    found = point["figures"].get(name, [None])[0]
    return math.nan if found is None else math.inf if found == "infinite" else float(found)


def of(content: dict[str, Any], workload: str) -> list[dict[str, Any]]:
    return sorted((one for one in content["points"] if one["workload"] == workload), key=lambda one: one["load"])


def served_well(point: dict[str, Any]) -> bool:
    """The rule of capacity, of all repeats together."""
    return (value(point, "failures") == 0 and value(point, "continuity") >= CAPACITY_CONTINUITY
            and value(point, "ttfa_ms_p95") <= 1e3 * CAPACITY_TTFA_S)  # fmt: skip


def capacity(content: dict[str, Any]) -> int:
    """The most listeners that were served well; 0 if none were."""
    return round(max((point["load"] for point in of(content, "S") if served_well(point)), default=0))


def peak(content: dict[str, Any]) -> float:
    """T's best throughput."""
    return max((value(point, "audio_s_per_s") for point in of(content, "T") if point["figures"]), default=math.nan)


# -- the end of a replica ------------------------------------------------------------------------------------------------


def engines(server: int) -> list[int]:
    """Ids of a server's engine processes, the oldest first."""
    return sorted(_children(server))


def _children(server: int) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == server and b"duetts.engine.process" in (entry / "cmdline").read_bytes():
                yield int(entry.name)
        except OSError:
            continue


def told(url: str, pattern: re.Pattern[str]) -> dict[str, float]:
    with urlopen(f"{url}/metrics", timeout=30) as answer:
        return {engine: float(count) for engine, count in pattern.findall(answer.read().decode())}


def kill(url: str, server: int) -> dict[str, Any]:
    """Kills the oldest engine and waits until all are up again. Which number it had is told by its next start. Times are of the
    system's monotonic clock. Raises `RuntimeError` if it does not come back."""
    starts, before = told(url, STARTS), told(url, OPEN)
    looked, victim = time.monotonic(), engines(server)[0]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    while time.monotonic() < killed + BACK_S:
        anew = [engine for engine, count in told(url, STARTS).items() if count > starts.get(engine, 0)]
        if anew and all(told(url, UP).values()):
            return {"engine": anew[0], "pid": victim, "open_before": before, "looked_at": looked, "killed_at": killed,
                    "back_after_s": time.monotonic() - killed}  # fmt: skip
        time.sleep(0.1)
    raise RuntimeError(f"the engine with id {victim} was killed and is not back after {BACK_S:g} s")


def losses(content: dict[str, Any], point: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """What a replica's end cost: requests that failed with it, at most those that it had or could be given, and others."""
    end, columns = event["output"], {name: index for index, name in enumerate(content["columns"])}
    killed, looked = end["killed_at"] - event["origin_s"], end["looked_at"] - event["origin_s"]
    rows = [(row[columns["start_s"]], row[columns["end_s"]], bool(row[columns["error"]])) for row in point["rows"]]
    mine = [failed for _, end_s, failed in rows if failed and killed <= end_s <= killed + NOTICED_S]
    newcomers = sum(looked - STALE_S <= start <= killed + NOTICED_S for start, _, _ in rows)
    return {
        "load": point["load"], "engine": end["engine"], "had": end["open_before"].get(end["engine"], 0), "newcomers": newcomers,
        "requests": len(rows), "lost": len(mine), "lost_otherwise": sum(failed for _, _, failed in rows) - len(mine),
        "back_after_s": end["back_after_s"],
    }  # fmt: skip


# -- the report ----------------------------------------------------------------------------------------------------------


def row(point: dict[str, Any]) -> dict[str, Any]:
    """What the table has of one load."""
    frames = [count for run in point["engine_frames"] for count in run.values()]
    share, load = value(point, "server_processor_share"), point["load"]
    return {
        "workload": point["workload"], "load": load, "repeats": point["repeats"], "rejected": point["rejected"],
        "requests": value(point, "requests"), "failures": value(point, "failures"),
        "audio_s_per_s": value(point, "audio_s_per_s"), "ttfa_ms_p50": value(point, "ttfa_ms_p50"),
        "ttfa_ms_p95": value(point, "ttfa_ms_p95"), "ttfa_ms_p99": value(point, "ttfa_ms_p99"),
        "continuity": value(point, "continuity"), "engine_frames_min": min(frames, default=0),
        "engine_frames_max": max(frames, default=0), "server_cores": share, "server_cores_per_1000": 1e3 * share / load,
        "client_busiest_share": value(point, "client_busiest_share"), "steady": value(point, "steady"),
    }  # fmt: skip


def summary(files: dict[str, dict[str, Any]], engines: int) -> dict[str, Any]:
    """All loads, and the verdicts. `files` are contents by name: the configurations, half, kill and null_client."""
    shown = {name: [row(point) for point in content["points"]] for name, content in files.items()}
    one, eight = files.get("one", {"points": []}), files.get("eight", {"points": []})
    ratios = {name: peak(files[name]) / peak(one) for name in CONFIGURATIONS if name in files and name != "one"}
    pairs = {f"{few['load']:g} and {many['load']:g}": value(many, "audio_s_per_s") / value(few, "audio_s_per_s")
             for few in of(one, "T") for many in of(eight, "T") if many["load"] == engines * few["load"]}  # fmt: skip
    ended = [losses(files["kill"], point, event) for point in files.get("kill", {"points": []})["points"]
             for event in point["events"] if isinstance(event.get("output"), dict)]  # fmt: skip
    half = [value(point, "ttfa_ms_p95") for point in of(files.get("half", {"points": []}), "S")]
    most = max((peak(content) for name, content in files.items() if name in CONFIGURATIONS), default=math.nan)
    client = peak(files.get("null_client", {"points": []})) / most
    busiest = max((each["client_busiest_share"] for name in CONFIGURATIONS for each in shown.get(name, [])), default=math.nan)
    return {
        "engines": engines, "capacity": {name: capacity(files[name]) for name in CONFIGURATIONS if name in files},
        "peak_audio_s_per_s": {name: peak(content) for name, content in files.items()},
        "ratios": ratios, "ratios_by_load": pairs, "replica_ends": ended,
        "verdicts": {
            "throughput against one replica": verdict(ratios.get("eight", math.nan), RATIO * engines / RATIO_OF),
            "first audio at half of the capacity, ms": verdict(max(half, default=math.nan), TTFA_MS, least=False),
            "streams lost that were not the killed replica's": verdict(_foreign(ended), 0, least=False),
            "clients alone against what was measured": verdict(client, HEADROOM),
            "busiest client process, cores": verdict(busiest, BUSIEST, least=False),
        },
        "loads": shown,
    }  # fmt: skip


def _foreign(ended: list[dict[str, Any]]) -> float:
    """Of an end that cost nothing nothing is learned: the replica had no work."""
    each = [one["lost_otherwise"] + max(0, one["lost"] - one["had"] - one["newcomers"])
            for one in ended if one["lost"] or one["lost_otherwise"]]  # fmt: skip
    return max(each, default=math.nan)


def verdict(found: float, limit: float, least: bool = True) -> dict[str, Any]:
    """A number beside its limit; `met` is None of what was not measured."""
    met = None if math.isnan(found) else found >= limit if least else found <= limit
    return {"found": found, "limit": limit, "met": met}


def table(content: dict[str, Any]) -> str:
    """For people."""
    lines = ["| servers | load | audio-s/s | first audio p50 / p95, ms | unbroken | failed | frames of engines, least / most "
             "| server's cores | of 1,000 clients |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, rows in content["loads"].items():
        for one in rows:
            cells = [name, f"{one['workload']} {one['load']:g}", f"{one['audio_s_per_s']:.1f}",
                     f"{one['ttfa_ms_p50']:.0f} / {one['ttfa_ms_p95']:.0f}", f"{one['continuity']:.3f}",
                     f"{one['failures']:g} of {one['requests']:g}", f"{one['engine_frames_min']} / {one['engine_frames_max']}",
                     f"{one['server_cores']:.2f}", f"{one['server_cores_per_1000']:.2f}"]  # fmt: skip
            lines.append("| " + " | ".join(cells).replace("nan", "-") + " |")
    words = {True: "met", False: "NOT met", None: "not measured"}
    judged = [f"* {name}: {one['found']:.4g} (limit {one['limit']:g}): {words[one['met']]}".replace("nan", "-")
              for name, one in content["verdicts"].items()]  # fmt: skip
    ends = [f"* replica {one['engine']} killed at {one['load']:g} clients: it had {one['had']:g} requests, {one['lost']} were "
            f"lost and {one['lost_otherwise']} elsewhere, back after {one['back_after_s']:.1f} s"
            for one in content["replica_ends"]]  # fmt: skip
    return "\n".join([*lines, "", *judged, *ends, ""])


def report(folder: Path, engines: int) -> str:
    """Writes the three files; returns the table. The plot needs matplotlib."""
    names = (*CONFIGURATIONS, "half", "kill", "null_client", "null_eight", "null_single")
    files = {name: read(folder / f"{name}.json") for name in names if (folder / f"{name}.json").exists()}
    content = summary(files, engines)
    write_json(folder / "summary.json", content)
    (folder / "table.md").write_text(table(content), encoding="utf-8")
    try:
        from duetts.bench.plot import draw
    except ImportError:
        return table(content) + "no plot: matplotlib is not installed\n"
    drawn = {name: files[name] for name in CONFIGURATIONS if name in files}
    draw(drawn, folder / "plot.svg", floors=False)
    return table(content)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = arguments.add_subparsers(dest="kind", required=True)
    (asked := kinds.add_parser("missing")).add_argument("file", type=Path)
    asked.add_argument("workload")
    asked.add_argument("loads")
    asked.add_argument("--repeats", type=int, default=1)
    kinds.add_parser("half").add_argument("file", type=Path)
    (killing := kinds.add_parser("kill")).add_argument("url")
    killing.add_argument("pid", type=int)
    (reporting := kinds.add_parser("report")).add_argument("folder", type=Path)
    reporting.add_argument("--engines", type=int, default=RATIO_OF)
    given = arguments.parse_args()
    if given.kind == "missing":
        loads = [float(load) for load in given.loads.split(",")]
        print(",".join(f"{load:g}" for load in missing(read(given.file), given.workload, loads, given.repeats)))
    elif given.kind == "half":
        print(capacity(read(given.file)) // 2)
    elif given.kind == "kill":
        print(json.dumps(kill(given.url, given.pid)))
    else:
        print(report(given.folder, given.engines), end="")


if __name__ == "__main__":
    main()
