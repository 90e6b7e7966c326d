"""The codec's benchmark on a machine without a GPU: its dry run goes the whole way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import codec


@pytest.mark.skipif(torch.cuda.is_available(), reason="the dry run is for machines without a GPU")
def test_the_dry_run_times_calls_and_their_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "codec.json"
    assert codec.main(["--dry-run", "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    (call,) = results["calls"]
    assert (call["streams"], call["frames"]) == (2, 1)
    stages = results["stages"]
    assert sum(row["count"] for row in stages if "conv" in row["kernel"] or "unit" in row["kernel"]) == 1 + 2 * 3 + 2 + 6 + 1
    # Seven steps back, two convolutions: 2 x 8 x 48^2 for each of the first stage's units, 2 streams of 8 steps.
    first = next(row for row in stages if row["kernel"].startswith("residual_unit 48->48"))
    assert first["gflop"] == pytest.approx(2 * 8 * 48 * 48 * 2 * 8 / 1e9)
    assert results["device"] == "cpu, dry run"
    assert "TFLOP/s" in capsys.readouterr().out
