"""`duetts bench` as a person runs it: every workload against a real server without a model, and with the tiny one."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from duetts.bench import metrics
from duetts.bench.client import Target
from duetts.bench.load import Measure, Point, Session
from duetts.bench.metrics import Record, Run
from duetts.bench.program import Program
from duetts.bench.report import COLUMNS, Report, heading, line
from duetts.bench.workloads import WORKLOADS, Asker
from duetts.embedded import write_random_checkpoint
from tests.server.test_serve import running
from tests.test_cli import duetts, duetts_here
from tests.tiny import TINY

from .servers import CHUNKED, FRAME, chunk, serving

FRAMES = 6
SMALL = ("--seconds", "0", "--least", "2", "--most", "2", "--repeats", "1", "--frames", str(FRAMES), "--short")


@pytest.fixture(scope="module")
def roomy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without an end, with room for references of 30 s."""
    folder = tmp_path_factory.mktemp("roomy-model")
    write_random_checkpoint(folder, replace(TINY, text={**TINY.text, "max_seq_len": 4096}, end_scale=0.0, std=1.0))
    return folder


@pytest.fixture(scope="module")
def null_server(roomy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = str(tmp_path_factory.mktemp("bench-cache"))
    with running(str(roomy_folder), "--engine", "null", "--port", "0", DUETTS_CACHE_DIR=folder) as server:
        with httpx.Client(base_url=server.address) as http:
            server.until(http, "/ready", 200)
        yield server.address


def measured(address: str, tmp_path: Path, *arguments: str, command: Any = duetts_here) -> dict[str, Any]:
    path = tmp_path / "out.json"
    run = command("bench", *arguments, "--url", address, *SMALL, "--output", str(path))
    assert run.returncode == 0, run.stdout + run.stderr
    content: dict[str, Any] = json.loads(path.read_text())
    for point in content["points"]:
        name = f"{point['workload']} {point['load']:g}"
        assert name in run.stdout or point["run"] < len(content["runs"]) - 1
        assert point["figures"]["failures"][0] == 0, point["rows"]
    return content


def test_every_workload_against_a_server_without_a_model(null_server: str, tmp_path: Path) -> None:
    content = measured(null_server, tmp_path, "L1", "L2", "T", "C1", "C2", "B", "G", "--loads", "1,3", command=duetts)
    seen = {(point["workload"], point["load"], point["streaming"]) for point in content["points"]}
    assert seen == {(name, load, streaming) for name in ("L1", "L2", "T", "C1", "C2", "B", "G") for load in (1, 3)
                    for streaming in WORKLOADS[name].streaming}  # fmt: skip
    assert content["short"] is True
    (run,) = content["runs"]
    assert run["command"][:2] == ["bench", "L1"]
    assert run["server"]["/version"]["device"] == "null"
    assert run["server"]["/health"] == {"status": "healthy"}
    assert run["client"]["versions"]["duetts"]
    for point in content["points"]:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in point["rows"]]
        assert len(rows) == (1 if point["workload"] == "B" else 2) * point["load"]
        assert {row["audio_bytes"] for row in rows} == {FRAMES * 4096}
        assert all(row["ttfp_ms"] <= row["ttfa_ms"] for row in rows)
        assert {row["client"] for row in rows} == set(range(int(point["load"])))
        # Streams come in chunks of 2 and 4 frames, complete answers whole.
        assert {row["chunks"] for row in rows} == {2 if point["streaming"] else 1}
    assert json.loads((tmp_path / "out.json").read_text())["columns"] == list(COLUMNS)


def test_the_header_of_a_wav_file_is_no_audio(null_server: str, tmp_path: Path) -> None:
    content = measured(null_server, tmp_path, "T", "--loads", "1", "--audio", "wav")
    rows = [dict(zip(COLUMNS, row, strict=True)) for point in content["points"] for row in point["rows"]]
    assert {row["audio_bytes"] for row in rows} == {FRAMES * 4096}


def test_arrivals_by_chance_and_listeners(null_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONTINUOUS_S", "CAPACITY_TTFA_S"):
        monkeypatch.setattr(metrics, name, 1000.0)  # whatever the machine does meanwhile, everybody is served well
    content = measured(null_server, tmp_path, "P", "--peak", "1200")
    assert sorted(point["load"] for point in content["points"])[:4] == [2, 4, 8, 16]
    assert len(content["points"]) == 8  # and shares of the peak
    content = measured(null_server, tmp_path, "P", "--peak", "120", "--loads", "90%,16", "--append")
    assert sum(point["run"] for point in content["points"]) == len(content["runs"]) == 2  # 16 is in the place of the first 16
    assert len(content["points"]) == 9
    assert any(abs(point["load"] - 9.26) < 0.01 for point in content["points"])
    content = measured(null_server, tmp_path, "S", "--most-clients", "5")
    assert content["capacity"] == 5
    assert {point["load"] for point in content["points"]} == {1, 2, 4, 5}
    content = measured(null_server, tmp_path, "S", "--loads", "2,3")
    assert content["capacity"] == 3


def test_several_client_processes_and_a_command_in_the_middle(null_server: str, tmp_path: Path) -> None:
    options = ("T", "--loads", "3", "--processes", "2", "--streams-only", "--event", "0:echo 17")
    (point,) = measured(null_server, tmp_path, *options)["points"]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in point["rows"]]
    assert sorted(row["client"] for row in rows) == [0, 0, 1, 1, 2, 2]
    assert [(event["code"], event["output"]) for event in point["events"]] == [(0, 17)]
    ((frames,),) = [run.values() for run in point["engine_frames"]]
    assert 6 * FRAMES <= frames <= 2 * 6 * FRAMES  # the last of the warm-up may be told of late
    assert point["figures"]["client_processor_share"][0] > 0


