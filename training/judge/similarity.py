"""Gates G1 and G3, voices: `python -m training.judge.similarity SET... [--references DIR]`, where resemblyzer is installed.

GE2E speaker vectors, kept in each set's `vectors.json`. A take that has an original is compared with it; for scale, originals
are compared with one another. With `--references` (one clip for each voice) every take is compared with the clips of all
voices: how near it is to its own, and whether that is the nearest. Both go into `similarity.json`.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from training.judge.references import FOLDER, clip_path
from training.judge.sets import ORIGINAL, TAKES, Line, findings, read_lines, takes, write_json
from training.report import say

Vectors = dict[str, np.ndarray]
RESULT = "similarity"


class Encoder:
    """resemblyzer's GE2E encoder; names that newer libraries dropped and that it still imports are put back first."""

    def __init__(self) -> None:
        import scipy.ndimage

        resources = types.ModuleType("pkg_resources")
        resources.get_distribution = lambda name: types.SimpleNamespace(version="2.0.10")  # type: ignore[attr-defined]
        sys.modules.setdefault("pkg_resources", resources)
        sys.modules.setdefault("scipy.ndimage.morphology", scipy.ndimage)
        if not hasattr(np, "bool"):
            np.bool = np.bool_  # type: ignore[attr-defined]
        from resemblyzer import VoiceEncoder

        self._encoder: Any = VoiceEncoder("cpu", verbose=False)

    def vector(self, path: Path) -> list[float]:
        """256 numbers of length 1."""
        from resemblyzer import preprocess_wav

        return [round(float(value), 6) for value in self._encoder.embed_utterance(preprocess_wav(path))]


def against_originals(folder: Path, lines: list[Line], vectors: Vectors) -> dict[str, float]:
    """The similarity of every take to the original of its line, by file."""
    found = {}
    for line in lines:
        paths = takes(folder, line)
        for take, path in paths.items():
            if take != ORIGINAL and ORIGINAL in paths:
                found[path.name] = float(vectors[path.name] @ vectors[paths[ORIGINAL].name])
    return found


def against_references(folder: Path, lines: list[Line], vectors: Vectors, references: Vectors) -> dict[str, dict[str, Any]]:
    """How near every take is to the clip that its voice was to follow, and whose clip is nearest, by file."""
    found = {}
    for line in lines:
        for path in takes(folder, line).values():
            near = {name: float(vectors[path.name] @ vector) for name, vector in references.items()}
            found[path.name] = {"voice": line.speaker, "own": near[line.speaker], "nearest": max(near, key=near.__getitem__)}
    return found


def say_cloning(found: dict[str, dict[str, Any]]) -> None:
    by_voice: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in found.values():
        by_voice[entry["voice"]].append(entry)
    for voice, entries in (*by_voice.items(), ("all", list(found.values()))):
        right = sum(entry["nearest"] == voice or (voice == "all" and entry["nearest"] == entry["voice"]) for entry in entries)
        say(f"{voice:22s} similarity to its clip mean {np.mean([e['own'] for e in entries]):.3f}, "
            f"nearest to the right one {right} of {len(entries)}")  # fmt: skip


def say_takes(lines: list[Line], found: dict[str, float], vectors: Vectors) -> None:
    takes_found: dict[str, list[float]] = defaultdict(list)
    for file, value in found.items():
        takes_found[next(take for take in TAKES if file.endswith(f"-{take}.wav"))].append(value)
    for take, values in takes_found.items():
        say(f"{take}: similarity to the original mean {np.mean(values):.3f}, lowest {min(values):.3f} of {len(values)}")
    originals = [(line.speaker, vectors[name]) for line in lines if (name := f"{line.name}-{ORIGINAL}.wav") in vectors]
    for name, wanted in (("the same speaker", True), ("another speaker", False)):
        values = [float(a @ b) for (i, a), (j, b) in combinations(originals, 2) if (i == j) is wanted]
        if values:
            say(f"originals against originals of {name}: mean {np.mean(values):.3f}")


def judge(folder: Path, encoder: Encoder, references: Vectors) -> None:
    lines = read_lines(folder)
    vectors = {file: np.array(vector) for file, vector in findings(folder, "vectors", encoder.vector).items()}
    takes_found = against_originals(folder, lines, vectors)
    say(f"{folder}:")
    say_takes(lines, takes_found, vectors)
    cloned = {}
    if all(line.speaker in references for line in lines):
        cloned = against_references(folder, lines, vectors, references)
        say_cloning(cloned)
    write_json(folder / f"{RESULT}.json", {"originals": takes_found, "references": cloned})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--references", type=Path, default=FOLDER, help="folder of clips, one a voice")
    options = parser.parse_args()
    encoder = Encoder()
    names = [line.name for line in read_lines(options.references)]
    references = {name: np.array(encoder.vector(clip_path(name, options.references))) for name in names}
    for folder in options.sets:
        judge(folder, encoder, references)


if __name__ == "__main__":
    main()
