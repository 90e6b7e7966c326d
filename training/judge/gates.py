"""The table of gates: `python -m training.judge.gates --out DIR [--originals DIR]`, after all judges have looked.

Reads what `training.judge.speak` and the judges wrote, prints each measure beside its limit, what the specification expects of
the teacher and what the teacher reached here, and writes `gates.json`. Exits with 1 if a gate is missed or was not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from training.judge.originals import HEART, VOICES
from training.judge.quality import RESULT as QUALITY
from training.judge.sets import ORIGINAL, ROUND_TRIP, SPOKEN, read_json, read_lines, write_json
from training.judge.similarity import RESULT as SIMILARITY
from training.judge.speak import CLONES, CODEC, DEFAULT_VOICE, MODEL, SPEED, STORY
from training.judge.story import missing_sentences
from training.judge.wer import BASE, TINY, file_name
from training.judge.words import Difference, differ, word_error_rate

MOST_WORDS = 3  # that a sentence may leave out or repeat
RESULT = "gates.json"
Value = float | None


@dataclass(frozen=True, slots=True)
class Gate:
    """A limit and how to read what was measured: of our output folder, and of the teachers' if that makes sense."""

    name: str
    measure: str
    limit: float
    at_least: bool
    unit: str
    ceiling: str  # what spec/embedded_model.md 1 expects of the teacher
    ours: Callable[[Path], Value]
    teacher: Callable[[Path], Value] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table."""

    gate: str
    measure: str
    value: Value
    limit: float
    at_least: bool
    unit: str
    ceiling: str
    teacher: Value

    @property
    def passed(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def found_in(folder: Path, name: str) -> dict[str, Any]:
    """A judge's findings of a set, by file."""
    return {file: entry["found"] for file, entry in read_json(folder / f"{name}.json").items()}


def differences(folder: Path, size: str, take: str) -> list[Difference]:
    heard = found_in(folder, file_name(size)) if folder.is_dir() else {}
    files = {f"{line.name}-{take}.wav": line for line in read_lines(folder)} if heard else {}
    return [differ(line.text, heard[file]) for file, line in files.items() if file in heard]


def wer(name: str, size: str, take: str = SPOKEN) -> Callable[[Path], Value]:
    """Per cent of all words."""

    def read(out: Path) -> Value:
        found = differences(out / name, size, take)
        return 100 * word_error_rate(found) if found else None

    return read


def strayed(out: Path) -> Value:
    """Per cent of sentences that ran to their bound, or left out or repeated too much."""
    folder = out / DEFAULT_VOICE
    found = differences(folder, BASE, SPOKEN)
    answers = read_json(folder / "answers.json")
    if not found or len(answers) < len(found):
        return None
    files = [f"{line.name}-{SPOKEN}.wav" for line in read_lines(folder)]
    bad = [answers[file]["finish"] == "length" or said.loses_text(MOST_WORDS) for file, said in zip(files, found, strict=True)]
    return 100 * sum(bad) / len(bad)


def cloned(name: str, count: Callable[[list[dict[str, Any]]], float]) -> Callable[[Path], Value]:
    def read(out: Path) -> Value:
        entries = list(read_json(out / name / f"{SIMILARITY}.json").get("references", {}).values())
        return count(entries) if entries else None

    return read


def own(entries: list[dict[str, Any]]) -> float:
    return mean(entry["own"] for entry in entries)


def ranked_first(entries: list[dict[str, Any]]) -> float:
    return 100 * mean(entry["nearest"] == entry["voice"] for entry in entries)


def kept(out: Path) -> Value:
    """How much of the voice the codec keeps."""
    values = list(read_json(out / CODEC / f"{SIMILARITY}.json").get("originals", {}).values())
    return mean(values) if values else None


def sound(name: str) -> Callable[[Path], Value]:
    def read(out: Path) -> Value:
        values = [scores["overall"] for scores in found_in(out / name, QUALITY).values()]
        return mean(values) if values else None

    return read


