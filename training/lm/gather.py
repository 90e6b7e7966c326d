"""Code files of single shards into few that travel: `python -m training.lm.gather --codes DIR --out DIR --kinds blend`.

Beside each file lies the byte that each of its frames speaks, as beside the files of shards.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from training.codec.codes import FILE_BYTES, CodedClip, book_bits, read_codes, write_codes
from training.lm.clips import code_files
from training.lm.encode import PLACES
from training.recipe import FRAME, SAMPLE_RATE
from training.report import say

BLENDS = ["blend", "held-blend"]


class Bundle:
    """Clips and their places, written to numbered files before a file would become too long."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.clips: list[CodedClip] = []
        self.places: list[np.ndarray] = []
        self.frames, self.written, self.total = 0, 0, 0

    def add(self, clip: CodedClip, places: np.ndarray) -> None:
        count = clip.codes.shape[1]
        if self.clips and (self.frames + count) * sum(book_bits()) / 8 > 0.97 * FILE_BYTES:
            self.flush()
        self.clips.append(clip)
        self.places.append(places)
        self.frames += count

    def flush(self) -> None:
        self.written += 1
        self.total += self.frames
        stem = f"codes-{self.written:02d}"
        write_codes(self.out / f"{stem}.safetensors", self.clips)
        np.save(self.out / f"{stem}{PLACES}", np.concatenate(self.places))
        self.clips, self.places, self.frames = [], [], 0


def places_beside(path: Path, frames: int) -> np.ndarray:
    """The bytes spoken in the frames of a code file; -1 where that is not known."""
    beside = path.with_name(path.name.removesuffix(".safetensors") + PLACES)
    return np.load(beside) if beside.exists() else np.full(frames, -1, np.int16)


def gather(files: list[Path], out: Path, kinds: list[str]) -> float:
    """Takes the wanted kinds' clips from code files; returns the hours gathered."""
    out.mkdir(parents=True, exist_ok=True)
    bundle = Bundle(out)
    for path in sorted(files):
        clips = list(read_codes(path))
        places = places_beside(path, sum(clip.codes.shape[1] for clip in clips))
        start = 0
        for clip in clips:
            end = start + clip.codes.shape[1]
            if clip.kind in kinds:
                bundle.add(clip, places[start:end])
            start = end
    if bundle.clips:
        bundle.flush()
    return bundle.total * FRAME / SAMPLE_RATE / 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codes", required=True, nargs="+", type=Path, help="folders of code files")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--kinds", nargs="+", default=BLENDS)
    options = parser.parse_args()
    say(f"codes of {gather(code_files(options.codes), options.out, options.kinds):.1f} h of {' and '.join(options.kinds)}")


if __name__ == "__main__":
    main()
