"""Gate G4, sound: `python -m training.judge.quality SET...`, where speechmos is installed.

DNSMOS (P.835: overall, speech, background; and P.808) of every take, kept in each set's `quality.json`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from training.judge.sets import findings, read_lines, takes
from training.report import say

RATE = 16_000
SCORES = {"ovrl_mos": "overall", "sig_mos": "speech", "bak_mos": "background", "p808_mos": "p808"}
RESULT = "quality"


def look(path: Path) -> dict[str, float]:
    """The four scores of a file."""
    import librosa
    from speechmos import dnsmos

    samples, _ = librosa.load(path, sr=RATE)
    found = dnsmos.run(np.clip(samples, -1, 1), RATE)
    return {name: round(float(found[key]), 4) for key, name in SCORES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="+", type=Path)
    for folder in parser.parse_args().sets:
        found = findings(folder, RESULT, look)
        by_take: dict[str, list[dict[str, float]]] = defaultdict(list)
        for line in read_lines(folder):
            for take, path in takes(folder, line).items():
                by_take[take].append(found[path.name])
        for take, scores in by_take.items():
            means = ", ".join(f"{name} {np.mean([score[name] for score in scores]):.2f}" for name in SCORES.values())
            say(f"{folder}, {take}: DNSMOS {means} ({len(scores)} files)")


if __name__ == "__main__":
    main()
