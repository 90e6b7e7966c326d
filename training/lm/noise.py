"""Exposure noise: some input frames get codes near their own, so that the model learns to go on from its own mistakes."""

from __future__ import annotations

import torch
from torch import Tensor

from duetts.models.codec import Codec
from training.codec.quantising import books
from training.lm.attention import TensorBatch

NEIGHBOURS = 12
RATE = 0.1  # of the frames
BOOK_RATE = 0.6  # of the books of such a frame


def neighbour_table(codec: Codec) -> Tensor:
    """int64 [books, entries, NEIGHBOURS]: the codes whose vectors lie nearest to each code's; rows nobody uses are 0."""
    entries = max(codec.config.semantic_size, codec.config.residual_size)
    table = torch.zeros(codec.config.num_codebooks, entries, NEIGHBOURS, dtype=torch.int64)
    for index, book in enumerate(books(codec.quantizer)):
        vectors = book.codebook.weight.detach().float().cpu()
        apart = torch.cdist(vectors, vectors).fill_diagonal_(torch.inf)
        table[index, : len(vectors)] = apart.topk(NEIGHBOURS, largest=False).indices
    return table


def disturb(batch: TensorBatch, table: Tensor, semantic_start: int, rate: float = RATE) -> TensorBatch:
    """The batch with other input codes in some frames; what is to be predicted stays."""
    tokens, codes = batch["tokens"], batch["codes"]  # [rows, n], [rows, books, n]
    is_frame = tokens >= semantic_start  # semantic tokens are the last of the vocabulary
    hit = is_frame & (torch.rand(tokens.shape, device=tokens.device) < rate)
    changed = hit[:, None] & (torch.rand(codes.shape, device=codes.device) < BOOK_RATE)
    choice = torch.randint(NEIGHBOURS, codes.shape, device=codes.device)
    book = torch.arange(codes.shape[1], device=codes.device)[:, None]
    noisy = torch.where(changed, table[book, codes, choice], codes)
    return {**batch, "codes": noisy, "tokens": torch.where(is_frame, noisy[:, 0] + semantic_start, tokens)}
