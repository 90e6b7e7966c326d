"""The replicas' benchmark goes the whole way on the tiny model; what it says of speed there means nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import replicas

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processor times are read from /proc")


def test_two_engines_are_compared_with_one_within_a_case() -> None:
    rates = {("core", 1): (1.0, 2.0, 4.0), ("core", 2): (3.0, 3.0, 8.0)}
    runs = [{"case": case, "engines": engines, "audio_s_per_s": rate}
            for (case, engines), found in rates.items() for rate in found]  # fmt: skip
    assert replicas.summary(runs) == {
        "core": {"audio_s_per_s_one": 2.0, "audio_s_per_s_two": 3.0, "speedup": 1.5, "speedups": [3.0, 1.5, 2.0]}
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_case_is_measured(tiny_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "replicas.json"
    options = ["--seconds", "1", "--repeats", "1", "--clients", "4", "--frames", "6", "--output", str(output)]
    replicas.main([str(tiny_folder), *options])
    report = json.loads(output.read_text())
    assert report["command"][0] == "replicas.py"
    assert set(report["results"]) == set(replicas.CASES)
    assert [(run["case"], run["engines"]) for run in report["runs"]] == [(c, n) for c in replicas.CASES for n in (1, 2)]
    for run in report["runs"]:
        assert run["audio_s_per_s"] > 0
        assert run["cores"]["engines"] > 0
        assert run["case"] == "http" or run["cores"]["server"] == 0
