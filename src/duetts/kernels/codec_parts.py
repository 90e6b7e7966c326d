"""Triton: the codec decoder's small things, each one pass: codes to latents, window attention, depthwise convolution with its
norm, the last convolution, pasts of streams in and out, and PCM.

Bytes of S2 Pro in fp16. A frame: codes 10 rows of 2 KB, depthwise 3 x 12 KB, the last convolution 0.39 MB. A stream at each
call: attention 8 layers x 0.53 MB of keys and values, pasts 2 x 0.54 MB, which is 0.25 us at 4.3 TB/s against 8.5 us of
products in each frame at 790 TFLOP/s. Two kernels move all pasts: they replace branches in every inner loop and a second buffer
for each state.

Measured: not yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from duetts.kernels.streaming import follow


@triton.jit
def embed_kernel(
    codes, table, starts, out, frames, BOOKS: tl.constexpr, CHANNELS: tl.constexpr, BC: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One frame of one stream."""
    follow(DEPENDENT)
    at = tl.program_id(0)
    stream, frame = at // frames, at % frames
    c = tl.arange(0, BC)
    total = tl.zeros((BC,), tl.float32)
    for book in range(BOOKS):
        begin, end = tl.load(starts + book), tl.load(starts + book + 1)
        code = tl.load(codes + (stream * BOOKS + book) * frames + frame)
        row = begin + tl.minimum(code, end - begin - 1)
        total += tl.load(table + row * CHANNELS + c, mask=c < CHANNELS, other=0.0)
    tl.store(out + at.to(tl.int64) * CHANNELS + c, total, mask=c < CHANNELS)


@triton.jit
def _turned(qkv, place, cos, sin, i, valid, HALF: tl.constexpr):
    """Both halves of turned pairs [BF, BH] at `place` [BF]."""
    mask = valid[:, None] & (i < HALF)[None, :]
    even = tl.load(qkv + place[:, None] + 2 * i[None, :], mask=mask, other=0.0)
    odd = tl.load(qkv + place[:, None] + 2 * i[None, :] + 1, mask=mask, other=0.0)
    kind = even.dtype
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    return (even * cos - odd * sin).to(kind), (odd * cos + even * sin).to(kind)