def speed(key: str) -> Callable[[Path], Value]:
    return lambda out: read_json(out / SPEED).get(key)


def size(out: Path) -> Value:
    found = read_json(out / MODEL).get("weights_bytes")
    return None if found is None else found / 1e6


def story_rate(out: Path) -> Value:
    found = differences(out / STORY, BASE, SPOKEN)
    return 100 * word_error_rate(found) if found else None


def story_missing(out: Path) -> Value:
    folder = out / STORY
    heard = found_in(folder, file_name(BASE)) if folder.is_dir() else {}
    if not heard:
        return None
    return sum(len(missing_sentences(line.text, heard[f"{line.name}-{SPOKEN}.wav"])) for line in read_lines(folder))


GATES = (
    Gate("G1", "WER of the codec's round trip, Whisper base", 4, False, "%", "1-2", wer(CODEC, BASE, ROUND_TRIP),
         wer(HEART, BASE, ORIGINAL)),
    Gate("G1", "similarity of original and round trip", 0.85, True, "", "1.0", kept),
    Gate("G2", "WER of the default voice, Whisper base", 8, False, "%", "1.0", wer(DEFAULT_VOICE, BASE),
         wer(HEART, BASE, ORIGINAL)),
    Gate("G2", "WER of the default voice, tiny.en", 10, False, "%", "1.3", wer(DEFAULT_VOICE, TINY),
         wer(HEART, TINY, ORIGINAL)),
    Gate("G3", "similarity to the clip, 8 held-out voices", 0.75, True, "", "0.82-0.94", cloned(CLONES, own),
         cloned(VOICES, own)),
    Gate("G3", "right voice nearest of 8", 85, True, "%", "-", cloned(CLONES, ranked_first),
         cloned(VOICES, ranked_first)),
    Gate("G4", "DNSMOS overall", 2.9, True, "", "3.3", sound(DEFAULT_VOICE), sound(HEART)),
    Gate("G5", "RTF, one stream", 0.7, False, "", "-", speed("rtf")),
    Gate("G5", "first audio, one stream", 300, False, "ms", "-", speed("first_audio_ms")),
    Gate("G6", "weights on disk", 45, False, "MB", "-", size),
    Gate("G7", "sentences that run away, skip or repeat", 3, False, "%", "0", strayed),
    Gate("long", "WER of a story of 2,000 characters", 12, False, "%", "-", story_rate),
    Gate("long", "missing sentences of it", 0, False, "", "-", story_missing),
)  # fmt: skip


def judge(out: Path, originals: Path | None) -> list[Finding]:
    return [
        Finding(
            gate.name, gate.measure, gate.ours(out), gate.limit, gate.at_least, gate.unit, gate.ceiling,
            gate.teacher(originals) if gate.teacher and originals else None,
        )
        for gate in GATES
    ]  # fmt: skip


def written(value: Value) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def table(findings: list[Finding]) -> str:
    """As Markdown."""
    rows = [
        "| gate | measure | duetts-mini | passes at | teacher, expected | teacher, here | |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in findings:
        limit = f"{'>=' if found.at_least else '<='} {found.limit:g} {found.unit}".strip()
        value = "not measured" if found.value is None else f"{written(found.value)} {found.unit}".strip()
        verdict = "passed" if found.passed else "missed" if found.value is not None else "-"
        cells = (found.gate, found.measure, value, limit, found.ceiling, written(found.teacher), verdict)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--originals", type=Path, help="the teachers' clips, judged as well")
    options = parser.parse_args()
    findings = judge(options.out, options.originals)
    print(table(findings))
    values = {
        "model": read_json(options.out / MODEL),
        "speed": read_json(options.out / SPEED),
        "gates": [asdict(found) | {"passed": found.passed} for found in findings],
    }
    write_json(options.out / RESULT, values)
    if not all(found.passed for found in findings):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
