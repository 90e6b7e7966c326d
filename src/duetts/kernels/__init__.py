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

from duetts.kernels import codec_reference, guard, reference


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
    x: Tensor = _products(y, (weight,), (scale,), (bias, residual)).linear_add(y, weight, residual, scale, bias)
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
    if _triton(qkv) and qkv.dtype in guard.FLOATS and rope.stride()[-2:] == (2, 1) and (q_gain is None) == (k_gain is None):
        from duetts.kernels import rotation

        return rotation.norm_rotate(qkv, heads, kv_heads, q_gain, k_gain, eps, rope)
    return reference.norm_rotate(qkv, heads, kv_heads, q_gain, k_gain, eps, rope)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, tables: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:  # fmt: skip
    """One new position of each row: stores k and v [B, KV, D] at `positions` [B] of its pages, then attends with q [B, H, D] to
    all up to it -> [B, H, D]. Pages lie in keys and values [pages, KV, PAGE, D]; a row's are `tables[slots]`: int32 [slots,
    width], int64 [B].

    A position beyond the table counts as its last: padding rows may point anywhere.
    """
    use = guard.DECODE
    reason = "" if _triton(q) else f"on {q.device.type}, or with gradients, or without Triton, there is none"
    reason = reason or ("" if use.enabled else "it is switched off")
    reason = reason or guard.refusal(q, k, v, keys, values) or guard.page_refusal(keys, tables, slots, positions)
    if reason:
        use.refuse(reason)
        return reference.decode_attention(q, k, v, keys, values, tables, slots, positions)
    from duetts.kernels import attention

    programs = attention.programs_per_pair(q, keys.shape[1])
    use.short += programs == 1
    use.long += programs > 1
    return attention.decode_attention(q, k, v, keys, values, tables, slots, positions, programs=programs)


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, start: Tensor
) -> Tensor:  # fmt: skip
    """A block of one sequence: stores k and v [n, KV, D] at n positions from `start` (int64 [1]) of its pages, `table` (int32
    [width]), then attends with q [n, H, D], each to all up to its own position -> [n, H, D]."""
    if _triton(q) and not guard.refusal(q, k, v, keys, values) and not guard.page_refusal(keys, table, start):
        from duetts.kernels import attention

        return attention.prefill_attention(q, k, v, keys, values, table, start)
    return reference.prefill_attention(q, k, v, keys, values, table, start)


def frame_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Positions `start`.. of a frame, the same for every row: stores k and v [B, n, KV, D] in the first B rows of keys and
    values [rows, KV, positions, D], then attends with q [B, n, H, D] causally -> [B, n, H, D]. n is 1 unless start is 0."""
    if _triton(q) and not guard.refusal(q, k, v, keys, values):
        from duetts.kernels import attention

        return attention.frame_attention(q, k, v, keys, values, start)
    return reference.frame_attention(q, k, v, keys, values, start)


# ---- frame: embedding of a column, and draws


def embed_frame(
    columns: Tensor, embeddings: Tensor, codebook_embeddings: Tensor, semantic_start: int, semantic_end: int, divisor: float
) -> Tensor:
    """Columns [M, 1 + codebooks] of a token and its codes -> [M, dim]. A token in semantic_start..semantic_end gives the sum of
    all embeddings over `divisor`, any other its own; codebook_embeddings [codebooks * size, dim] lie one after another."""
    whole = embeddings.is_contiguous() and codebook_embeddings.is_contiguous()
    if _triton(embeddings) and embeddings.dtype in guard.FLOATS and whole:
        from duetts.kernels import frame

        return frame.embed_frame(columns, embeddings, codebook_embeddings, semantic_start, semantic_end, divisor)
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
    if _triton(logits) and logits.dtype in guard.FLOATS and logits.stride(1) == 1:
        from duetts.kernels import frame as kernel

        return kernel.sample_main(logits, recent, frame, seed, temperature, top_p, top_k, penalty, end)
    return reference.sample_main(logits, recent, frame, seed, temperature, top_p, top_k, penalty, end)


def sample_residual(
    book: int, logits: Tensor, frame: Tensor, seed: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw 1 + book from logits [B, width] -> (codes int64 [B], whether all logits are finite). No penalty, no repetition."""
    if _triton(logits) and logits.dtype in guard.FLOATS and logits.stride(1) == 1:
        from duetts.kernels import frame as kernel

        return kernel.sample_residual(book, logits, frame, seed, temperature, top_p, top_k)
    return reference.sample_residual(book, logits, frame, seed, temperature, top_p, top_k)


# ---- codec: the waveform decoder. Signals are [streams, steps, channels], contiguous within a stream

TAIL_PIECE = 2048


def runs_codec(device: torch.device) -> bool:
    """Whether the codec's kernels run there. Their twins do everywhere, but ask the host: a CUDA graph cannot hold them."""
    return device.type == "cuda" and _installed() and guard.capability(device) >= guard.LEAST_CAPABILITY


