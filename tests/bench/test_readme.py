"""README's performance table is what the script makes of the result files, and the plot can be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.readme_table import BEGIN, END, PEERS, README, RESULTS, bench_rows, replaced, table

MINI = (RESULTS / "mini_2_cores.json").read_text()


def content(**changes: Any) -> dict[str, Any]:
    """As `duetts bench` writes it."""

    def point(workload: str, load: float, first: float | str, streaming: bool = True, rejected: str = "") -> dict[str, Any]:
        figures = {"ttfa_ms_p50": [12.4, None, None], "ttfa_ms_p95": [first, None, None], "rtf_p50": [0.1234, None, None],
                   "audio_s_per_s": [401.26, 399, 403]}  # fmt: skip
        return {"workload": workload, "load": load, "streaming": streaming, "figures": {} if rejected else figures,
                "rejected": rejected, "run": 0}  # fmt: skip

    run = {"server": {"/version": {"model": "s2-pro", "dtype": "bfloat16"}}, "client": {"machine": "x"},
           "card": ["NVIDIA H200, 580.1, 100 MiB"]}  # fmt: skip
    points = [point("T", 64, 20.6), point("T", 8, "infinite"), point("L1", 1, 14), point("T", 1, 1, False),
              point("T", 2, 1, rejected="wrong"), point("P", 2, 1)]  # fmt: skip
    return {"kind": "duetts bench", "short": False, "runs": [run], "points": points} | changes


def test_the_table_in_readme_is_the_one_that_the_script_makes() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert replaced(text) == text, "python benchmarks/readme_table.py --write"


def test_rows_come_from_files_in_order_of_workload_and_load(tmp_path: Path) -> None:
    (tmp_path / "mini_2_cores.json").write_text(MINI)
    (tmp_path / "h200.json").write_text(json.dumps(content()))
    (tmp_path / "null.json").write_text(json.dumps(content()))  # of a server without a model: no result
    (tmp_path / "other.json").write_text("[]")
    lines = table(tmp_path).splitlines()
    alone = json.loads(MINI)["results"][0]
    first = f"{alone['first_audio_ms_median']:.0f} / {alone['first_audio_ms_worst']:.0f} | {alone['rtf_median']:.2f}"
    assert lines[2].startswith(f"| **duetts**, duetts-mini, in process | 2 cores | default voice | 1 | {first} | ")
    assert lines[4:7] == [
        "| **duetts**, s2-pro, bfloat16 | H200 | known 10 s voice | 1 | 12 / 14 | 0.123 | 401.3 |",
        "| **duetts**, s2-pro, bfloat16 | H200 | no voice | 8 | 12 / ∞ | 0.123 | 401.3 |",
        "| **duetts**, s2-pro, bfloat16 | H200 | no voice | 64 | 12 / 21 | 0.123 | 401.3 |",
    ]
    assert len([line for line in lines if line.startswith("| ")]) == 1 + 2 + 3 + len(PEERS)
    assert all("short form" in row.server for row in bench_rows(content(short=True)))


def test_a_plot_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from duetts.bench.plot import draw

    for floors in (True, False):
        path = tmp_path / f"{floors}.svg"
        failed = content()["points"][1]
        failed["figures"]["ttfa_ms_p50"] = ["infinite", None, None]
        for measured in ({"ours": content(), "nobody": content(points=[])}, {"failed": content(points=[failed])}):
            draw(measured, path, floors=floors)
        assert path.read_text().startswith("<?xml")
