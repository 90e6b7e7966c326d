"""The kernels' benchmark on a machine without a GPU: what it would run there runs in the interpreter, and compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.kernel_case import Case, error_of

from benchmarks import kernels

ROOT = Path(__file__).parents[2]


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
