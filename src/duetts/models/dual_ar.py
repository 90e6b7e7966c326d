"""Both decoders together: from a prompt in the cache to the next frame of codes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from duetts.model_config import ModelConfig
from duetts.models.blocks import Projection
from duetts.models.fast_ar import FastAR
from duetts.models.kv_cache import CacheRows, FrameCache
from duetts.models.slow_ar import SlowAR


class Sampler(Protocol):
    """Draws for a batch of rows; how, and from which random numbers, is the caller's affair."""

    def main(self, logits: Tensor) -> Tensor:
        """Logits [batch, num_semantic + 1] -> choices int64 [batch]; num_semantic is the end."""
        ...

    def residual(self, book: int, logits: Tensor) -> Tensor:
        """Logits [batch, width] of codebook `book` -> codes int64 [batch]."""
        ...


class DualAR(nn.Module):
    """The language model. `residual_width` is how many residual codes can be drawn (the reference draws from all)."""

    def __init__(self, config: ModelConfig, residual_width: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.residual_width = config.fast.vocab_size if residual_width is None else residual_width
        self.slow = SlowAR(config)
        self.fast = FastAR(config)

    def prepare(self, max_positions: int) -> None:
        """Builds tables that no checkpoint stores, for sequences of up to `max_positions`."""
        self.slow.prepare(max_positions)
        self.fast.prepare()

    def quantize(self, kind: str) -> None:
        """The layers' matrices in 8 bits; embeddings, heads and norms stay as they are."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.quantize(kind)

    def prefill(self, prompt: Tensor, rows: CacheRows) -> Tensor:
        """Reads positions [batch, 1 + codebooks, n] into the cache -> hidden states before the final norm."""
        return self._read(prompt.transpose(1, 2), rows)

    def _read(self, columns: Tensor, rows: CacheRows) -> Tensor:
        hidden: Tensor = self.slow(self.slow.embed(columns), rows)
        return hidden

    def next_frame(self, column: Tensor, rows: CacheRows, frame_cache: FrameCache, sampler: Sampler) -> Tensor:
        """One step of every row: its last column [batch, 1 + codebooks] -> the next, token and codes.

        A row that chose the end has the end token and codes of no meaning, which are the reference's all the same.
        """
        config = self.config
        before = self._read(column[:, None], rows)[:, 0]
        hidden = self.slow.norm(before)
        choice = sampler.main(self.slow.choice_logits(hidden))
        ended = choice == config.num_semantic
        token = torch.where(ended, config.end_id, config.semantic_start + choice)
        end_code = min(max(config.end_id - config.semantic_start, 0), config.fast.vocab_size - 1)
        code = choice.masked_fill(ended, end_code)
        fast_input = hidden if config.norm_fast_input else before
        residual = self.residual_codes(fast_input, code, frame_cache, sampler)
        return torch.cat((token[:, None], code[:, None], residual), dim=1)

    def residual_codes(self, hidden: Tensor, code: Tensor, cache: FrameCache, sampler: Sampler) -> Tensor:
        """Codes of books 1.. [batch, codebooks - 1] from a frame's hidden state [batch, dim] and semantic code [batch]."""
        x = self.fast(self.fast.open_frame(hidden, code), 0, cache)[:, -1]
        codes: list[Tensor] = []
        for book in range(1, self.config.num_codebooks):
            if book > 1:
                x = self.fast(self.fast.embeddings(codes[-1])[:, None], book, cache)[:, 0]
            codes.append(sampler.residual(book, self.fast.logits(x, self.residual_width)))
        return torch.stack(codes, dim=1)
