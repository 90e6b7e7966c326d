"""Triton: the codec decoder's convolutions as products, with bias, residual and the next activation in the epilogue.

What is fused: a Snake is never a pass of its own, a transposed convolution is a convolution with one group of outputs per
phase, and a whole residual unit of a narrow stage is one kernel, whose inner signal stays on the chip.

Arithmetic per frame of S2 Pro (fp16, 2 bytes a value, one residual unit; s is the snaked signal, x the residual one):

    stage  channels  steps  FLOP of a unit  bytes if fused: s, x in, x, s out   weights    at 790 TFLOP/s   at 4.3 TB/s
    1      768       32     0.302 G         0.20 MB (+0.10 not fused)           9.4 MB     0.38 us          0.05 us
    2      384       256    0.604 G         0.79 MB (+0.39)                     2.4 MB     0.77 us          0.18 us
    3      192       1024   0.604 G         1.57 MB (+0.79)                     0.6 MB     0.77 us          0.37 us
    4      96        2048   0.302 G         1.57 MB (+0.79)                     0.15 MB    0.38 us          0.37 us

The stack is 6.4 GFLOP and about 17 MB a frame, so no stage is bound by HBM once its weights are shared by some 64 frames. What
bounds a tile is the traffic of the L2: a program of BM x BN reads BM + BN values for every BM * BN products, 85 FLOP a byte at
128 x 256 and 77 at 128 x 192, which 5.5 TB/s (assumed) feed with 470 and 420 TFLOP/s. Channel counts are 3 * 2^n and a block is
2^n: a unit of 192 or 96 channels has two accumulators (128 + 64, 64 + 32) on one block of the signal, where one of 256 or 128
would waste a quarter of its products.

Few rows (one stream, one frame: 4 to 2,048) do not fill 132 processors: the taps of one tile are then split over programs,
which leave partial sums in float32; the last to come adds them in order, so that a result does not depend on who is last.

Compiled for sm_90 by Triton 3.6 and 3.7.1: every tile of 64 rows and more multiplies with wgmma while 16-byte copies fill
shared memory, and no tile that is chosen spills (the epilogue in halves sees to that). A Snake is 13 FMA on values in
registers; the library's sine would be a branch with a slow path, and the reciprocal of its frequency a division per value. Each
tap reads its rows from the L2 again, since 16-byte asynchronous copies pass by the L1. NEAR makes them copies of 8 bytes, which
do not: it says that rows lie at multiples of 8 bytes only. To be measured.

From 64 rows on, where wgmma multiplies, a block of weights must have 64 columns: in units of 96 channels (64 + 32) the sums of
the block of 32 were wrong by as much as they are large on an H200 with Triton 3.6, in every variant of rows, inputs, warps and
stages, at any dilation, while its block of 64, units of 192, and programs of 16 and 32 rows were right. Cause not found: the
PTX, evaluated value by value on a CPU, is right. So units of 96 channels take programs of 32 rows.

Measured on an H200 beside other work, 64 streams of 4 frames: convolutions of 384 channels 320 TFLOP/s, of 768 295, units of
192 up to 316.
"""

from __future__ import annotations

import triton
import triton.language as tl

from duetts.kernels.streaming import follow

NONE, SNAKE, GELU = 0, 1, 2
# No kernel of their own for 1 or for multiples of 16; blocks are one of them lest the compiler unroll a loop of known length.
_FLEXIBLE = ["rows", "steps", "blocks", "dilation"]


@triton.jit
def snake(x, alpha, inverse):
    """x + sin(alpha x)^2 * inverse. The angle is brought to -pi/2..pi/2, where sin^2 is a polynomial of its square (2e-8)."""
    angle = x * alpha
    turns = (angle * 0.3183098861837907 + 12582912.0) - 12582912.0  # rounds: 1.5 * 2^23 leaves no room for fractions
    angle -= turns * 3.141592653589793
    square = angle * angle
    series = -3.6316180285211885e-06 * square + 0.00013935260358266532
    series = series * square - 0.003172405296936631
    series = series * square + 0.04444318264722824
    series = series * square - 0.3333330750465393
    series = series * square + 1.0
    return x + square * series * inverse


@triton.jit
def _row(values, n, there):
    """A value for each column, to be spread over rows."""
    return tl.load(values + n, mask=there, other=0.0)[None, :]


