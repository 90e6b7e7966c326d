"""The clips that voices are cloned from, as they are committed: `python -m training.judge.references ORIGINALS/references`.

One of each held-out voice, spoken by the teachers (`training.judge.originals`), as Opus of 48 kbit/s: all eight have 0.2 MB.
"""

from __future__ import annotations

import argparse
import wave
from pathlib import Path

import av
import numpy as np

from training.judge.sets import ORIGINAL, read_lines, write_lines
from training.report import say

FOLDER = Path(__file__).parent / "references"
BIT_RATE = 48_000


def clip_path(name: str, folder: Path = FOLDER) -> Path:
    return folder / f"{name}.opus"


def write_opus(path: Path, samples: np.ndarray, rate: int, bit_rate: int = BIT_RATE) -> None:
    """int16 mono samples as Ogg Opus."""
    with av.open(str(path), "w", format="ogg") as container:
        stream = container.add_stream("libopus", rate=48_000, layout="mono")
        stream.bit_rate = bit_rate
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler("s16", "mono", 48_000)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))


def read_wave(path: Path) -> tuple[np.ndarray, int]:
    """int16 samples and rate of a mono WAV file."""
    with wave.open(str(path), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2"), file.getframerate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("originals", type=Path)
    folder = parser.parse_args().originals
    FOLDER.mkdir(exist_ok=True)
    lines = read_lines(folder)
    for line in lines:
        write_opus(clip_path(line.name), *read_wave(folder / f"{line.name}-{ORIGINAL}.wav"))
    write_lines(FOLDER, lines)
    say(f"{len(lines)} clips, {sum(path.stat().st_size for path in FOLDER.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
