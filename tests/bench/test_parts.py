"""`duetts bench K`: the parts of the tiny model alone, and the floors beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from duetts.model_config import CodecConfig, ModelConfig
from duetts.parts_bench import layer_parameters, sizes_of
from duetts.roofline import FRAME_S, S2_PRO, codec_floor_s, frame_floor_s, prefill_floor_s, throughput
from tests.published import describe_layout
from tests.test_cli import duetts, duetts_here

CONFIG = Path(__file__).parents[1] / "data" / "s2_pro_config.json"
# Milliseconds a frame from the table of docs/benchmarks.md, for 1, 8, 32, 64, 128 and 256 streams.
FLOORS = {500: (3.41, 3.53, 3.94, 4.49, 5.59, 9.38), 2000: (3.46, 3.94, 5.59, 7.79, 12.17, 22.55)}


@pytest.mark.parametrize("context", FLOORS)
def test_floors_are_those_of_the_table(context: int) -> None:
    found = [1e3 * frame_floor_s(streams, context) for streams in (1, 8, 32, 64, 128, 256)]
    assert found == pytest.approx(FLOORS[context], abs=0.006)


def test_other_floors() -> None:
    assert throughput(64, frame_floor_s(64, 500)) == pytest.approx(661, abs=1)
    assert codec_floor_s() / FRAME_S * 1e6 == pytest.approx(185, abs=1)  # 145.8 GFLOP a second of audio at 790 TFLOP/s
    assert 1e3 * prefill_floor_s(50) == pytest.approx(1.69, abs=0.005)
    assert 1e3 * prefill_floor_s(265) == pytest.approx(2.46, abs=0.01)
    assert throughput(1, FRAME_S) == 1
    assert throughput(10, FRAME_S, FRAME_S) == pytest.approx(10 / 11)


def test_sizes_of_s2_pro_are_those_of_its_configuration() -> None:
    config = ModelConfig.from_dict(json.loads(CONFIG.read_text()))
    found = sizes_of(config, CodecConfig(), torch.bfloat16)
    assert (found.slow, found.fast) == pytest.approx((S2_PRO.slow, S2_PRO.fast), rel=1e-3)
    assert (found.slow_head, found.fast_head, found.cache_bytes) == (S2_PRO.slow_head, S2_PRO.fast_head, 147456)
    assert (found.attention, found.books, found.passes) == (S2_PRO.attention, 10, 9)
    assert found.codec_flop == S2_PRO.codec_flop
    shapes, _ = describe_layout(config, CodecConfig())
    layer = sum(torch.Size(shape).numel() for name, shape in shapes.items() if ".layers.7." in name and len(shape) == 2)
    assert layer_parameters(config.slow) == layer


def test_parts_of_the_tiny_model(endless_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "K.json"
    small = ("--loads", "1,3", "--contexts", "40", "--seconds", "0.05", "--short")
    run = duetts("bench", "K", "--model", str(endless_folder), "--device", "cpu", *small, "--output", str(path))
    assert run.returncode == 0, run.stderr
    content = json.loads(path.read_text())
    assert content["kind"] == "duetts bench K"
    assert content["short"] is True
    rows = content["rows"]
    assert [(row["streams"], row["context"]) for row in rows if row["part"] == "ar"] == [(1, 40), (3, 40)]
    assert [row["chunk"] for row in rows if row["part"] == "codec"] == [4]  # the quantum of a CPU
    assert [row["positions"] for row in rows if row["part"] == "prefill"] == [50, 265, 512]
    for row in rows:
        assert row.get("unsound_rows", 0) == 0
        assert row.get("frame_ms", row.get("call_ms", row.get("ms"))) > row.get("floor_ms", 0) > -1
    assert "frame_ms" in run.stdout


def test_mistakes_are_told(endless_folder: Path) -> None:
    run = duetts_here("bench", "K", "--model", str(endless_folder), "--parts", "ar,brain")
    assert run.returncode == 2
    assert "'brain'" in run.stderr
