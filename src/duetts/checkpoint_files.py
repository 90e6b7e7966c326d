"""Tensors in files: safetensors (one or many shards) and torch pickles, read one tensor at a time.

Knows file formats and how damage in them looks; knows no model. Pickles are opened with `weights_only=True` and mapped,
not read, so that host memory holds one tensor at a time.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from duetts.errors import CheckpointError
from duetts.json_fields import read_json

INDEX_NAME = "model.safetensors.index.json"
METADATA = "__metadata__"  # the entry of a safetensors header that is no tensor


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One file and the shapes of the tensors it promises, known before any is read."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    pickled: Mapping[str, Tensor] | None = None

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Its tensors one by one, on the host."""
        if self.pickled is not None:
            yield from self.pickled.items()
            return
        with safe_open(self.path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is not iterable)
                yield name, file.get_tensor(name)


def open_safetensors(path: Path) -> TensorFile:
    """Reads and checks the header. Raises `CheckpointError`, which names the first tensor that the file is too short for."""
    try:
        with safe_open(path, framework="pt") as file:
            return TensorFile(path, {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name}: {_cut_off(path) or error}") from error


def _cut_off(path: Path) -> str:
    """Where a safetensors file was cut off; empty if something else is wrong with it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > size or size < 8:
            return f"truncated or no safetensors file: its header does not fit in {size} bytes"
        try:
            header = json.loads(file.read(start - 8))
            ends = sorted((start + entry["data_offsets"][1], name) for name, entry in header.items() if name != METADATA)
        except (ValueError, RecursionError, AttributeError, TypeError, LookupError):
            return ""
    return next((f"truncated at {size} bytes; tensor {name!r} ends at byte {end}" for end, name in ends if end > size), "")


def open_pickle(path: Path) -> TensorFile:
    """Maps a torch file of plain tensors. Unwraps `state_dict`, then `generator` as a dict or as a prefix (others dropped)."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path.name}: cannot be read as a torch file, perhaps truncated: {reason}") from error
    for wrapper in ("state_dict", "generator"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name}: holds no dictionary of tensors")
    if any(str(name).startswith("generator.") for name in content):
        content = {str(name).removeprefix("generator."): value for name, value in content.items()
                   if str(name).startswith("generator.")}  # fmt: skip
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path.name}: the entry {name!r} is no tensor")
    return TensorFile(path, {name: tuple(value.shape) for name, value in content.items()}, content)


def open_language_model(folder: Path) -> list[TensorFile]:
    """The files of the language model: shards by index, one safetensors file, or `model.pth`, in this order."""
    if (folder / INDEX_NAME).exists():
        return _open_shards(folder)
    if (folder / "model.safetensors").exists():
        return [open_safetensors(folder / "model.safetensors")]
    if (folder / "model.pth").exists():
        return [open_pickle(folder / "model.pth")]
    raise CheckpointError(f"{folder.name}: no weights: neither {INDEX_NAME}, model.safetensors nor model.pth is there")


def _open_shards(folder: Path) -> list[TensorFile]:
    places = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{INDEX_NAME}: has no weight_map from tensors to files")
    files = []
    for name in sorted(set(places.values())):
        if Path(name).name != name or not (folder / name).is_file():
            tensor = min(key for key, value in places.items() if value == name)
            raise CheckpointError(f"{INDEX_NAME}: the shard {name!r}, which holds {tensor!r}, is missing")
        files.append(open_safetensors(folder / name))
    for tensor, name in places.items():
        if not any(file.path.name == name and tensor in file.shapes for file in files):
            raise CheckpointError(f"{name}: tensor {tensor!r} is missing, though {INDEX_NAME} says it is there")
    return files


def open_codec(folder: Path) -> TensorFile:
    """The codec's file: `codec.safetensors`, else `codec.pth`."""
    if (folder / "codec.safetensors").exists():
        return open_safetensors(folder / "codec.safetensors")
    if (folder / "codec.pth").exists():
        return open_pickle(folder / "codec.pth")
    raise CheckpointError(f"{folder.name}: no codec: neither codec.safetensors nor codec.pth is there")
