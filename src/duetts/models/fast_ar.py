"""The fast decoder: inside one frame, the residual codes one after another from the slow decoder's hidden state."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from duetts import kernels
from duetts.model_config import ModelConfig
from duetts.models.blocks import RMSNorm, rope_table
from duetts.models.kv_cache import FrameCache
from duetts.models.slow_ar import DecoderLayer


class FastAR(nn.Module):
    """Position 0 is the hidden state, position k the code of book k - 1; position k gives the logits of code k."""

    rope: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        fast = config.fast
        self.embeddings = nn.Embedding(fast.vocab_size, fast.dim)
        self.layers = nn.ModuleList(DecoderLayer(fast) for _ in range(fast.num_layers))
        self.norm = RMSNorm(fast.dim, fast.norm_eps)
        self.output = nn.Linear(fast.dim, fast.vocab_size, bias=False)
        if config.fast_project:
            self.project_in = nn.Linear(config.slow.dim, fast.dim)

    def prepare(self) -> None:
        """Derives the rotary table, after the weights are in place."""
        fast = self.config.fast
        positions = torch.arange(fast.max_positions, device=self.output.weight.device)
        self.rope = rope_table(positions, fast.head_dim, fast.rope_base)

    def open_frame(self, hidden: Tensor, code: Tensor) -> Tensor:
        """Inputs of positions 0 and 1, both known at once: hidden [batch, slow dim], code [batch] -> [batch, 2, dim]."""
        first = self.project_in(hidden) if self.config.fast_project else hidden
        return torch.stack((first, self.embeddings(code)), dim=1)

    def forward(self, x: Tensor, start: int, cache: FrameCache) -> Tensor:
        """Inputs [batch, n, dim] at positions start.. -> normed hidden states, same shape."""
        rope = self.rope[None, start : start + x.shape[1]]
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, partial(cache.attend, index, start))
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor, width: int) -> Tensor:
        """Logits of the first `width` codes; the codec's residual books are narrower than the head."""
        return kernels.linear(hidden, self.output.weight[:width])
