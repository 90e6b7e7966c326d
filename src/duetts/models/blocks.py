"""Blocks that both decoders and the codec share: norms, rotary embedding, grouped attention, gated MLP.

An attention block computes queries, keys and values and hands them to an `attend` function, which owns the memory
(a KV cache, a sliding window, or none). So the same block serves prefill, decode, whole-signal and streaming use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetts import kernels

# (queries [batch, heads, n, d], keys and values [batch, kv_heads, n, d]) -> [batch, heads, n, d]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rope_table(positions: Tensor, head_dim: int, base: float) -> Tensor:
    """Cosines and sines of `positions` [...] for interleaved pairs: float32 [..., head_dim / 2, 2].

    The values are rounded to bfloat16, as the models were trained with such a table: exact ones move logits and samples.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device)[: head_dim // 2].float() / head_dim
    angles = positions.float()[..., None] * (1.0 / (base**exponents))
    return torch.stack((angles.cos(), angles.sin()), dim=-1).bfloat16().float()


class RMSNorm(nn.Module):
    """x / rms(x) * weight. The quotient is rounded to the activation type before the product, as in the reference."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class Projection(nn.Linear):
    """A linear layer whose weight may have 8 bits: then each of its rows has a `scale`."""

    scale: Tensor | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.register_buffer("scale", None)

    def quantize(self, kind: str) -> None:
        """Replaces the weight by its 8-bit form: half or a quarter of the bytes, and of the time where they bound it."""
        weight, self.scale = kernels.quantize_rows(self.weight, "fp8" if kind == "fp8" else "int8")
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.scale, self.bias)


class Attention(nn.Module):
    """Grouped-query attention with fused projection; rows of `wqkv` are all queries, then keys, then values."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, *, qkv_bias: bool = False, o_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sizes = (heads, kv_heads, kv_heads)
        self.head_dim = head_dim
        self.wqkv = Projection(dim, sum(self.sizes) * head_dim, bias=qkv_bias)
        self.wo = Projection(heads * head_dim, dim, bias=o_bias)
        self.qk_norm = qk_norm_eps is not None
        self.eps = qk_norm_eps or 0.0
        if qk_norm_eps is not None:  # within a head, the weight applied before rounding: `kernels.norm_rotate`
            self.q_norm = RMSNorm(head_dim, qk_norm_eps)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps)

    def forward(self, x: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        """x [batch, n, dim], rope [batch or 1, n, head_dim / 2, 2] -> [batch, n, dim]."""
        out: Tensor = self.wo(self.attended(self.wqkv(x), rope, attend))
        return out

    def attended(self, qkv: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        """The part between the projections: qkv [batch, n, rows of wqkv] -> [batch, n, heads * head_dim]."""
        heads, kv_heads, _ = self.sizes
        q_gain, k_gain = (self.q_norm.weight, self.k_norm.weight) if self.qk_norm else (None, None)
        q, k, v = kernels.norm_rotate(qkv, heads, kv_heads, q_gain, k_gain, self.eps, rope)
        y: Tensor = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        return y.flatten(2)


class GatedMLP(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = Projection(dim, hidden)
        self.w3 = Projection(dim, hidden)
        self.w2 = Projection(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
    """softmax(q k' / sqrt(d)) v with q [batch, heads, n, d], k and v [batch, kv_heads, m, d], mask true where seen."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
