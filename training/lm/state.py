"""What a run leaves on disk: everything to go on with (`state.pt`), and averaged bf16 weights that travel (`export/`).

What travels has no moments of the optimiser: theirs reach back only a few dozen steps here (0.9, 0.95), so a run that goes
on elsewhere warms up for 200 steps instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from duetts.checkpoint import published_name
from duetts.models.dual_ar import DualAR
from training.codec.state import split_tensors

INDEX = "model.safetensors.index.json"
PROGRESS = "progress.json"


def published_weights(model: DualAR) -> dict[str, Tensor]:
    """bf16 weights by their published names."""
    return {published_name(name): value.detach().bfloat16().cpu().contiguous() for name, value in model.named_parameters()}


def export_model(model: DualAR, folder: Path, progress: dict[str, Any]) -> None:
    """Weights in files below the shard size, their index, and how far the run is."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = split_tensors(published_weights(model))
    places: dict[str, str] = {}
    for index, group in enumerate(groups):
        name = f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors"
        partial = folder / f".{name}"
        save_file(group, partial, {"format": "pt"})
        partial.replace(folder / name)
        places |= dict.fromkeys(group, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}, indent=0) + "\n", encoding="utf-8")
    (folder / PROGRESS).write_text(json.dumps(progress) + "\n", encoding="utf-8")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model*.safetensors` of a folder, by published name."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(path)
    return tensors


def load_weights(model: DualAR, folder: Path) -> dict[str, Any]:
    """Fills the model from an export; returns the progress that was written with it."""
    tensors = read_weights(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[published_name(name)])
    path = folder / PROGRESS
    progress: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return progress
