"""Samples of codes to WAV files: `python -m training.lm.listen --samples DIR --codec DIR --out DIR`. Runs on a CPU."""

from __future__ import annotations

import argparse
import json
import wave
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from training.codec.codes import load_codec
from training.lm.sample import STEM
from training.recipe import SAMPLE_RATE
from training.report import say


def save_wave(path: Path, samples: np.ndarray) -> None:
    """float samples as 16-bit mono."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--samples", "--codec", "--out"):
        parser.add_argument(name, required=True, type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    codec = load_codec(options.codec, torch.device("cpu"))
    for name, codes in load_file(options.samples / f"{STEM}.safetensors").items():
        if codes.shape[1]:
            save_wave(options.out / f"{name}.wav", codec.decode(codes[None].long())[0].numpy().reshape(-1))
    for row in json.loads((options.samples / f"{STEM}.json").read_text(encoding="utf-8")):
        (options.out / f"{row['name']}.txt").write_text(row["text"] + "\n", encoding="utf-8")
    say(f"wrote {len(list(options.out.glob('*.wav')))} files")


if __name__ == "__main__":
    main()
