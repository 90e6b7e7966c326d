"""The performance table of README.md, from the files in benchmarks/results. `--write` puts it there; without, it is printed.

    python benchmarks/readme_table.py [--write]

Our rows come from result files only. Rows of other servers are what was measured side by side, or what they have published; the
conditions stand in the table.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS, README = ROOT / "benchmarks" / "results", ROOT / "README.md"
BEGIN, END = "<!-- speed: made by benchmarks/readme_table.py -->", "<!-- /speed -->"
WORKLOADS = {
    "L1": "known 10 s voice", "L2": "new 10 s voice each time", "T": "no voice", "C1": "new voices", "C2": "8 voices",
}  # fmt: skip
NOTES = """\
First audio in ms, median / 95 % (of duetts-mini: median / worst). RTF is of one request, from its start to its last byte;
audio-s/s are seconds of audio that all streams got in a second. ¹ Measured side by side on one H200 (torch 2.11, CUDA 13,
random weights of the full size, 214 frames a request, closed loop, raw streams). ² As published by its makers or users, with
trained weights; not measured here.
"""


class Row(NamedTuple):
    """One line. Empty texts are not known."""

    server: str
    machine: str
    what: str
    streams: str
    first_audio: str
    rtf: str
    audio_s_per_s: str


VLLM, CARD = "vLLM-Omni 0.26.0, its file for high concurrency ¹", "H200"
PEERS = (
    Row("fish-speech, its own loop, offline ¹", CARD, "no voice", "1", "212 (prefill and 2 frames)", "2.72", "0.37"),
    Row(VLLM, CARD, "no voice", "1", "99 / 120", "0.290", "3.45"),
    Row(VLLM, CARD, "no voice", "8", "284 / 576", "0.42", "18.8"),
    Row(VLLM, CARD, "no voice", "32", "466 / 1074", "0.77", "41.2"),
    Row(VLLM, CARD, "no voice", "64", "1035 / 1118", "1.10", "57.4"),
    Row(VLLM, CARD, "10 s voice in each request", "1", "208", "0.31", "3.2"),
    Row(VLLM, CARD, "10 s voice in each request", "8", "1365", "0.54", "14.3"),
    Row(VLLM, CARD, "10 s voice in each request", "32", "2942", "1.04", "30.5"),
    Row("S2 Pro's model card ²", CARD, "", "1", "about 100", "0.195", ""),
    Row("SGLang-Omni at its launch ²", CARD, "", "1", "140", "0.34", ""),
    Row("SGLang-Omni ²", "H100", "", "16", "1480", "", ""),
    Row("vLLM-Omni ²", "L20X", "", "64", "1000 (99 %: 8000)", "", "57"),
)


def mini_rows(content: dict[str, Any]) -> Iterator[Row]:
    """Of benchmarks/first_audio.py. Its RTF is the time of all streams over the audio of all."""
    for one in content["results"]:
        times = f"{one['first_audio_ms_median']:.0f} / {one['first_audio_ms_worst']:.0f}"
        streams, rtf, cores = one["streams"], one["rtf_median"], content["machine"].split(", ")[1]
        yield Row("**duetts**, duetts-mini, in process", cores, "default voice", str(streams), times, f"{rtf * streams:.2f}",
                  f"{1 / rtf:.1f}")  # fmt: skip


def bench_rows(content: dict[str, Any]) -> Iterator[Row]:
    """Of `duetts bench`: streams only, one after another by workload and load."""
    order = list(WORKLOADS)
    points = [one for one in content["points"] if one["workload"] in order and one["streaming"] and one["figures"]]
    for one in sorted(points, key=lambda point: (order.index(point["workload"]), point["load"])):
        run, found = content["runs"][one["run"]], {name: value[0] for name, value in one["figures"].items()}
        version = run["server"].get("/version") or {}
        machine = run["card"][0].split(",")[0].removeprefix("NVIDIA ") if run["card"] else run["client"]["machine"]
        times = " / ".join("∞" if found[f"ttfa_ms_p{percent}"] == "infinite" else f"{found[f'ttfa_ms_p{percent}']:.0f}"
                           for percent in (50, 95))  # fmt: skip
        rtf = found["rtf_p50"]
        form = ", short form" if content["short"] else ""
        yield Row(f"**duetts**, {version.get('model', '?')}, {version.get('dtype', '?')}{form}", machine,
                  WORKLOADS[one["workload"]], f"{one['load']:g}", times,
                  "∞" if rtf == "infinite" else f"{rtf:.3f}", f"{found['audio_s_per_s']:.1f}")  # fmt: skip


def table(results: Path = RESULTS) -> str:
    """The lines between the marks: duetts-mini first, then what `duetts bench` has measured, then others."""
    rows = list(mini_rows(json.loads((results / "mini_2_cores.json").read_text())))
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.get("kind") == "duetts bench" and not path.stem.startswith("null"):
            rows += bench_rows(content)
    head = "| server | machine | request | streams | first audio | RTF | audio-s/s |\n|---|---|---|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in [*rows, *PEERS]) + "\n" + NOTES


def replaced(readme: str) -> str:
    """README with the table as it is now. Raises `ValueError` if it has no marks."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.split(END)[1]}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--write", action="store_true")
    if arguments.parse_args().write:
        README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