@pytest.mark.slow
def test_workloads_on_the_tiny_model(roomy_folder: Path, tmp_path: Path) -> None:
    with running(str(roomy_folder), "--port", "0", DUETTS_CACHE_DIR=str(tmp_path)) as server:
        with httpx.Client(base_url=server.address) as http:
            server.until(http, "/ready", 200)
        content = measured(server.address, tmp_path, *(name for name in WORKLOADS if name not in "PS"), "--loads", "1,2")
        assert len(content["points"]) == 20
        measured(server.address, tmp_path, "P", "--loads", "20")
        measured(server.address, tmp_path, "S", "--loads", "1,2")


def test_mistakes_end_with_a_line_and_a_code(tmp_path: Path) -> None:
    for arguments, message in (
        (["X"], "workload X is unknown"),
        (["T", "--loads", "1,a"], "not like 1,8,64"),
        (["T", "--loads", "0"], "above 0"),
        (["T", "--url", "ftp://h"], "not like http://"),
        (["T", "--dialect", "latin"], "must be one of"),
        (["T", "--field", "seed=x"], "NAME=JSON"),
        (["T", "--event", "soon:kill"], "not like 10:COMMAND"),
        (["T", "--url", "http://a", "--url", "http://b"], "no multiple of the 2 addresses"),
    ):
        run = duetts_here("bench", *arguments)
        assert (run.returncode, "Traceback" in run.stderr) == (2, False), run.stderr
        assert message in run.stderr


# -- what a server does wrong --------------------------------------------------------------------------------------------


async def program(answer: Any, workload: str, tmp_path: Path) -> tuple[Report, list[str]]:
    told: list[str] = []
    async with serving(answer) as target:
        measure = Measure(seconds=0, least=2, most=2, repeats=2, frames=1, short=True)
        session = Session(target, Asker(), measure)
        report = Report(session)
        await Program(session, report, told.append, output=tmp_path / "out.json", loads=(2,)).run([WORKLOADS[workload]])
    return report, told


async def test_a_load_with_wrong_lengths_has_no_figures(tmp_path: Path) -> None:
    served = 0

    async def sometimes_long(writer: asyncio.StreamWriter, body: bytes) -> None:
        nonlocal served
        served += 1
        writer.write(CHUNKED + chunk(FRAME * (2 if served == 9 else 1)) + b"0\r\n\r\n")

    report, told = await program(sometimes_long, "L1", tmp_path)
    assert report.rejected
    (point,) = json.loads((tmp_path / "out.json").read_text())["points"]
    assert point["figures"] == {}
    assert point["rejected"] == "1 answers, the first: wrong length: 8192 bytes instead of 4096"
    assert "REJECTED" in told[-1]
    assert len(point["rows"]) == 8


async def test_failures_are_counted_and_infinite(tmp_path: Path) -> None:
    served = 0

    async def sometimes_full(writer: asyncio.StreamWriter, body: bytes) -> None:
        nonlocal served
        served += 1
        refused = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull"
        writer.write(refused if served == 9 else CHUNKED + chunk(FRAME) + b"0\r\n\r\n")

    report, told = await program(sometimes_full, "L1", tmp_path)
    assert not report.rejected
    (point,) = json.loads((tmp_path / "out.json").read_text())["points"]
    assert point["figures"]["requests"][0] == 8
    assert point["figures"]["failures"][0] == 1
    assert point["figures"]["ttfa_ms_p99"][0] == "infinite"
    (failed,) = [dict(zip(COLUMNS, row, strict=True)) for row in point["rows"] if row[-1]]  # whose request was the ninth
    assert (failed["audio_bytes"], failed["error"]) == (0, "status 429: full")
    assert len(point["rows"]) == 8
    assert "inf" in told[-1]


async def test_warm_up_and_repeats_ask_different_things(tmp_path: Path) -> None:
    texts = []

    async def note(writer: asyncio.StreamWriter, body: bytes) -> None:
        texts.append(json.loads(body)["input"])
        writer.write(CHUNKED + chunk(FRAME) + b"0\r\n\r\n")

    await program(note, "L1", tmp_path)
    assert len(texts) == 4 + 2 * 4  # twice as many as clients to warm up, then two repeats
    assert len(set(texts)) == len(texts)


def session() -> Session:
    return Session(Target("127.0.0.1", 1), Asker())


def test_loads_of_a_workload() -> None:
    everything = Program(session(), Report(session()), print)
    assert [point.load for point in everything.points(WORKLOADS["G"])] == [1, 16, 64]
    assert len(everything.points(WORKLOADS["T"])) == 20
    assert [point.load for point in everything.points(WORKLOADS["P"])] == [2, 4, 8, 16]
    assert len(Program(session(), Report(session()), print, whole=False).points(WORKLOADS["T"])) == 10
    # Shares of 117 audio-s/s, by requests of 11.67 s in the mean.
    shares = Program(session(), Report(session()), print, peak=116.7).points(WORKLOADS["P"])
    assert [point.load for point in shares] == pytest.approx([2, 2.5, 4, 5, 7.5, 8, 9, 16], abs=0.02)


def test_the_table_has_a_column_for_each_title() -> None:
    broken = Record(0, 0, 1, start=0.0, end=1.0, error="status 500")
    found = Report(session()).add(Point(WORKLOADS["T"], 4), [Run([broken], 4)])
    assert len(line(found)) == len(heading())
    assert found["figures"]["rtf_p50"][0] == math.inf
