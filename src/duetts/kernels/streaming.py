"""Triton programs behind `projection`, which says what is fused, why the tiles look like this, and what it measures."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(DEPENDENT: tl.constexpr):
    """Lets the next kernel begin, then waits for the one before: what comes first in a kernel runs beside that."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _prefetch(weight, rows, column, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr):
    """Asks part of each row into L2, 64 bytes at a time. Weights depend on no kernel, so this needs no waiting."""
    PARTS: tl.constexpr = COLUMNS * weight.dtype.element_ty.primitive_bitwidth // 8 // 64
    place = (weight + rows[:, None] + column + tl.arange(0, PARTS)[None, :] * (COLUMNS // PARTS)).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], tl.int32, False, 1)


@triton.jit
def _weights(weight, rows, k, dtype: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        values = tl.load(weight + rows[:, None] + k[None, :])
    else:
        values = tl.load(weight + rows[:, None] + k[None, :], (k < K)[None, :], other=0.0)
    if dtype == tl.bfloat16 and weight.dtype.element_ty != tl.bfloat16:
        values = values.to(tl.float32)  # float8 straight to bfloat16 takes an instruction of a quarter of the speed
    return values.to(dtype)


@triton.jit
def _rounded(product, n, N, scale, bias, dtype: tl.constexpr):
    """The product as the torch twin leaves it: scaled and shifted in float32, then rounded."""
    if scale is not None:
        product *= tl.load(scale + n, n < N, other=0.0)
    if bias is not None:
        product += tl.load(bias + n, n < N, other=0.0).to(tl.float32)
    return product.to(dtype)


@triton.jit
def _silu(a):
    wide = a.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(a.dtype)


@triton.jit(do_not_specialize=["M", "steps"])
def stream(
    x, weight, other, scale, other_scale, bias, residual, out, M, N, steps,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr, SPREAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """All products of this file. What a call lacks (gate, scale, bias, residual) is None and not compiled.

    `steps` is K / BLOCK_K, given at run time so that the loop stays a loop: unrolled, its code is slow to fetch. SPREAD: every
    tile begins at another step and comes round, so that programs which begin together do not all ask for the same bytes of x.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    EVEN: tl.constexpr = K % BLOCK_K == 0
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2) * tl.cdiv(steps, SPLIT)
    last = tl.minimum(first + tl.cdiv(steps, SPLIT), steps)
    shift = (tl.program_id(1) * steps // tl.num_programs(1)) % (last - first) if SPREAD else 0
    inside = m < M
    rows = tl.minimum(n, N - 1).to(tl.int64) * K
    if DEPENDENT:
        gdc_launch_dependents()
    if PREFETCH > 0:
        begin = tl.minimum(first + shift, last - PREFETCH)
        _prefetch(weight, rows, begin * BLOCK_K, BLOCK_N, PREFETCH * BLOCK_K)
        if other is not None:
            _prefetch(other, rows, begin * BLOCK_K, BLOCK_N, PREFETCH * BLOCK_K)
    if DEPENDENT:
        gdc_wait()
    product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    second = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for turn in range(first, last):
        step = turn
        if SPREAD:
            step = tl.where(turn + shift < last, turn + shift, turn + shift - (last - first))
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = inside[:, None] if EVEN else inside[:, None] & (k < K)[None, :]
        values = tl.load(x + m[:, None] * K + k[None, :], mask, other=0.0)
        turned = tl.trans(values)
        product = tl.dot(_weights(weight, rows, k, dtype, K, EVEN), turned, product, input_precision="ieee")
        if other is not None:
            second = tl.dot(_weights(other, rows, k, dtype, K, EVEN), turned, second, input_precision="ieee")
    place = m.to(tl.int64)[None, :] * N + n[:, None]
    mask = inside[None, :] & (n < N)[:, None]
    if SPLIT > 1:
        tl.store(out + tl.program_id(2).to(tl.int64) * M * N + place, product, mask)
    else:
        result = _rounded(product, n[:, None], N, scale, bias, dtype)
        if other is not None:
            result = _silu(result) * _rounded(second, n[:, None], N, other_scale, None, dtype)
        if residual is not None:
            result = tl.load(residual + place, mask, other=0.0) + result
        tl.store(out + place, result, mask)


@triton.jit(do_not_specialize=["M"])
def reduce(partial, scale, bias, residual, out, M, N, SPLIT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Partial sums [SPLIT, M, N], always added in the same order, then what `stream` does to a whole sum."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    follow(DEPENDENT)
    product = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        product += tl.load(partial + (part * M + m) * N + n, n < N, other=0.0)
    result = _rounded(product, n, N, scale, bias, out.dtype.element_ty)
    if residual is not None:
        result = tl.load(residual + m * N + n, n < N, other=0.0) + result
    tl.store(out + m * N + n, result, n < N)


@triton.jit
def norm(x, gain, out, eps, K: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    k = tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * K + k
    if DEPENDENT:
        gdc_launch_dependents()
    gains = tl.load(gain + k, k < K, other=0.0)
    if DEPENDENT:
        gdc_wait()
    values = tl.load(x + place, k < K, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / K + eps)
    tl.store(out + place, (values * inverse).to(gains.dtype) * gains, k < K)


@triton.jit
def gate(a, b, out, total, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    follow(DEPENDENT)
    result = _silu(tl.load(a + place, inside, other=0.0)) * tl.load(b + place, inside, other=0.0)
    tl.store(out + place, result, inside)