@triton.jit
def _finish(
    y, bias, alpha, residual, raw, ahead, places_in, places_raw, places_ahead, n, inside,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, RAW: tl.constexpr, AHEAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Bias, residual, activation and stores of a block of sums."""
    there = n < WIDTH
    mask = inside[:, None] & there[None, :]
    y += _row(bias, n, there)
    if RESIDUAL:
        y += tl.load(residual + places_in[:, None] + n[None, :], mask=mask, other=0.0)
    if RAW:
        tl.store(raw + places_raw[:, None] + n[None, :], y, mask=mask)
    if AHEAD:
        if ACT == 1:
            y = snake(y, _row(alpha, n, there), _row(alpha + WIDTH, n, there))
        if ACT == 2:
            y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
        tl.store(ahead + places_ahead[:, None] + n[None, :], y, mask=mask)


@triton.jit
def _sums(
    x_block, weight, n, begin, end, dilation, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Products of blocks `begin`..`end` of inputs and taps, all taps of some inputs first, since they share most rows: x_block
    [BM, BK] points at tap 0, weight at the first output."""
    k = tl.arange(0, BK)
    even: tl.constexpr = INPUTS % BK == 0 and OUTPUTS % BN == 0
    w_block = weight + k[:, None] * OUTPUTS + n[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for block in range(begin, end):
        tap = block % TAPS
        first = (block // TAPS) * BK
        x_at = x_block + (tap * (dilation * INPUTS) + first)
        w_at = w_block + (tap * INPUTS + first) * OUTPUTS
        if even:
            x = tl.load(x_at)
            w = tl.load(w_at)
        else:
            x = tl.load(x_at, mask=(first + k < INPUTS)[None, :], other=0.0)
            w = tl.load(w_at, mask=(first + k < INPUTS)[:, None] & (n < OUTPUTS)[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=_FLEXIBLE)
def conv_kernel(
    x, weight, bias, alpha, residual, raw, ahead, partial, counts, rows, steps, blocks, dilation,
    x_stride, residual_stride, raw_stride, ahead_stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    RAW: tl.constexpr, AHEAD: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NEAR: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One tile [BM rows, BN outputs]; a row is a step of a stream, strides are from stream to stream, `blocks` are of BK inputs
    of a tap."""
    tile, split = tl.program_id(0), tl.program_id(1)
    across = (OUTPUTS + BN - 1) // BN
    m = (tile // across) * BM + tl.arange(0, BM)
    n = (tile % across) * BN + tl.arange(0, BN)
    inside = m < rows
    row = tl.minimum(m, rows - 1)
    stream, step = (row // steps).to(tl.int64), row % steps
    share = (blocks + SPLITS - 1) // SPLITS
    x_block = x + (stream * x_stride + step * INPUTS)[:, None] + tl.arange(0, BK)[None, :]
    if NEAR:
        x_block = tl.multiple_of(x_block, (8, 8))
    begin = split * share
    follow(DEPENDENT)
    y = _sums(
        x_block, weight, n, begin, tl.minimum(begin + share, blocks), dilation, INPUTS, OUTPUTS, TAPS, BM, BN, BK
    )  # fmt: skip
    finished = True
    if SPLITS > 1:
        place = partial + (row * OUTPUTS)[:, None].to(tl.int64) + n[None, :]
        mask = inside[:, None] & (n < OUTPUTS)[None, :]
        whole = rows.to(tl.int64) * OUTPUTS
        tl.store(place + split * whole, y, mask=mask)
        tl.debug_barrier()
        finished = tl.atomic_add(counts + tile, 1) == SPLITS - 1
        if finished:
            y = tl.zeros((BM, BN), tl.float32)
            for part in range(SPLITS):
                y += tl.load(place + part * whole, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(counts + tile, 0)
    if finished:
        column = step * OUTPUTS
        places_in, places_raw = stream * residual_stride + column, stream * raw_stride + column
        places_ahead = stream * ahead_stride + column
        if BN >= 128:  # in halves, as registers have no room for a whole residual beside the sums
            half: tl.constexpr = BN // 2
            first, second = tl.split(tl.permute(tl.reshape(y, (BM, 2, half)), (0, 2, 1)))
            columns = (tile % across) * BN + tl.arange(0, half)
            _finish(
                first, bias, alpha, residual, raw, ahead, places_in, places_raw, places_ahead, columns, inside,
                ACT, RESIDUAL, RAW, AHEAD, OUTPUTS,
            )  # fmt: skip
            _finish(
                second, bias, alpha, residual, raw, ahead, places_in, places_raw, places_ahead, columns + half, inside,
                ACT, RESIDUAL, RAW, AHEAD, OUTPUTS,
            )  # fmt: skip
        else:
            _finish(
                y, bias, alpha, residual, raw, ahead, places_in, places_raw, places_ahead, n, inside,
                ACT, RESIDUAL, RAW, AHEAD, OUTPUTS,
            )  # fmt: skip


@triton.jit(do_not_specialize=_FLEXIBLE)
def unit_kernel(
    x, weight, bias, alpha, weight_out, bias_out, next_alpha, residual, raw, ahead, rows, steps, blocks, dilation,
    x_stride, residual_stride, raw_stride, ahead_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, RAW: tl.constexpr, BM: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
    BK: tl.constexpr, NEAR: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A residual unit of BM rows: channels 0..BA and BA..BA + BB have an accumulator each, in both convolutions."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = m < rows
    row = tl.minimum(m, rows - 1)
    stream, step = (row // steps).to(tl.int64), row % steps
    k = tl.arange(0, BK)
    a, b = tl.arange(0, BA), BA + tl.arange(0, BB)
    even: tl.constexpr = CHANNELS % BK == 0
    x_block = x + (stream * x_stride + step * CHANNELS)[:, None] + k[None, :]
    if NEAR:
        x_block = tl.multiple_of(x_block, (8, 8))
    total_a = tl.zeros((BM, BA), tl.float32)
    total_b = tl.zeros((BM, BB), tl.float32)
    follow(DEPENDENT)
    for block in range(blocks):
        tap = block % TAPS
        first = (block // TAPS) * BK
        x_at = x_block + (tap * (dilation * CHANNELS) + first)
        w_at = weight + (tap * CHANNELS + first + k)[:, None] * CHANNELS
        if even:
            signal = tl.load(x_at)
            weight_a = tl.load(w_at + a[None, :])
            weight_b = tl.load(w_at + b[None, :])
        else:
            there = first + k < CHANNELS
            signal = tl.load(x_at, mask=there[None, :], other=0.0)
            weight_a = tl.load(w_at + a[None, :], mask=there[:, None], other=0.0)
            weight_b = tl.load(w_at + b[None, :], mask=there[:, None], other=0.0)
        total_a = tl.dot(signal, weight_a, total_a, input_precision="ieee")
        total_b = tl.dot(signal, weight_b, total_b, input_precision="ieee")
    kind = x.dtype.element_ty
    all_a, all_b = a < CHANNELS, b < CHANNELS
    inverse = alpha + CHANNELS
    inner_a = snake(total_a + _row(bias, a, all_a), _row(alpha, a, all_a), _row(inverse, a, all_a)).to(kind)
    inner_b = snake(total_b + _row(bias, b, all_b), _row(alpha, b, all_b), _row(inverse, b, all_b)).to(kind)
    out_a, out_b = weight_out + a[:, None] * CHANNELS, weight_out + b[:, None] * CHANNELS
    places_in, places_raw = stream * residual_stride + step * CHANNELS, stream * raw_stride + step * CHANNELS
    places_ahead = stream * ahead_stride + step * CHANNELS
    y = tl.dot(inner_a, tl.load(out_a + a[None, :]), input_precision="ieee")
    y = tl.dot(inner_b, tl.load(out_b + a[None, :]), y, input_precision="ieee")
    _finish(
        y, bias_out, next_alpha, residual, raw, ahead, places_in, places_raw, places_ahead, a, inside,
        1, True, RAW, True, CHANNELS,
    )  # fmt: skip
    y = tl.dot(inner_a, tl.load(out_a + b[None, :]), input_precision="ieee")
    y = tl.dot(inner_b, tl.load(out_b + b[None, :]), y, input_precision="ieee")
    _finish(
        y, bias_out, next_alpha, residual, raw, ahead, places_in, places_raw, places_ahead, b, inside,
        1, True, RAW, True, CHANNELS,
    )  # fmt: skip
