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
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from duetts.errors import CheckpointError
from duetts.json_fields import read_json

INDEX_NAME = "model.safetensors.index.json"


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
    """Reads the header and checks it against the file's length. Raises `CheckpointError` naming the first tensor cut off."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path.name}: truncated or no safetensors file: its header does not fit in {size} bytes")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path.name}: its header is not JSON: {error}") from error
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][1]):
        end = 8 + length + entry["data_offsets"][1]
        if end > size:
            raise CheckpointError(f"{path.name}: truncated at {size} bytes; tensor {name!r} ends at byte {end}")
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{path.name}: {error}") from error
    return TensorFile(path, {name: tuple(entry["shape"]) for name, entry in header.items()})


def open_pickle(path: Path) -> TensorFile:
    """Maps a torch file of plain tensors. Unwraps `state_dict`, then `generator` as a dict or as a prefix (others dropped)."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path.name}: cannot be read as a torch file, perhaps truncated: {reason}") from error
    for wrapper in ("state_dict", "generator"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name}: holds no dictionary of tensors")
    if any(str(name).startswith("generator.") for name in content):
        content = {name.removeprefix("generator."): value for name, value in content.items() if name.startswith("generator.")}
    for name, value in content.items():
        if not isinstance(value, Tensor):
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
    if not isinstance(places, dict):
        raise CheckpointError(f"{INDEX_NAME}: has no weight_map")
    files = []
    for name in sorted(set(places.values())):
        if Path(name).name != name or not (folder / name).exists():
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
