"""Batches from several processes, each with its own draw of pairs; new code files are taken in while training runs."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from duetts.model_config import ModelConfig
from duetts.text.byte_level import write_byte_tokenizer
from duetts.text.tokenizer import FILE, Tokenizer
from training.data.texts import read_lines
from training.lm.clips import Store
from training.lm.packing import Batch, Document, Packer, Writer
from training.recipe import CODEC, language_model_values

LOOK_EVERY_S = 2
LOAD_FIRST, LOAD_MOST = 60, 4  # files: at the start, and at later looks, which must be short
TRAINING_KINDS = ("heart", "blend")
HELD_KINDS = ("held-heart", "held-blend")


def make_tokenizer(folder: Path) -> tuple[Tokenizer, ModelConfig]:
    """The model's tokenizer, written to `folder`, and its configuration."""
    tokens = write_byte_tokenizer(folder / FILE, int(CODEC["semantic_codebook_size"]))
    config = ModelConfig.from_dict(language_model_values(tokens))
    return Tokenizer.load(folder, config), config


def temporary_tokenizer() -> tuple[Tokenizer, ModelConfig]:
    with tempfile.TemporaryDirectory() as folder:
        return make_tokenizer(Path(folder))


class Batches(IterableDataset[Batch]):
    """Packed training batches without end."""

    def __init__(self, lines: Path, folders: list[Path], rows: int, length: int, seed: int) -> None:
        self.lines, self.folders, self.rows, self.length, self.seed = lines, folders, rows, length, seed

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        rng = np.random.default_rng([self.seed, info.id if info else 0])
        torch.set_num_threads(1)
        store = Store(read_lines(self.lines), self.folders, TRAINING_KINDS)
        tokenizer, config = temporary_tokenizer()
        packer = Packer(self.rows, config.num_semantic, self.length)
        return packer.batches(documents(store, Writer(tokenizer), rng), rng)


def documents(store: Store, writer: Writer, rng: np.random.Generator) -> Iterator[Document]:
    """Random pairs of a store that grows; waits until it holds a pair at all."""
    looked = -1e9
    while True:
        if time.monotonic() - looked > LOOK_EVERY_S:
            store.load(LOAD_MOST if store.clips else LOAD_FIRST)
            looked = time.monotonic()
        if not store.clips:
            time.sleep(0.5)
            looked = -1e9
            continue
        yield writer.document(store.pair(rng))


def training_batches(lines: Path, folders: list[Path], rows: int, length: int, seed: int, workers: int) -> Iterator[Batch]:
    """Batches as tensors; with workers, made ahead of time and in pinned memory."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    data = Batches(lines, folders, rows, length, seed)
    loader = DataLoader(
        data, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None,
        pin_memory=workers > 0 and torch.cuda.is_available(),
    )  # fmt: skip
    return iter(loader)


def held_batches(store: Store, writer: Writer, rows: int, length: int, count: int) -> list[Batch]:
    """The same few batches of held-out pairs each time."""
    rng = np.random.default_rng(5)
    if not store.clips:
        return []
    endless = (writer.document(store.pair(rng)) for _ in iter(int, 1))
    packer = Packer(rows, writer.tokenizer.num_semantic, length)
    return list(islice(packer.batches(endless, rng), count))
