"""Gate G1 and G3, voices: `python -m training.judge.similarity DIR`, where `training.judge.round_trip` wrote DIR.

GE2E speaker vectors (resemblyzer): every take of a sentence against its original, and, for scale, originals of one
sentence against originals of other speakers' sentences.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from training.judge.round_trip import ORIGINAL
from training.report import say


def open_encoder() -> Any:
    """The encoder; names that newer libraries dropped and that resemblyzer still imports are put back first."""
    import scipy.ndimage

    resources = types.ModuleType("pkg_resources")
    resources.get_distribution = lambda name: types.SimpleNamespace(version="2.0.10")  # type: ignore[attr-defined]
    sys.modules.setdefault("pkg_resources", resources)
    sys.modules.setdefault("scipy.ndimage.morphology", scipy.ndimage)
    if not hasattr(np, "bool"):
        np.bool = np.bool_  # type: ignore[attr-defined]
    from resemblyzer import VoiceEncoder

    return VoiceEncoder("cpu", verbose=False)


def vector(encoder: Any, path: Path) -> np.ndarray:
    from resemblyzer import preprocess_wav

    found: np.ndarray = encoder.embed_utterance(preprocess_wav(path))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    options = parser.parse_args()
    folder = Path(options.folder)
    lines = [json.loads(line) for line in (folder / "lines.jsonl").read_text(encoding="utf-8").splitlines()]
    encoder = open_encoder()
    originals: list[tuple[str, np.ndarray]] = []
    close: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in lines:
        original = vector(encoder, folder / f"{line['name']}-{ORIGINAL}.wav")
        originals.append((line["speaker"], original))
        for path in sorted(folder.glob(f"{line['name']}-*.wav")):
            take = path.stem.removeprefix(f"{line['name']}-")
            if take == ORIGINAL:
                continue
            value = float(original @ vector(encoder, path))
            for voice in ("all", line["speaker"]):
                close[take, voice].append(value)
    for (take, voice), values in sorted(close.items(), key=lambda item: (item[0][1], item[0][0])):
        say(f"{voice:22s} {take:12s} similarity mean {np.mean(values):.3f}, lowest {min(values):.3f} of {len(values)}")
    for name, wanted in (("same speaker", True), ("another speaker", False)):
        values = [float(a @ b) for (i, a), (j, b) in combinations(originals, 2) if (i == j) is wanted]
        say(f"originals against originals of {name}: mean {np.mean(values):.3f}")


if __name__ == "__main__":
    main()
