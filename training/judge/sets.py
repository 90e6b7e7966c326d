"""What judges are given: folders of sound files with a table of what is said in them, and what judges write beside them.

A set is a folder with `lines.jsonl` (`name`, `text`, `speaker`) and takes of those lines, `NAME-TAKE.wav`. A judge keeps what
it found in a file of its own in that folder, by sound file, and looks again only at files that changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ORIGINAL, ROUND_TRIP, SPOKEN = "original", "round-trip", "spoken"
TAKES = (ORIGINAL, ROUND_TRIP, SPOKEN)
TABLE = "lines.jsonl"
SAVED_EVERY = 10  # findings


@dataclass(frozen=True, slots=True)
class Line:
    """What is said in the takes of a name, and by whom."""

    name: str
    text: str
    speaker: str


def read_lines(folder: Path) -> list[Line]:
    return [Line(**json.loads(row)) for row in (folder / TABLE).read_text(encoding="utf-8").splitlines()]


def write_lines(folder: Path, lines: Iterable[Line]) -> None:
    (folder / TABLE).write_text("".join(json.dumps(asdict(line)) + "\n" for line in lines), encoding="utf-8")


def takes(folder: Path, line: Line) -> dict[str, Path]:
    """The sound files of a line, by take."""
    paths = {take: folder / f"{line.name}-{take}.wav" for take in TAKES}
    return {take: path for take, path in paths.items() if path.exists()}


def read_json(path: Path) -> dict[str, Any]:
    """The content of a file, empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def write_json(path: Path, values: object) -> None:
    """Whole or not at all."""
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(aside, path)


def findings(folder: Path, name: str, look: Callable[[Path], Any], wanted: Collection[str] = TAKES) -> dict[str, Any]:
    """What `look` finds in the wanted takes, by file. Kept in `NAME.json`; files that did not change are not looked at."""
    kept = read_json(folder / f"{name}.json")
    fresh: dict[str, Any] = {}
    unsaved = 0
    every = (item for line in read_lines(folder) for item in takes(folder, line).items())
    paths = sorted(path for take, path in every if take in wanted)
    for path in paths:
        stamp = f"{path.stat().st_size} {path.stat().st_mtime_ns}"
        entry = kept.get(path.name)
        if entry is None or entry["stamp"] != stamp:
            entry = {"stamp": stamp, "found": look(path)}
            unsaved += 1
        fresh[path.name] = entry
        if unsaved >= SAVED_EVERY:
            write_json(folder / f"{name}.json", kept | fresh)
            unsaved = 0
    write_json(folder / f"{name}.json", fresh)
    return {file: entry["found"] for file, entry in fresh.items()}