def _codec(x: Tensor) -> ModuleType:
    """The codec's kernels or their twins."""
    if _triton(x) and runs_codec(x.device):
        from duetts.kernels import codec

        return codec
    return codec_reference


def conv(
    x: Tensor, weight: Tensor, bias: Tensor, *, taps: int = 1, dilation: int = 1, alpha: Tensor | None = None,
    gelu: bool = False, residual: Tensor | None = None, raw: Tensor | None = None, ahead: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:  # fmt: skip
    """y[t] = sum over taps of x[t + tap * dilation] times its weight, + bias (+ residual): x [streams, past + steps, inputs],
    past = (taps - 1) * dilation, weight [taps * inputs, outputs], bias float32 [outputs].

    `raw` takes y, `ahead` its Snake (`alpha` float32 [2, outputs]: frequencies and their reciprocals) or GELU, or y itself.
    Residual, raw and ahead have as many values a stream as y, in any split into steps and channels; raw may be the residual.
    `counts`, zeros int32 [1024] and left as zeros, lets programs share a tile; without it none do.
    """
    _codec(x).conv(
        x, weight, bias, taps=taps, dilation=dilation, alpha=alpha, gelu=gelu, residual=residual, raw=raw, ahead=ahead,
        counts=counts,
    )  # fmt: skip


def residual_unit(
    x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor, weight_out: Tensor, bias_out: Tensor, *, dilation: int,
    residual: Tensor, next_alpha: Tensor, ahead: Tensor, raw: Tensor | None = None, counts: Tensor | None = None,
) -> None:  # fmt: skip
    """y = residual + 1x1(snake(dilated convolution of x)), x snaked already, arguments as for `conv`; `raw` takes y, `ahead`
    its Snake with `next_alpha`. What lies between the two convolutions has x's type."""
    _codec(x).residual_unit(
        x, weight, bias, alpha, weight_out, bias_out, dilation=dilation, residual=residual, next_alpha=next_alpha, ahead=ahead,
        raw=raw, counts=counts,
    )  # fmt: skip


def last_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """tanh of a convolution to one channel, all in float32: x [streams, taps - 1 + steps, channels], weight float32 [taps,
    channels], bias float32 [1] -> [streams, steps]."""
    wave: Tensor = _codec(x).last_conv(x, weight, bias)
    return wave


def depthwise_norm(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Layer norm over the channels of a depthwise convolution, all in float32 until it is rounded: x [streams, taps - 1 +
    steps, channels], weight [taps, channels], bias, gain and shift [channels] float32 -> [streams, steps, channels]."""
    y: Tensor = _codec(x).depthwise_norm(x, weight, bias, gain, shift, eps)
    return y


def embed_codes(codes: Tensor, table: Tensor, starts: Tensor) -> Tensor:
    """The sum of all books' values: codes int64 [streams, books, frames], table [rows, channels], one book after another, of
    which book b begins at starts[b] (int64 [books + 1]) -> [streams, frames, channels]. Codes beyond a book count as its
    last."""
    y: Tensor = _codec(table).embed_codes(codes, table, starts)
    return y


def window_attention(
    qkv: Tensor, rope: Tensor, now: Tensor, slots: Tensor, keys: Tensor, values: Tensor, window: int
) -> Tensor:  # fmt: skip
    """New positions now[s].. of each stream, qkv [streams, frames, 3 * heads * head_dim]: turns pairs of q and k by rope
    float32 [positions, head_dim / 2, 2] (round and round), stores k and v, and attends to the last `window` positions ->
    [streams, frames, heads * head_dim]. keys and values [slots, heads, ring, head_dim] hold position p of a slot in row p %
    ring, keys with the first halves of all pairs before the second ones; window - 1 + frames must fit the ring."""
    y: Tensor = _codec(qkv).window_attention(qkv, rope, now, slots, keys, values, window)
    return y


def load_tails(tails: Tensor, halo: Tensor, layout: Tensor, slots: Tensor, position: Tensor, now: Tensor) -> None:
    """Begins a call: now[s] = position[slots[s]], and the pasts of each stream out of tails [slots, values] into the signals of
    `halo`; zeros where the position is 0. Rows of layout, int64 [pieces, 5], say of up to `TAIL_PIECE` values: their offset in
    a row of tails, their place in the halo for the first stream as a past and as the end of a signal, from which place to
    place the next stream is, and how many they are."""
    _codec(tails).load_tails(tails, halo, layout, slots, position, now)


def store_tails(
    tails: Tensor, halo: Tensor, layout: Tensor, slots: Tensor, position: Tensor, now: Tensor, frames: int
) -> None:  # fmt: skip
    """Ends a call of so many frames: the ends of all signals into tails, and the positions forward. See `load_tails`."""
    _codec(tails).store_tails(tails, halo, layout, slots, position, now, frames)


def pcm16(wave: Tensor) -> Tensor:
    """Samples float32 [streams, n] in -1..1 -> int16 [streams, n + 1], full scale clipped. The last value says whether all of
    the stream's samples are finite; where they are not, it and they are 0."""
    samples: Tensor = _codec(wave).pcm16(wave)
    return samples
