"""Quantisation with gradients: straight-through codes, commitment and codebook losses, and revival of dead codes.

The modules are the engine's own; only how gradients pass them is decided here. All of it runs in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duetts.models.codec import Quantizer
from duetts.models.codec_layers import VectorQuantizer

DECAY = 0.99
DEAD = 0.05  # of an even share


@dataclass(slots=True)
class Quantised:
    """What one pass gives: the sum of all books' values, book 0's part of it, both losses, and every book's choices."""

    values: Tensor  # [batch, dim, frames]
    semantic: Tensor
    commitment: Tensor
    codebook: Tensor
    codes: list[Tensor]
    queries: list[Tensor]  # projected inputs, [batch * frames, code_dim]


def books(quantizer: Quantizer) -> list[VectorQuantizer]:
    """All codebooks, the semantic one first."""
    return [*quantizer.semantic_quantizer.quantizers, *quantizer.quantizer.quantizers]  # type: ignore[list-item]


def pick(book: VectorQuantizer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One book on x [batch, dim, frames]: its value with a straight-through gradient, query, nearest rows, codes."""
    query = book.in_proj(x).transpose(1, 2)  # [batch, frames, code_dim]
    with torch.no_grad():
        directions = F.normalize(query, dim=-1) @ F.normalize(book.codebook.weight, dim=-1).T
        codes = directions.argmax(-1)
    rows = book.codebook(codes)
    passed = query + (rows - query).detach()
    return book.out_proj(passed.transpose(1, 2)), query, rows, codes


def quantise(quantizer: Quantizer, z: Tensor, kept: Tensor | None = None) -> Quantised:
    """z [batch, dim, frames] through all books; `kept` [batch] is how many residual books count for each signal."""
    rest, total, semantic = z.float(), torch.zeros_like(z, dtype=torch.float32), None
    commitment, codebook = [], []
    all_codes, queries = [], []
    for index, book in enumerate(books(quantizer)):
        value, query, rows, codes = pick(book, rest)
        counts = torch.ones_like(z[:, 0, 0], dtype=torch.float32)
        if index and kept is not None:
            counts = (index <= kept).float()
        commitment.append(((query - rows.detach()).square().mean((1, 2)) * counts).mean())
        codebook.append(((rows - query.detach()).square().mean((1, 2)) * counts).mean())
        total = total + value * counts[:, None, None]
        rest = rest - value
        semantic = value if semantic is None else semantic
        all_codes.append(codes)
        queries.append(query.detach().flatten(0, 1))
    assert semantic is not None
    return Quantised(total, semantic, torch.stack(commitment).sum(), torch.stack(codebook).sum(), all_codes, queries)


class Usage:
    """How often each code was chosen lately, as a multiple of an even share."""

    @torch.no_grad()
    def __init__(self, quantizer: Quantizer) -> None:
        self.shares = [torch.zeros_like(book.codebook.weight[:, 0]) for book in books(quantizer)]  # all dead: first fill

    @torch.no_grad()
    def count(self, found: Quantised) -> None:
        for share, codes in zip(self.shares, found.codes, strict=True):
            flat = codes.flatten()
            seen = torch.zeros_like(share).scatter_add_(0, flat, torch.ones_like(flat, dtype=share.dtype))
            share.lerp_(seen * (len(share) / len(flat)), 1 - DECAY)

    @torch.no_grad()
    def revive(self, quantizer: Quantizer, found: Quantised) -> None:
        """Puts codes that nobody chooses onto inputs of this batch."""
        for share, book, queries in zip(self.shares, books(quantizer), found.queries, strict=True):
            fresh = queries[torch.randint(len(queries), (len(share),), device=queries.device)]
            dead = share < DEAD
            book.codebook.weight.copy_(torch.where(dead[:, None], fresh.to(share.dtype), book.codebook.weight))
            share.copy_(torch.where(dead, 0.5, share))


def perplexity(codes: Tensor, size: int) -> float:
    """The number of evenly used codes that would spread as these do."""
    shares = torch.bincount(codes.flatten(), minlength=size).double()
    shares = shares[shares > 0] / shares.sum()
    return float((-(shares * shares.log()).sum()).exp())
