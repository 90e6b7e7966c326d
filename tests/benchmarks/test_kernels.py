"""The kernels' benchmark on a machine without a GPU: what it would run there runs in the interpreter, and compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.kernel_case import Case, error_of

from benchmarks import kernel_case, kernel_compile, kernels
from duetts.kernels.projection import Config

ROOT = Path(__file__).parents[2]
SLOW = Config(block_n=64, step=128, programs=1, warps=4, stages=3, prefetch=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_dry_run_finds_every_case_right(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    words = ["--dry-run", "--ops", "gate", "norm", "--rows", "2", "--eight-bit", "int8", "--output", str(output)]
    assert kernels.main(words) == 0
    rows = json.loads(output.read_text())["rows"]
    assert {(row["op"], row["shape"]) for row in rows} == {
        ("norm_gate", "w1 w3"),
        ("norm_gate", "w1 w3 int8"),
        ("rms_norm", "dim"),
    }
    assert all(row["error"] < 1e-5 for row in rows)


def test_a_wrong_kernel_is_told_apart() -> None:
    right = torch.ones(3, 4)
    case = Case("op", "shape", 3, 1, 1, lambda index: right, lambda index: right, tolerance=1e-5)
    assert error_of(case, case.run) == 0
    assert error_of(case, lambda index: right + 1e-3) > case.tolerance
    assert error_of(case, lambda index: right * torch.nan) == float("inf")


def test_unknown_operations_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--dry-run", "--ops", "gate", "gates"]) == 2
    assert "gates" in capsys.readouterr().err


@pytest.mark.slow
def test_all_kernels_compile_for_an_h200() -> None:
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    words = [sys.executable, "-m", "benchmarks.kernels", "--compile", "--rows", "16", "64", "128"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 cannot run, 0 spill" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_a_sweep_tries_tiles_then_neighbours_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that likes one tile, asking far ahead and no spread; nothing is run or compiled."""
    asked: dict[str, list[str]] = {}

    def clock(run: partial[Any], sets: int, repeats: int) -> float:
        config = run.keywords.get("config", SLOW)
        return 10.0 + config.spread - config.prefetch / 8 + 100 * (config.block_n != 32 or config.step != 256)

    monkeypatch.setattr(kernel_case, "time_us", clock)
    monkeypatch.setattr(kernel_case, "error_of", lambda case, run: 0.0)
    monkeypatch.setattr(kernel_compile, "compile_all", lambda arguments, dtype, wanted: asked.update(wanted))
    arguments = kernels.parse(["--sweep", "gate", "--eight-bit", "--limit-s", "60"])
    (rows,) = kernels.sweep(arguments, kernel_case.Setup(torch.device("cpu"), torch.float32, (2,), tiny=True))
    best = rows["tried"][0]["config"]
    assert best.startswith("block_n=32 step=256 ")
    assert " prefetch=16 " in best
    assert " spread=0" in best
    assert best in asked["norm_gate w1 w3 2"]  # in the second round, as the best differs in two fields
    assert rows["now_us"] == 111.0
    assert len(rows["tried"]) > len(asked["norm_gate w1 w3 2"])
