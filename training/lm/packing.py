"""Pairs as positions in the chat layout, and many of them packed into rows of equal length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from duetts.text.prompt import ASSISTANT_ROLE, END, SPEECH, START, build_prompt
from duetts.text.tokenizer import Tokenizer
from training.lm.clips import Pair
from training.recipe import ROW

REFERENCE_WEIGHT = 0.3
MISSES = 24  # documents that fit nowhere before a batch is closed
SHORTEST = 32  # positions of a document, for the size of fixed arrays

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Document:
    """One pair. At position i: what is read, and what is to be chosen next (-1: nothing), how much that counts, and the
    position of the text byte that sounds next (-1: unknown)."""

    columns: np.ndarray  # int32 [1 + books, n]
    choice: np.ndarray  # int16 [n]
    weight: np.ndarray  # float32 [n]
    align: np.ndarray  # int16 [n]

    def __len__(self) -> int:
        return self.columns.shape[1]


class Writer:
    """Writes pairs as documents of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.after_text = len(tokenizer.encode(END + "\n")) + len(tokenizer.encode(START + ASSISTANT_ROLE + "<|voice|>"))
        self.after_transcript = len(tokenizer.encode(SPEECH))

    def document(self, pair: Pair) -> Document:
        start, books = self.tokenizer.semantic_start, self.tokenizer.num_semantic
        reference, target = pair.reference, pair.target
        references = [(reference.codes.astype(np.int32), reference.text)] if reference is not None else []
        prompt = build_prompt(self.tokenizer, references, [], target.text)
        spoken = np.concatenate((target.codes[:1] + np.int32(start), target.codes))
        columns = np.concatenate((prompt, spoken), axis=1, dtype=np.int32)
        count, begin = columns.shape[1], prompt.shape[1]
        following = np.append(columns[0, 1:] - start, books)  # after the last frame comes the end
        choice = np.where((following >= 0) & (following <= books), following, -1).astype(np.int16)
        weight = np.where(choice >= 0, np.float32(REFERENCE_WEIGHT), np.float32(0))
        weight[begin - 1 :] = 1
        align = np.full(count, -1, np.int16)
        if target.places is not None:
            text = begin - self.after_text - len(self.tokenizer.encode_text(target.text))
            align[begin - 1 : -1] = text + target.places
        if reference is not None and reference.places is not None:
            frames = np.flatnonzero(choice[: begin - 1] >= 0)
            text = int(frames[0]) + 1 - self.after_transcript - len(self.tokenizer.encode_text(reference.text))
            align[frames] = text + reference.places
        return Document(columns, choice, weight, align)


class Packer:
    """Fills `rows` rows of `length` positions, each with whole documents; what does not fit opens the next batch.

    `end` is the choice that means the end; the fast decoder is trained on `fast_frames` frames of a batch.
    """

    def __init__(self, rows: int, end: int, length: int = ROW, fast_frames: int | None = None) -> None:
        self.rows, self.length, self.end = rows, length, end
        self.fast_frames = fast_frames or rows * length // 4
        self.waiting: list[Document] = []

    def batches(self, documents: Iterator[Document], rng: np.random.Generator) -> Iterator[Batch]:
        """Batches without end, or until the documents end."""
        while True:
            placed: list[list[Document]] = [[] for _ in range(self.rows)]
            room = np.full(self.rows, self.length)
            before, self.waiting = self.waiting, []
            for document in before:
                self._place(document, placed, room)
            for document in documents:
                self._place(document, placed, room)
                if len(self.waiting) >= MISSES:
                    break
            if not any(placed):
                return
            yield self._batch(placed, rng)

    def _place(self, document: Document, placed: list[list[Document]], room: np.ndarray) -> None:
        """Into the row that it fills best."""
        left = np.where(room >= len(document), room, np.iinfo(room.dtype).max)
        row = int(left.argmin())
        if len(document) > room[row]:
            if len(document) <= self.length:
                self.waiting.append(document)
            return
        placed[row].append(document)
        room[row] -= len(document)

    def _batch(self, placed: list[list[Document]], rng: np.random.Generator) -> Batch:
        rows, length = self.rows, self.length
        books = next(document for row in placed for document in row).columns.shape[0] - 1
        batch: Batch = {
            "tokens": np.zeros((rows, length), np.int32),
            "codes": np.zeros((rows, books, length), np.int16),
            "document": np.zeros((rows, length), np.int16),
            "position": np.zeros((rows, length), np.int16),
            "choice": np.full((rows, length), -1, np.int16),
            "weight": np.zeros((rows, length), np.float32),
            "align": np.full((rows, length), -1, np.int16),
        }
        starts: list[int] = []
        for row, documents in enumerate(placed):
            at = 0
            for index, document in enumerate(documents):
                part = slice(at, at + len(document))
                batch["tokens"][row, part] = document.columns[0]
                batch["codes"][row, :, part] = document.columns[1:]
                batch["document"][row, part] = index
                batch["position"][row, part] = np.arange(len(document))
                batch["choice"][row, part] = document.choice
                batch["weight"][row, part] = document.weight
                batch["align"][row, part] = np.where(document.align >= 0, document.align + at, -1)
                starts.append(row * length + at)
                at += len(document)
            if at < length:  # padding is a document of its own
                batch["document"][row, at:] = len(documents)
                batch["position"][row, at:] = np.arange(length - at)
                starts.append(row * length + at)
        batch["starts"] = self._fixed_starts(starts)
        batch["fast_index"], batch["fast_weight"] = self._fast_frames(batch, rng)
        batch["pairs"] = np.array(sum(map(len, placed)))
        return batch

    def _fixed_starts(self, starts: list[int]) -> np.ndarray:
        """Where documents start in the flattened rows, filled up with the total so that every batch has as many."""
        total = self.rows * self.length
        fixed = np.full(total // SHORTEST + 1, total, np.int32)
        fixed[: len(starts)] = starts
        return fixed

    def _fast_frames(self, batch: Batch, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Flat positions before the frames on which the fast decoder is trained, and their weights: a random choice."""
        choice, weight = batch["choice"].reshape(-1), batch["weight"].reshape(-1)
        frames = np.flatnonzero((choice >= 0) & (choice < self.end))
        chosen = rng.permutation(frames)[: self.fast_frames]
        index = np.zeros(self.fast_frames, np.int32)
        index[: len(chosen)] = chosen
        weights = np.zeros(self.fast_frames, np.float32)
        weights[: len(chosen)] = weight[chosen]
        return index, weights
