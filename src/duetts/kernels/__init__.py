"""Fused operations of the models. Each call picks its Triton kernel, or its torch twin in `reference`.

The kernels run on a GPU outside training; everything else, a CPU above all, is the twin. Knows no model and no engine.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from duetts.kernels import reference


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def _triton(x: Tensor) -> bool:
    """Whether kernels may serve this call: they know no gradients and no autocast, and only GPUs."""
    return x.is_cuda and torch.is_inference_mode_enabled() and _installed()


# ---- linear: norms, projections and the gated MLP


def _products(
    x: Tensor, weights: tuple[Tensor, ...], scales: tuple[Tensor | None, ...], vectors: tuple[Tensor | None, ...]
) -> ModuleType:
    if _triton(x):
        from duetts.kernels import projection

        if projection.supported(x, weights, scales, vectors):
            return projection
    return reference


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [..., K] / rms(x) * gain [K]. The quotient is rounded to the activation type before the product."""
    y: Tensor = _products(x, (), (), (gain,)).rms_norm(x, gain, eps)
    return y


def linear(x: Tensor, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] -> [..., N]; an 8-bit weight has a float32 `scale` [N] per row."""
    y: Tensor = _products(x, (weight,), (scale,), (bias,)).linear(x, weight, scale, bias)
    return y


def norm_linear(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """`linear` of `rms_norm`: x [..., K] -> [..., N]."""
    y: Tensor = _products(x, (weight,), (scale,), (gain, bias)).norm_linear(x, gain, eps, weight, scale, bias)
    return y


def norm_gate(
    x: Tensor, gain: Tensor, eps: float, w1: Tensor, w3: Tensor, scale1: Tensor | None = None, scale3: Tensor | None = None
) -> Tensor:
    """silu(w1 n) * (w3 n) of n = rms_norm(x): x [..., K], w1 and w3 [F, K] -> [..., F]."""
    y: Tensor = _products(x, (w1, w3), (scale1, scale3), (gain,)).norm_gate(x, gain, eps, w1, w3, scale1, scale3)
    return y


def linear_add(y: Tensor, weight: Tensor, residual: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """residual [..., N] + linear(y [..., K])."""
    x: Tensor = _products(y, (weight,), (scale,), (bias,)).linear_add(y, weight, residual, scale, bias)
    return x


def quantize_rows(weight: Tensor, kind: Literal["fp8", "int8"]) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> its 8-bit form [N, K] and the float32 scale [N] that each row is to be multiplied by."""
    return reference.quantize_rows(weight, kind)


# ---- attention


def norm_rotate(
    qkv: Tensor, heads: int, kv_heads: int, q_gain: Tensor | None, k_gain: Tensor | None, eps: float, rope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [batch, n, (heads + 2 kv_heads) D], norms q and k within heads if there are gains [D], and turns their pairs
    (2i, 2i + 1) by rope float32 [batch or 1, n, D / 2, 2] -> q [batch, n, heads, D], k and v [batch, n, kv_heads, D]."""
    return reference.norm_rotate(qkv, heads, kv_heads, q_gain, k_gain, eps, rope)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, tables: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:  # fmt: skip
    """One new position of each row: stores k and v [B, KV, D] at `positions` [B] of its pages, then attends with q [B, H, D] to
    all up to it -> [B, H, D]. Pages lie in keys and values [pages, KV, PAGE, D]; a row's are `tables[slots]`: int32 [slots,
    width], int64 [B].

    A position beyond the table counts as its last: padding rows may point anywhere.
    """
    return reference.decode_attention(q, k, v, keys, values, tables, slots, positions)


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, start: Tensor
) -> Tensor:  # fmt: skip
    """A block of one sequence: stores k and v [n, KV, D] at n positions from `start` (int64 [1]) of its pages, `table` (int32
    [width]), then attends with q [n, H, D], each to all up to its own position -> [n, H, D]."""
    return reference.prefill_attention(q, k, v, keys, values, table, start)


def frame_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Positions `start`.. of a frame, the same for every row: stores k and v [B, n, KV, D] in the first B rows of keys and
    values [rows, KV, positions, D], then attends with q [B, n, H, D] causally -> [B, n, H, D]. n is 1 unless start is 0."""
    return reference.frame_attention(q, k, v, keys, values, start)


# ---- frame: embedding of a column, and draws


def embed_frame(
    columns: Tensor, embeddings: Tensor, codebook_embeddings: Tensor, semantic_start: int, semantic_end: int, divisor: float
) -> Tensor:
    """Columns [M, 1 + codebooks] of a token and its codes -> [M, dim]. A token in semantic_start..semantic_end gives the sum of
    all embeddings over `divisor`, any other its own; codebook_embeddings [codebooks * size, dim] lie one after another."""
    return reference.embed_frame(columns, embeddings, codebook_embeddings, semantic_start, semantic_end, divisor)


def sample_main(
    logits: Tensor, recent: Tensor, frame: Tensor, seed: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor,
    penalty: Tensor, end: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draws 0 and 1 of frame number `frame` from logits [B, choices] -> (choices int64 [B], whether all logits are finite).

    recent: int64 [B, window], earlier choices, newest last, -1 for none; they are penalised. Repetition-aware: if the first
    draw is not `end` and is among the last ten, a second one at temperature 1 and top-p 0.9 replaces it. As in the reference
    the very first frame never counts, and the second draw may repeat too. Values are float32 [B]; top_k int64, 0 is no limit.
    """
    return reference.sample_main(logits, recent, frame, seed, temperature, top_p, top_k, penalty, end)


def sample_residual(
    book: int, logits: Tensor, frame: Tensor, seed: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw 1 + book from logits [B, width] -> (codes int64 [B], whether all logits are finite). No penalty, no repetition."""
    return reference.sample_residual(book, logits, frame, seed, temperature, top_p, top_k)
