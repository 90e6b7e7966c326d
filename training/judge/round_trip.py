"""Gate G1, first half: `python -m training.judge.round_trip --codec DIR --lines F --out DIR --heart 100 --blend 20`.

Held-out lines in held-out voices, once as the teacher spoke them and once through the codec. Both are written as sound
files (`NAME-original.wav`, `NAME-round-trip.wav`) next to `lines.jsonl`, for `training.judge.wer` and
`training.judge.similarity`; what can be told without a judge is printed here. Lines with digits are left out: how a
number is read is no matter of the codec.
"""

from __future__ import annotations

import argparse
import math
import time
import wave
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from duetts.models.codec import Codec
from training.codec.codes import load_codec
from training.codec.spectra import MelDistance
from training.data.clips import make_clip
from training.data.manifest import Row
from training.data.speakers import DEFAULT, HELD_OUT, Speaker
from training.data.teachers import Blends, Heart
from training.data.texts import read_lines
from training.judge.sets import ORIGINAL, ROUND_TRIP, Line, write_lines
from training.recipe import SAMPLE_RATE
from training.report import say


def spoken_lines(lines: Path) -> list[str]:
    """Held-out lines of at least three words, without digits."""
    return [line for line in read_lines(lines).held_out if len(line.split()) >= 3 and not any(c.isdigit() for c in line)]


def rows(lines: list[str], speakers: list[Speaker], count: int) -> Iterator[Row]:
    """One line each, the speakers in turn. Every speaker set begins with the first line."""
    for number, line in enumerate(lines[:count]):
        yield Row(number, (line,), speakers[number % len(speakers)], 1000 + number)


def write_wave(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(np.round(np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())


def decibel(ratio: float) -> float:
    return 20 * math.log10(max(ratio, 1e-9))


class RoundTrip:
    """The codec, and sums of what its decoded sound shows."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.mel = MelDistance()
        self.sums: dict[str, list[float]] = defaultdict(list)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Samples through codes and back; adds to the numbers."""
        original = torch.from_numpy(samples.astype(np.float32) / 32768)[None]
        started = time.monotonic()
        codes = self.codec.encode(original)
        encoded = time.monotonic()
        decoded = self.codec.decode(codes)[:, : original.shape[1]]
        seconds = original.shape[1] / SAMPLE_RATE
        for name, value in {
            "mel distance": float(self.mel(decoded, original)),
            "level, dB against the original": decibel(float(decoded.square().mean().sqrt() / original.square().mean().sqrt())),
            "peak": float(decoded.abs().max()),
            "mean (DC), dB of full scale": decibel(abs(float(decoded.mean()))),
            "encoding, s per s": (encoded - started) / seconds,
            "decoding, s per s": (time.monotonic() - encoded) / seconds,
        }.items():
            self.sums[name].append(value)
        return decoded[0].numpy()

    def report(self) -> None:
        for name, values in self.sums.items():
            say(f"{name:32s} mean {np.mean(values):8.3f}  from {min(values):8.3f} to {max(values):8.3f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", required=True, help="folder with codec.safetensors")
    parser.add_argument("--lines", required=True, help="file written by training.data.texts")
    parser.add_argument("--out", required=True)
    parser.add_argument("--heart", type=int, default=100, help="sentences of the first teacher")
    parser.add_argument("--blend", type=int, default=0, help="sentences of the second teacher")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    lines = spoken_lines(Path(options.lines))
    pass_through = RoundTrip(load_codec(Path(options.codec), torch.device("cpu")))
    front = Heart()
    hearts = [DEFAULT, *(speaker for speaker in HELD_OUT if speaker.is_heart)]
    blends = [speaker for speaker in HELD_OUT if not speaker.is_heart]
    wanted = [(front, row, "heart") for row in rows(lines, hearts, options.heart)]
    if options.blend:
        second = Blends()
        wanted += [(second, row, "blend") for row in rows(lines, blends, options.blend)]
    lines_said = []
    for teacher, row, kind in wanted:
        clip = make_clip(row, front, teacher)
        name = f"{kind}-{row.number:03d}"
        write_wave(folder / f"{name}-{ORIGINAL}.wav", clip.samples / 32768)
        write_wave(folder / f"{name}-{ROUND_TRIP}.wav", pass_through(clip.samples))
        lines_said.append(Line(name, row.texts[0], row.speaker.name))
    write_lines(folder, lines_said)
    say(f"{len(wanted)} sentences")
    pass_through.report()


if __name__ == "__main__":
    main()
