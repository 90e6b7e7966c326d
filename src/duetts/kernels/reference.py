"""Torch twins of the kernels: the same names, arguments and rounding, for any device and for training.

On a CPU they are what runs. Their arithmetic is the models' definition: golden tests compare every bit of it.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- linear: norms, projections and the gated MLP


def _upcast(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [..., K] / rms(x) * gain [K]. The quotient is rounded to the activation type before the product."""
    wide = _upcast(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * gain


def linear(x: Tensor, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] -> [..., N]; an 8-bit weight has a float32 `scale` [N] per row."""
    if scale is None:
        return F.linear(x, weight, bias)
    wide = _upcast(x)
    product = F.linear(wide, weight.to(wide.dtype)) * scale
    return (product if bias is None else product + bias).to(x.dtype)


def norm_linear(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """`linear` of `rms_norm`: x [..., K] -> [..., N]."""
    return linear(rms_norm(x, gain, eps), weight, scale, bias)


def norm_gate(
    x: Tensor, gain: Tensor, eps: float, w1: Tensor, w3: Tensor, scale1: Tensor | None = None, scale3: Tensor | None = None
) -> Tensor:
    """silu(w1 n) * (w3 n) of n = rms_norm(x): x [..., K], w1 and w3 [F, K] -> [..., F]."""
    normed = rms_norm(x, gain, eps)
    return F.silu(linear(normed, w1, scale1)) * linear(normed, w3, scale3)


def linear_add(y: Tensor, weight: Tensor, residual: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """residual [..., N] + linear(y [..., K])."""
    return residual + linear(y, weight, scale, bias)


def quantize_rows(weight: Tensor, kind: Literal["fp8", "int8"]) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> its 8-bit form [N, K] and the float32 scale [N] that each row is to be multiplied by.

    A row's largest value becomes the type's largest: 448 of float8_e4m3fn, 127 of int8. A row of zeros, or of nothing above
    1e-30, has the scale 1.
    """
    wide = weight.float()
    peak = wide.abs().amax(dim=1)
    largest = 448.0 if kind == "fp8" else 127.0
    scale = torch.where(peak > 1e-30, peak / largest, torch.ones_like(peak))
    quotient = (wide / scale[:, None]).clamp(-largest, largest)
    return (quotient.to(torch.float8_e4m3fn) if kind == "fp8" else quotient.round().to(torch.int8)), scale


# ---- attention: rotary positions, pages, and the few positions of a frame


def _head_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """Within heads the gain is applied before rounding."""
    if gain is None:
        return x
    wide = _upcast(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain.to(wide.dtype)).to(x.dtype)


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    even, odd = _upcast(x).view(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = rope.unsqueeze(2).to(even.dtype).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def norm_rotate(
    qkv: Tensor, heads: int, kv_heads: int, q_gain: Tensor | None, k_gain: Tensor | None, eps: float, rope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [batch, n, (heads + 2 kv_heads) D], norms q and k within heads if there are gains [D], and turns their pairs
    (2i, 2i + 1) by rope [batch or 1, n, D / 2, 2] -> q [batch, n, heads, D], k and v [batch, n, kv_heads, D]."""
    split = qkv.reshape(*qkv.shape[:-1], heads + 2 * kv_heads, -1)
    q, k, v = split[:, :, :heads], split[:, :, heads:-kv_heads], split[:, :, -kv_heads:]
    return _rotate(_head_norm(q, q_gain, eps), rope), _rotate(_head_norm(k, k_gain, eps), rope), v


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _attend_pages(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor
) -> Tensor:  # fmt: skip
    """Stores k and v [B, n, KV, D] at positions [B, n] of tables [B, pages], then attends with q [B, n, H, D]."""
    page, tables = keys.shape[2], tables.long()
    length = tables.shape[1] * page
    positions = positions.clamp(max=length - 1)
    own, offsets = tables.gather(1, positions // page), positions % page
    keys[own, :, offsets] = k
    values[own, :, offsets] = v
    steps = torch.arange(length, device=q.device)
    mask = (steps <= positions[:, :, None])[:, None]
    # Zeros beyond the row's end: a number left there that is not finite would survive the mask.
    beyond = (steps > positions[:, -1:])[:, None, :, None]
    past_keys, past_values = (memory[tables].transpose(1, 2).flatten(2, 3).masked_fill(beyond, 0) for memory in (keys, values))
    return _grouped(q.transpose(1, 2), past_keys, past_values, mask).transpose(1, 2)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, tables: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:  # fmt: skip
    """One new position of each row: stores k and v [B, KV, D] at `positions` [B] of its pages, then attends with q [B, H, D] to
    all up to it -> [B, H, D]. Pages lie in keys and values [pages, KV, PAGE, D]; a row's are `tables[slots]`: int32 [slots,
    width], int64 [B].

    A position beyond the table counts as its last: padding rows may point anywhere.
    """
    return _attend_pages(q[:, None], k[:, None], v[:, None], keys, values, tables[slots], positions[:, None])[:, 0]


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, start: Tensor
) -> Tensor:  # fmt: skip
    """A block of one sequence: stores k and v [n, KV, D] at n positions from `start` (int64 [1]) of its pages, `table` (int32
    [width]), then attends with q [n, H, D], each to all up to its own position -> [n, H, D]."""
    positions = start + torch.arange(len(q), device=q.device)
    return _attend_pages(q[None], k[None], v[None], keys, values, table[None], positions[None])[0]


def frame_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Positions `start`.. of a frame, the same for every row: stores k and v [B, n, KV, D] in the first B rows of keys and
    values [rows, KV, positions, D], then attends with q [B, n, H, D] causally -> [B, n, H, D]. n is 1 unless start is 0."""
    batch, end = len(q), start + q.shape[1]
    causal = start == 0 and end > 1
    assert causal or end - start == 1, "several positions at once only at the start of a frame"
    keys, values = keys[:batch], values[:batch]
    keys[:, :, start:end] = k.transpose(1, 2)
    values[:, :, start:end] = v.transpose(1, 2)
    return _grouped(q.transpose(1, 2), keys[:, :, :end], values[:, :, :end], None, causal=causal).transpose(1, 2)


# ---- frame: embedding of a column, and draws

REPEAT_WINDOW = 10  # main tokens that a new one is compared with (repetition-aware sampling)
MAX_RANKS = 1 << 20  # more than any model has choices

_GAMMA = -7046029254386353131  # odd 64-bit constant of the golden ratio, as a signed number
_MIX_1, _MIX_2 = -4658895280553007687, -7723592293110705685  # multipliers of the splitmix64 finaliser


def embed_frame(
    columns: Tensor, embeddings: Tensor, codebook_embeddings: Tensor, semantic_start: int, semantic_end: int, divisor: float
) -> Tensor:
    """Columns [M, 1 + codebooks] of a token and its codes -> [M, dim]. A token in semantic_start..semantic_end gives the sum of
    all embeddings over `divisor`, any other its own; codebook_embeddings [codebooks * size, dim] lie one after another."""
    tokens, codes = columns[:, 0], columns[:, 1:]
    x = F.embedding(tokens, embeddings)
    offsets = torch.arange(codes.shape[1], device=codes.device) * (len(codebook_embeddings) // codes.shape[1])
    spoken = x + F.embedding(codes + offsets, codebook_embeddings).sum(dim=1)
    if divisor != 1:
        spoken = spoken / divisor
    return torch.where(((tokens >= semantic_start) & (tokens <= semantic_end))[:, None], spoken, x)


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64, whose products wrap around and whose shifts are made logical by masks."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniforms(seed: Tensor, frame: Tensor, draw: int, ranks: int) -> Tensor:
    """Numbers in (0, 1): seed and frame int64 [batch] -> float32 [batch, ranks], each the same for any number of ranks."""
    lanes = draw * MAX_RANKS + torch.arange(ranks, device=seed.device)
    key = _mix(_mix(seed * _GAMMA) + frame * _GAMMA)
    # 23 bits: with 24 the largest would round to 1.0, whose logarithm is 0, and the race would go to a dropped candidate.
    bits = (_mix(key[:, None] + (lanes + 1) * _GAMMA) >> 41) & 0x7FFFFF
    return (bits.float() + 0.5) * 2.0**-23


def candidates(logits: Tensor, top_p: Tensor, top_k: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Sorted logits [batch, ranks] with dropped ones at -inf, and their ids. Cut at temperature 1, rank 0 always stays.

    A rank is dropped once the cumulative probability *including it* exceeds top_p (the common rule keeps that one).
    """
    ordered, ids = _upcast(logits).sort(dim=-1, descending=True, stable=True)
    # A softmax of all ranks, as the reference takes it: with top_p near 1 the rounding of these sums decides who stays.
    probabilities = ordered.softmax(-1)
    ordered, ids, probabilities = ordered[:, :ranks], ids[:, :ranks], probabilities[:, :ranks]
    reached = probabilities.cumsum(-1)
    rank = torch.arange(ordered.shape[1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    dropped = ((reached > top_p[:, None]) | (rank >= limit)) & (rank > 0)
    return ordered.masked_fill(dropped, -torch.inf), ids


def draw(ordered: Tensor, ids: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """One id per row [batch] from sorted, filtered logits, by uniform `noise` [batch, ranks]; temperature 0 takes rank 0."""
    # Unnormalised probabilities: a common factor decides no race, and a sum would depend on how many ranks are kept.
    weights = ((ordered - ordered[:, :1]) / temperature.clamp(min=1e-5)[:, None]).exp()
    winner = (weights / -noise.log()).argmax(-1)
    winner = torch.where(temperature > 0, winner, 0)
    return ids.gather(1, winner[:, None])[:, 0]


def penalise(logits: Tensor, recent: Tensor, penalty: Tensor) -> Tensor:
    """Logits of the choices in `recent` [batch, n] (-1 is none) divided by the penalty if positive, else multiplied."""
    choices = logits.shape[1]
    seen = torch.zeros(len(logits), choices + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter(1, recent.where(recent >= 0, choices), True)[:, :choices]
    lowered = torch.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None]).to(logits.dtype)
    return lowered.where(seen, logits)


def _ranks(top_k: Tensor, choices: int) -> int:
    """How many ranks serve every row: what is drawn does not depend on it. Only a CPU is asked, a GPU would have to wait."""
    if top_k.device.type != "cpu" or not bool((top_k > 0).all()):
        return choices
    return min(int(top_k.max()), choices)


def sample_main(
    logits: Tensor, recent: Tensor, frame: Tensor, seed: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor,
    penalty: Tensor, end: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draws 0 and 1 of frame number `frame` from logits [B, choices] -> (choices int64 [B], whether all logits are finite).

    recent: int64 [B, window], earlier choices, newest last, -1 for none; they are penalised. Repetition-aware: if the first
    draw is not `end` and is among the last ten, a second one at temperature 1 and top-p 0.9 replaces it. As in the reference
    the very first frame never counts, and the second draw may repeat too. Values are float32 [B]; top_k int64, 0 is no limit.
    """
    sound = logits.isfinite().all(-1)
    logits = penalise(logits, recent, penalty)
    ranks = _ranks(top_k, logits.shape[1])
    first = draw(*candidates(logits, top_p, top_k, ranks), temperature, uniforms(seed, frame, 0, ranks))
    calm, plain = torch.full_like(top_p, 0.9), torch.ones_like(temperature)
    second = draw(*candidates(logits, calm, top_k, ranks), plain, uniforms(seed, frame, 1, ranks))
    ages = torch.arange(-REPEAT_WINDOW, 0, device=first.device)
    counted = (frame[:, None] + ages) > 0
    repeated = ((recent[:, -REPEAT_WINDOW:] == first[:, None]) & counted).any(-1)
    return torch.where(repeated & (first != end) & (temperature > 0), second, first), sound


def sample_residual(
    book: int, logits: Tensor, frame: Tensor, seed: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw 1 + book from logits [B, width] -> (codes int64 [B], whether all logits are finite). No penalty, no repetition."""
    sound = logits.isfinite().all(-1)
    ranks = _ranks(top_k, logits.shape[1])
    return draw(*candidates(logits, top_p, top_k, ranks), temperature, uniforms(seed, frame, book + 1, ranks)), sound
