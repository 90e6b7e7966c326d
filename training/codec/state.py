"""What a codec run leaves on disk: everything to go on with (`state.pt`), and bf16 weights that fit anywhere (`export/`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.recipe import CODEC

SHARD_BYTES = 15 << 20


def save_state(path: Path, values: dict[str, Any]) -> None:
    """Replaces the file at once, so that a run killed here still has the one before."""
    partial = path.with_suffix(".partial")
    torch.save(values, partial)
    partial.replace(path)


def split_tensors(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in order, cut into groups that stay below `SHARD_BYTES`."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        bytes_here = value.numel() * value.element_size()
        if groups[-1] and size + bytes_here > SHARD_BYTES:
            groups.append({})
            size = 0
        groups[-1][name] = value
        size += bytes_here
    return groups


def export_weights(module: nn.Module, folder: Path, stem: str) -> list[Path]:
    """bf16 weights in one file, or several below the shard size, in the names that the loader reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().bfloat16().cpu().contiguous() for name, value in module.state_dict().items()}
    groups = split_tensors(tensors)
    paths = []
    for index, group in enumerate(groups):
        suffix = "" if len(groups) == 1 else f"-{index + 1:05d}-of-{len(groups):05d}"
        partial, path = folder / f".{stem}{suffix}", folder / f"{stem}{suffix}.safetensors"
        save_file(group, partial)
        partial.replace(path)
        paths.append(path)
    return paths


def read_weights(folder: Path, stem: str) -> dict[str, Tensor]:
    """What `export_weights` wrote, in float32."""
    tensors = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        tensors.update(load_file(path))
    return {name: value.float() for name, value in tensors.items()}


def export_codec(codec: nn.Module, folder: Path) -> None:
    """The codec as duetts loads it: `codec.safetensors` and `codec_config.json`."""
    export_weights(codec, folder, "codec")
    (folder / "codec_config.json").write_text(json.dumps(CODEC, indent=2) + "\n", encoding="utf-8")