@triton.jit(do_not_specialize=["frames"])
def window_kernel(
    qkv, rope, now, slots, keys, values, out, frames, WINDOW: tl.constexpr, HEADS: tl.constexpr, RING: tl.constexpr,
    DIM: tl.constexpr, TURNS: tl.constexpr, BF: tl.constexpr, BO: tl.constexpr, BD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One head of one stream: old positions from the ring, new ones from qkv, which the ring then gets; no row is both."""
    stream, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = DIM // 2
    follow(DEPENDENT)
    begin = tl.load(now + stream)
    f, i, d, o = tl.arange(0, BF), tl.arange(0, BD // 2), tl.arange(0, BD), tl.arange(0, BO)
    new = f < frames
    table = rope + ((begin + f) % TURNS)[:, None] * DIM + 2 * i[None, :]
    turning = new[:, None] & (i < half)[None, :]
    cos, sin = tl.load(table, mask=turning, other=0.0), tl.load(table + 1, mask=turning, other=0.0)
    place = (stream.to(tl.int64) * frames + f) * (3 * HEADS * DIM) + head * DIM
    q_even, q_odd = _turned(qkv, place, cos, sin, i, new, half)
    k_even, k_odd = _turned(qkv, place + HEADS * DIM, cos, sin, i, new, half)
    v_mask = new[:, None] & (d < DIM)[None, :]
    v = tl.load(qkv + (place + 2 * HEADS * DIM)[:, None] + d[None, :], mask=v_mask, other=0.0)

    ring = (tl.load(slots + stream) * HEADS + head) * (RING * DIM)
    old = begin - BO + o  # positions
    there = (old >= 0) & (begin - old < WINDOW)  # the others' rows may be those that are written below
    rows = ring + tl.where(there, old % RING, 0) * DIM
    old_mask = there[:, None] & (i < half)[None, :]
    old_even = tl.load(keys + rows[:, None] + i[None, :], mask=old_mask, other=0.0)
    old_odd = tl.load(keys + rows[:, None] + half + i[None, :], mask=old_mask, other=0.0)
    old_v = tl.load(values + rows[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)

    scale = 1.0 / tl.sqrt(DIM * 1.0)
    s_old = tl.dot(q_even, tl.trans(old_even), input_precision="ieee")
    s_old = tl.dot(q_odd, tl.trans(old_odd), s_old, input_precision="ieee") * scale
    s_new = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
    s_new = tl.dot(q_odd, tl.trans(k_odd), s_new, input_precision="ieee") * scale
    seen = there[None, :] & (begin + f[:, None] - old[None, :] < WINDOW)
    s_old = tl.where(seen, s_old, float("-inf"))
    age = f[:, None] - f[None, :]
    s_new = tl.where((age >= 0) & (age < WINDOW), s_new, float("-inf"))
    top = tl.maximum(tl.max(s_old, 1), tl.max(s_new, 1))  # a position sees itself, so never -inf
    p_old, p_new = tl.exp(s_old - top[:, None]), tl.exp(s_new - top[:, None])
    total = tl.sum(p_old, 1) + tl.sum(p_new, 1)
    y = tl.dot(p_old.to(v.dtype), old_v, input_precision="ieee")
    y = tl.dot(p_new.to(v.dtype), v, y, input_precision="ieee") / total[:, None]
    tl.store(out + ((stream.to(tl.int64) * frames + f) * (HEADS * DIM) + head * DIM)[:, None] + d[None, :], y, mask=v_mask)

    rows = ring + ((begin + f) % RING) * DIM
    tl.store(keys + rows[:, None] + i[None, :], k_even, mask=turning)
    tl.store(keys + rows[:, None] + half + i[None, :], k_odd, mask=turning)
    tl.store(values + rows[:, None] + d[None, :], v, mask=v_mask)


@triton.jit(do_not_specialize=["rows", "steps"])
def depthwise_kernel(
    x, weight, bias, gain, shift, out, rows, steps, x_stride, eps, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BM steps, all channels."""
    follow(DEPENDENT)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.minimum(m, rows - 1)
    c = tl.arange(0, BC)
    there = c < CHANNELS
    at = x + ((row // steps).to(tl.int64) * x_stride + (row % steps) * CHANNELS)[:, None] + c[None, :]
    y = tl.zeros((BM, BC), tl.float32) + tl.load(bias + c, mask=there, other=0.0)[None, :]
    for tap in tl.static_range(TAPS):
        taken = tl.load(at + tap * CHANNELS, mask=there[None, :], other=0.0).to(tl.float32)
        y += taken * tl.load(weight + tap * CHANNELS + c, mask=there, other=0.0)[None, :]
    y -= (tl.sum(y, 1) / CHANNELS)[:, None]
    y = tl.where(there[None, :], y, 0.0)
    y *= tl.rsqrt(tl.sum(y * y, 1) / CHANNELS + eps)[:, None]
    y = y * tl.load(gain + c, mask=there, other=0.0)[None, :] + tl.load(shift + c, mask=there, other=0.0)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * CHANNELS + c[None, :], y, mask=(m < rows)[:, None] & there[None, :])


@triton.jit(do_not_specialize=["rows", "steps"])
def last_kernel(
    x, weight, bias, wave, rows, steps, x_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BM samples; neighbours read the same steps, which the L1 holds."""
    follow(DEPENDENT)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.minimum(m, rows - 1)
    c = tl.arange(0, BC)
    there = c < CHANNELS
    at = x + ((row // steps).to(tl.int64) * x_stride + (row % steps) * CHANNELS)[:, None] + c[None, :]
    y = tl.zeros((BM, BC), tl.float32)
    for tap in tl.static_range(TAPS):
        taken = tl.load(at + tap * CHANNELS, mask=there[None, :], other=0.0).to(tl.float32)
        y += taken * tl.load(weight + tap * CHANNELS + c, mask=there, other=0.0)[None, :]
    y = tl.sum(y, 1) + tl.load(bias)
    y = 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0)  # tanh: exp may be infinite
    tl.store(wave + row, y, mask=m < rows)


@triton.jit
def load_tails_kernel(
    tails, halo, layout, slots, position, now, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """A piece of one signal's past of one stream."""
    follow(DEPENDENT)
    stream, piece = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + stream)
    done = tl.load(position + slot)
    if piece == 0:
        tl.store(now + stream, done)
    offset, past = tl.load(layout + piece * 5), tl.load(layout + piece * 5 + 1)
    stride, count = tl.load(layout + piece * 5 + 3), tl.load(layout + piece * 5 + 4)
    i = tl.arange(0, BLOCK)
    kept = tl.load(tails + slot * width + offset + i, mask=(i < count) & (done > 0), other=0.0)
    tl.store(halo + past + stream * stride + i, kept, mask=i < count)


@triton.jit(do_not_specialize=["frames"])
def store_tails_kernel(
    tails, halo, layout, slots, position, now, width, frames, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """A piece back: the last values of a signal are its new past."""
    follow(DEPENDENT)
    stream, piece = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + stream)
    if piece == 0:
        tl.store(position + slot, tl.load(now + stream) + frames)
    offset, end = tl.load(layout + piece * 5), tl.load(layout + piece * 5 + 2)
    stride, count = tl.load(layout + piece * 5 + 3), tl.load(layout + piece * 5 + 4)
    i = tl.arange(0, BLOCK)
    values = tl.load(halo + end + stream * stride + i, mask=i < count)
    tl.store(tails + slot * width + offset + i, values, mask=i < count)


@triton.jit(do_not_specialize=["length"])
def pcm_kernel(wave, samples, length, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """One stream: first whether it is sound, then its samples and that."""
    follow(DEPENDENT)
    stream = tl.program_id(0).to(tl.int64)
    at, to = stream * length, stream * (length + 1)
    i = tl.arange(0, BLOCK)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, length, BLOCK):
        y = tl.load(wave + at + begin + i, mask=begin + i < length, other=0.0)
        wrong += ((y - y) != 0.0).to(tl.int32)  # inf - inf and nan - nan are nan
    sounds = tl.sum(wrong, 0) == 0
    tl.store(samples + to + length, sounds.to(tl.int16))
    for begin in range(0, length, BLOCK):
        y = tl.load(wave + at + begin + i, mask=begin + i < length, other=0.0) * 32768.0
        y = tl.where(sounds, tl.minimum(tl.maximum(y, -32768.0), 32767.0), 0.0)
        tl.store(samples + to + begin + i, y.to(tl.int16), mask=begin + i < length)
