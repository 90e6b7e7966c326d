"""The report of the benchmark of one host: its verdicts by hand-made files, and the script's parts by name."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host
from duetts.bench.report import COLUMNS

SCRIPT = Path(host.__file__).with_name("h200x8.sh")


def point(workload: str, load: float, rate: float = 100.0, **figures: float | str | None) -> dict[str, Any]:
    """As `duetts bench` writes it, with one run of two engines."""
    known: dict[str, Any] = {
        "audio_s_per_s": rate, "ttfa_ms_p50": 20, "ttfa_ms_p95": 50, "ttfa_ms_p99": 70, "continuity": 1, "failures": 0,
        "requests": 9, "server_processor_share": 0.5, "client_busiest_share": 0.2, "steady": 1,
    }  # fmt: skip
    return {"workload": workload, "load": load, "repeats": 1, "rejected": "", "streaming": True, "events": [], "rows": [],
            "engine_frames": [{"0": 90, "1": 110}],
            "figures": {name: [value, None, None] for name, value in {**known, **figures}.items()}}  # fmt: skip


def content(*points: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "duetts bench", "columns": list(COLUMNS), "points": list(points)}


def row(start: float, end: float, error: str = "") -> list[Any]:
    known = {"start_s": start, "end_s": end, "error": error}
    return [known.get(name, 0) for name in COLUMNS]


def ended(*rows: list[Any]) -> dict[str, Any]:
    """Engine 3 is killed at 10 s, when it had two requests."""
    output = {"engine": "3", "pid": 7, "open_before": {"3": 2.0, "4": 5.0}, "looked_at": 109.9, "killed_at": 110.0,
              "back_after_s": 12.0}  # fmt: skip
    return {**point("T", 8), "rows": list(rows), "events": [{"output": output, "origin_s": 100.0, "code": 0}]}


ONE = content(point("T", 1, 50), point("T", 4, 100), point("S", 2))
EIGHT = content(
    point("T", 8, 390), point("T", 32, 790), point("S", 16), point("S", 24, ttfa_ms_p95=501), point("S", 32, failures=1)
)
LOST = row(9, 10.1, "the connection ended")
FILES = {
    "one": ONE, "eight": EIGHT, "half": content(point("S", 8, ttfa_ms_p95=42)), "null_client": content(point("T", 32, 9000)),
    "kill": content(ended(LOST, LOST, row(9, 12), row(11, 13))),
}  # fmt: skip


def verdicts(**files: dict[str, Any]) -> dict[str, bool | None]:
    found: dict[str, Any] = host.summary({**FILES, **files}, 8)["verdicts"]
    ratio, half, lost, client, busiest = (one["met"] for one in found.values())
    return {"ratio": ratio, "half": half, "lost": lost, "client": client, "busiest": busiest}


def test_all_that_is_asked_for_is_met() -> None:
    found = host.summary(FILES, 8)
    assert set(verdicts().values()) == {True}
    assert found["ratios"] == {"eight": pytest.approx(7.9)}
    assert found["ratios_by_load"] == {"1 and 8": pytest.approx(7.8), "4 and 32": pytest.approx(7.9)}
    assert found["capacity"] == {"one": 2, "eight": 16}
    assert found["replica_ends"] == [
        {"load": 8, "engine": "3", "had": 2, "newcomers": 1, "requests": 4, "lost": 2, "lost_otherwise": 0, "back_after_s": 12}
    ]
    assert found["loads"]["eight"][0]["server_cores_per_1000"] == pytest.approx(62.5)
    assert (found["loads"]["eight"][0]["engine_frames_min"], found["loads"]["eight"][0]["engine_frames_max"]) == (90, 110)


def test_each_can_be_missed() -> None:
    met = dict.fromkeys(verdicts(), True)
    assert verdicts(eight=content(point("T", 32, 750))) == {**met, "ratio": False}
    assert verdicts(half=content(point("S", 8, ttfa_ms_p95="infinite"))) == {**met, "half": False}
    assert verdicts(null_client=content(point("T", 32, 7000))) == {**met, "client": False}
    assert verdicts(one=content(point("T", 4, 100, client_busiest_share=0.95))) == {**met, "busiest": False}


@pytest.mark.parametrize(
    "other",
    [row(2, 5, "status 500"), row(13, 14, "status 503: not_ready"), row(9, 9.9, "status 500"), row(9, 13, "no end within 4 s")],
    ids=["long before", "later", "just before", "hanging"],
)
def test_a_stream_lost_elsewhere_is_told(other: list[Any]) -> None:
    assert verdicts(kill=content(ended(LOST, row(9, 12), other)))["lost"] is False


def test_more_lost_than_it_had_is_told() -> None:
    early = row(1, 10.1, "the connection ended")
    assert verdicts(kill=content(ended(early, early, row(9.5, 12))))["lost"] is True
    assert verdicts(kill=content(ended(early, early, early)))["lost"] is False
    given = row(9.5, 10.1, "the connection ended")  # to it, before its end was noticed
    assert verdicts(kill=content(ended(early, early, given)))["lost"] is True


def test_what_was_not_measured_is_not_judged(tmp_path: Path) -> None:
    assert set(verdicts(one=content(), eight=content(), half=content(), null_client=content(), kill=content()).values()) == {
        None
    }
    assert verdicts(kill=content(ended(row(9, 12))))["lost"] is None  # it had nothing to lose
    assert {one["met"] for one in host.summary({}, 8)["verdicts"].values()} == {None}
    assert "not measured" in host.report(tmp_path, 8)


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    for name, each in FILES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
    table = host.report(tmp_path, 8)
    assert (tmp_path / "table.md").read_text() in table
    assert "| eight | T 32 | 790.0 | 20 / 50 | 1.000 | 0 of 9 | 90 / 110 | 0.50 | 15.62 |" in table
    assert "replica 3 killed at 8 clients: it had 2 requests, 2 were lost and 0 elsewhere, back after 12.0 s" in table
    assert json.loads((tmp_path / "summary.json").read_text())["capacity"]["eight"] == 16


def test_loads_that_are_there_are_not_missing() -> None:
    assert host.missing(EIGHT, "T", [8, 32, 64], 1) == [64]
    assert host.missing(EIGHT, "T", [8, 32], 3) == [8, 32]
    assert host.missing(EIGHT, "P", [8], 1) == [8]
    assert host.missing(host.read(Path("no such file")), "T", [8], 1) == [8]


def test_a_rejected_load_has_no_numbers() -> None:
    bad = {**point("T", 8), "figures": {}, "rejected": "wrong length"}
    assert math.isnan(host.row(bad)["audio_s_per_s"])
    assert math.isnan(host.peak(content(bad)))
    assert host.capacity(content({**bad, "workload": "S"})) == 0


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_script_knows_its_parts(tmp_path: Path) -> None:
    listed = script(str(tmp_path), "list")
    assert listed.returncode == 0
    assert {"limits", "one", "eight", "half", "kill", "single", "split"} == set(listed.stdout.split())
    unknown = script(str(tmp_path), "one", "nine")
    assert unknown.returncode == 2
    assert "there are limits one" in unknown.stderr
    assert list(tmp_path.glob("*.json")) == []
