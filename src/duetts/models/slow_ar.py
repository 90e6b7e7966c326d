"""The slow decoder: one position per frame or text token, from which the frame's semantic token is drawn."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from duetts import kernels
from duetts.model_config import DecoderConfig, ModelConfig
from duetts.models.blocks import Attend, Attention, GatedMLP, RMSNorm, rope_table
from duetts.models.kv_cache import CacheRows


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer of both decoders."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention = Attention(
            config.dim, config.num_heads, config.num_kv_heads, config.head_dim,
            qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm_eps=config.norm_eps if config.qk_norm else None,
        )  # fmt: skip
        self.feed_forward = GatedMLP(config.dim, config.ffn_dim)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        """x [batch, n, dim], rope [batch or 1, n, head_dim / 2, 2] -> [batch, n, dim]."""
        norm, attention = self.attention_norm, self.attention
        qkv = kernels.norm_linear(x, norm.weight, norm.eps, attention.wqkv.weight, attention.wqkv.scale, attention.wqkv.bias)
        y = attention.attended(qkv, rope, attend)
        x = kernels.linear_add(y, attention.wo.weight, x, attention.wo.scale, attention.wo.bias)
        norm, mlp = self.ffn_norm, self.feed_forward
        gated = kernels.norm_gate(x, norm.weight, norm.eps, mlp.w1.weight, mlp.w3.weight, mlp.w1.scale, mlp.w3.scale)
        return kernels.linear_add(gated, mlp.w2.weight, x, mlp.w2.scale)


class SlowAR(nn.Module):
    """Text and frames in, hidden states out. Choices are indices into `head`: semantic codes, then the end token last."""

    rope: Tensor
    head: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        slow = config.slow
        self.embeddings = nn.Embedding(slow.vocab_size, slow.dim)
        self.codebook_embeddings = nn.Embedding(config.num_codebooks * config.fast.vocab_size, slow.dim)
        self.layers = nn.ModuleList(DecoderLayer(slow) for _ in range(slow.num_layers))
        self.norm = RMSNorm(slow.dim, slow.norm_eps)
        if not config.tie_word_embeddings:
            self.output = nn.Linear(slow.dim, slow.vocab_size, bias=False)

    def prepare(self, max_positions: int) -> None:
        """Derives what no checkpoint stores, after the weights are in place: rotary table and sliced head."""
        config, weight = self.config, self.output_weight
        positions = torch.arange(max_positions, device=weight.device)
        self.rope = rope_table(positions, config.slow.head_dim, config.slow.rope_base)
        semantic = weight[config.semantic_start : config.semantic_end + 1]
        self.head = torch.cat((semantic, weight[config.end_id : config.end_id + 1])).detach()

    @property
    def output_weight(self) -> Tensor:
        """The head over the whole vocabulary, tied to the embedding in most models."""
        return self.embeddings.weight if self.config.tie_word_embeddings else self.output.weight

    def embed(self, columns: Tensor) -> Tensor:
        """Tokens and their codes [..., 1 + codebooks] -> [..., dim]. Codes count at semantic tokens only."""
        config = self.config
        divisor = math.sqrt(config.num_codebooks + 1) if config.scale_codebook_embeddings else 1.0
        x = kernels.embed_frame(
            columns.flatten(0, -2), self.embeddings.weight, self.codebook_embeddings.weight, config.semantic_start,
            config.semantic_end, divisor,
        )  # fmt: skip
        return x.view(*columns.shape[:-1], -1)

    def forward(self, x: Tensor, rows: CacheRows) -> Tensor:
        """Embedded positions [batch, n, dim] -> hidden states before the final norm, same shape."""
        rope = self.rope[rows.positions]
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, partial(rows.attend, index))
        return x

    def choice_logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [..., dim] -> logits of the possible outcomes [..., num_semantic + 1]."""
        return kernels.linear(hidden, self.head)
