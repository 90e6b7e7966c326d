"""The cases of attention and draws run in the interpreter as they would on a GPU, and are right there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_dry_run_finds_every_case_right(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    ops = ["decode", "prefill", "frame", "draw"]
    assert kernels.main(["--dry-run", "--ops", *ops, "--rows", "2", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["op"] for row in rows] == ["decode", "prefill", "frame", "frame", "rotate", "main", "residual", "embed"]
    assert all(row["error"] < 1e-5 for row in rows)
