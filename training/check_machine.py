"""Fails at once, with the missing piece's name, when a machine cannot run stage 1: `python -m training.check_machine`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch

from training.data.texts import read_lines
from training.recipe import codec_config
from training.report import say

MODULES = ("numpy", "scipy", "onnx", "onnxruntime", "soxr", "safetensors", "hibari", "duetts.models.codec")


def main(lines: str, *options: str) -> None:
    missing = []
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    if missing:
        raise SystemExit("missing here: " + ", ".join(missing))
    found = read_lines(Path(lines))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "NO GPU"
    frame = codec_config().frame_length
    say(f"{gpu}, torch {torch.__version__}, {os.cpu_count()} cores, {len(found.train)} lines, {frame} samples a frame")
    if not torch.cuda.is_available() and "--any-device" not in options:
        raise SystemExit("torch sees no GPU")


if __name__ == "__main__":
    main(*sys.argv[1:])
