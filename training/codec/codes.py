"""Codes of clips, and files of them.

Codes are what the language model learns from. A frame takes 73 bits here, an hour 0.71 MB, so they travel where audio
cannot. Clips are named by kind and row number: the manifest gives text and speaker back. Reading: `read_codes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

from duetts.models.codec import Codec
from training.data.shards import read_shard
from training.recipe import FRAME, codec_config

KINDS = ("heart", "blend", "held-heart", "held-blend")
BATCH_FRAMES = 6000  # about 280 s of audio in one pass
FILE_BYTES = 15 << 20


@dataclass(frozen=True, slots=True)
class CodedClip:
    """Codes [books, frames] of the clip that a kind's row makes."""

    kind: str
    number: int
    codes: np.ndarray


def book_bits() -> list[int]:
    config = codec_config()
    return [(size - 1).bit_length() for size in (config.semantic_size, *[config.residual_size] * config.num_residual)]


def pack(codes: np.ndarray) -> np.ndarray:
    """[books, frames] -> bytes: frame after frame, every book's lowest bits first."""
    columns = [(codes[book, :, None] >> np.arange(bits)) & 1 for book, bits in enumerate(book_bits())]
    return np.packbits(np.concatenate(columns, axis=1).astype(np.uint8).reshape(-1), bitorder="little")


def unpack(packed: np.ndarray, frames: int) -> np.ndarray:
    """The inverse of `pack`."""
    widths = book_bits()
    bits = np.unpackbits(packed, bitorder="little", count=frames * sum(widths)).reshape(frames, -1)
    starts = np.cumsum([0, *widths])
    books = [bits[:, start:end] @ (1 << np.arange(end - start)) for start, end in pairwise(starts)]
    return np.stack(books).astype(np.int16)


def write_codes(path: Path, clips: list[CodedClip]) -> None:
    tensors = {
        "packed": np.concatenate([pack(clip.codes) for clip in clips]),
        "kinds": np.array([KINDS.index(clip.kind) for clip in clips], np.uint8),
        "numbers": np.array([clip.number for clip in clips], np.int32),
        "frames": np.array([clip.codes.shape[1] for clip in clips], np.int32),
    }
    save_file(tensors, path)


def read_codes(path: Path) -> Iterator[CodedClip]:
    """All clips of one file."""
    with safe_open(path, "np") as file:
        packed, kinds, numbers, frames = (file.get_tensor(name) for name in ("packed", "kinds", "numbers", "frames"))
    sizes = -(-frames.astype(np.int64) * sum(book_bits()) // 8)
    ends = np.cumsum(sizes)
    for kind, number, count, size, end in zip(kinds, numbers, frames, sizes, ends, strict=True):
        yield CodedClip(KINDS[kind], int(number), unpack(packed[end - size : end], int(count)))


def load_codec(folder: Path, device: torch.device) -> Codec:
    """The codec as it ships: bf16 weights, computed in float32."""
    codec = Codec(codec_config())
    tensors = {}
    for path in sorted(folder.glob("codec*.safetensors")):
        tensors.update(load_file(path))
    codec.load_state_dict({name: value.float() for name, value in tensors.items()})
    return codec.to(device).requires_grad_(False).eval()


def encode_shard(codec: Codec, path: Path, device: torch.device) -> list[CodedClip]:
    """Codes of every clip of a shard; clips of similar length share a pass, since causality makes padding harmless."""
    shard = read_shard(path)
    kind = path.name.rsplit("-", 1)[0]
    samples = torch.from_numpy(shard.samples.copy()).to(device)
    order = sorted(shard.clips, key=lambda clip: clip["length"])
    coded: list[CodedClip] = []
    while order:
        count = max(1, BATCH_FRAMES * FRAME // order[-1]["length"])
        batch, order = order[-count:], order[:-count]
        wave = torch.zeros(len(batch), batch[-1]["length"], device=device)
        for row, clip in enumerate(batch):
            wave[row, : clip["length"]] = samples[clip["start"] : clip["start"] + clip["length"]].float() / 32768
        codes = codec.encode(wave).to(torch.int16).cpu().numpy()
        coded += [CodedClip(kind, clip["number"], codes[row, :, : clip["length"] // FRAME]) for row, clip in enumerate(batch)]
    return coded
