"""Attention over pages: one new position of many rows (decode), and a block of one sequence (prefill). Also the fast decoder's
attention within a frame.

Fused: the store of new keys and values, scores, softmax, the sum of values. One (row, key-value head) pair serves a whole group
of queries, so that keys and values are read once, in tiles of `_TILE` positions, 4 KB of a page at a time. Every tile gives its
own maximum, sum and sum of values; these are folded together from left to right, the new position last, from registers. A
row's numbers thus depend on its own length only, however many programs share its tiles:

* many pairs: one program a pair folds as it goes (`_decode_whole`);
* few pairs: programs take tiles in turn and leave what they found in a workspace, which a second kernel, or the last of them,
  folds in the same order (`_decode_shared`).

Bytes of decode in S2 Pro (36 layers, 8 heads of 128, bf16): 147,456 a position and frame. At B = 1 and 500 positions 74 MB, or
17 us at 4.3 TB/s: what counts there is the latency of 72 launches. At B = 256 and 2,000 positions 75 GB, 17.6 ms. The workspace
adds 2 KB per tile of 32 KB, written and read again, mostly within L2. Prefill is bound by products: 4 n (start + n / 2) 4,096
FLOP a layer, 0.68 TFLOP for 512 positions behind 2,000 in 36 layers. Measured: docs/performance-log.md.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from duetts.kernels import projection
from duetts.kernels.streaming import follow

_TILE = 64  # positions of a tile; half in float32
_WARPS = 4  # twice in float32, whose products take registers
_STAGES = 3  # of a tile's way; 5 took a quarter longer at 64 rows and 500 positions, twice as long at 2,000
_PREFILL_STAGES = 3
_PREFILL_ROWS = 64  # queries of a program, of all heads of a group; 16 in float32
_WHOLE_PAIRS = 2  # pairs per multiprocessor from which on one program a pair keeps memory busy
_SHARED_PROGRAMS = 4  # programs per multiprocessor when pairs are shared
MOST_TICKETS = 1 << 14  # pairs that are shared, for each of which programs draw tickets
JOINED = False  # until it is measured
_TICKETS: dict[torch.device, Tensor] = {}
_LOG2_E = 1.4426950408889634


@triton.jit
def _part(q, k, v, seen, SCALE: tl.constexpr):
    """Queries [G, D], all of which see something, over keys and values [T, D]: maximum and sum of weights, sum of values."""
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE, float("-inf"))
    top = tl.max(scores, 1)
    weights = tl.exp2(scores - top[:, None])
    return top, tl.sum(weights, 1), tl.dot(weights.to(v.dtype), v, input_precision="ieee")


@triton.jit
def _tile(
    q, keys, values, table, head, tile, end,
    SCALE: tl.constexpr, KV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The part of a softmax over those positions of a tile that lie below `end`."""
    steps = tile * T + tl.arange(0, T)
    live = steps < end
    pages = tl.load(table + steps // PAGE, mask=live, other=0).to(tl.int64)
    places = ((pages * KV + head) * PAGE + steps % PAGE)[:, None] * D + tl.arange(0, D)[None, :]
    k = tl.load(keys + places, mask=live[:, None], other=0.0)
    v = tl.load(values + places, mask=live[:, None], other=0.0)
    return _part(q, k, v, live[None, :], SCALE)


@triton.jit
def _fold(top, total, mixed, next_top, next_total, next_mixed):
    """Two parts of a softmax as one. `fma` is written out: both kernels must round alike."""
    high = tl.maximum(top, next_top)
    old, new = tl.exp2(top - high), tl.exp2(next_top - high)
    return high, tl.fma(total, old, next_total * new), tl.fma(mixed, old[:, None], next_mixed * new[:, None])


@triton.jit
def _place(tables, slots, positions, row, width, table_stride, PAGE: tl.constexpr):
    """A row's table and new position. Padding rows may point beyond the table: they count as its last position."""
    position = tl.minimum(tl.load(positions + row), width * PAGE - 1).to(tl.int32)
    return tables + tl.load(slots + row) * table_stride, position


@triton.jit
def _queries(q, row, head, q_stride, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """The queries of a pair, [G, D], of which GROUP are real."""
    member = tl.arange(0, G)
    places = row * q_stride + (head * GROUP + member)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(q + places, mask=(member < GROUP)[:, None], other=0.0)


@triton.jit
def _finish(
    q, top, total, mixed, k, v, keys, values, out, table, row, head, position, k_stride, v_stride,
    SCALE: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Folds in the new position, writes the output and stores the new key and value in their page."""
    dims = tl.arange(0, D)
    new_k = tl.load(k + row * k_stride + head * D + dims)
    new_v = tl.load(v + row * v_stride + head * D + dims)
    # A product of matrices, one column of which counts: its order of sums does not depend on how a kernel is laid out.
    first = tl.arange(0, 16)[None, :] == 0
    column = tl.where(first, new_k[:, None], tl.zeros((D, 16), new_k.dtype))
    score = tl.sum(tl.where(first, tl.dot(q, column, input_precision="ieee"), 0.0), 1) * SCALE
    ones = tl.full((G,), 1.0, tl.float32)
    top, total, mixed = _fold(top, total, mixed, score, ones, tl.broadcast_to(new_v.to(tl.float32)[None, :], (G, D)))
    member = tl.arange(0, G)
    places = ((row * KV + head) * GROUP + member)[:, None] * D + dims[None, :]
    tl.store(out + places, (mixed / total[:, None]).to(out.dtype.element_ty), mask=(member < GROUP)[:, None])
    page = tl.load(table + position // PAGE).to(tl.int64)
    own = ((page * KV + head) * PAGE + position % PAGE) * D + dims
    tl.store(keys + own, new_k)
    tl.store(values + own, new_v)


@triton.jit
def _decode_whole(
    q, k, v, keys, values, tables, slots, positions, out, q_stride, k_stride, v_stride, table_stride, width,
    SCALE: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, T: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    follow(DEPENDENT)
    row, head = (tl.program_id(0) // KV).to(tl.int64), tl.program_id(0) % KV
    table, position = _place(tables, slots, positions, row, width, table_stride, PAGE)
    queries = _queries(q, row, head, q_stride, GROUP, G, D)
    top = tl.full((G,), float("-inf"), tl.float32)
    total = tl.zeros((G,), tl.float32)
    mixed = tl.zeros((G, D), tl.float32)
    for tile in range(tl.cdiv(position, T)):
        t, s, m = _tile(queries, keys, values, table, head, tile, position, SCALE, KV, PAGE, D, T)
        top, total, mixed = _fold(top, total, mixed, t, s, m)
    _finish(
        queries, top, total, mixed, k, v, keys, values, out, table, row, head, position, k_stride, v_stride,
        SCALE, KV, GROUP, G, PAGE, D,
    )  # fmt: skip


@triton.jit
def _decode_shared(
    q, k, v, keys, values, tables, slots, positions, sums, mixes, tickets, out,
    q_stride, k_stride, v_stride, table_stride, width, tiles,
    SCALE: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    DEPENDENT: tl.constexpr, SHARE: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """SHARE: every n-th tile of a pair into the workspace, sums [pairs, tiles, 2, G] and mixes [pairs, tiles, GROUP, D]. FOLD:
    all of them into the output. With both, the program that draws a pair's last ticket folds, and puts the tickets back."""
    follow(DEPENDENT)
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = pair // KV, tl.program_id(0) % KV
    table, position = _place(tables, slots, positions, row, width, table_stride, PAGE)
    queries = _queries(q, row, head, q_stride, GROUP, G, D)
    member, count = tl.arange(0, G), tl.cdiv(position, T)
    is_last = part == 0
    if SHARE:
        for tile in range(part, count, tl.num_programs(1)):
            top, total, mixed = _tile(queries, keys, values, table, head, tile, position, SCALE, KV, PAGE, D, T)
            place = pair * tiles + tile
            tl.store(sums + place * 2 * G + member, top)
            tl.store(sums + (place * 2 + 1) * G + member, total)
            places = (place * GROUP + member)[:, None] * D + tl.arange(0, D)[None, :]
            tl.store(mixes + places, mixed, mask=(member < GROUP)[:, None])
        if FOLD:
            working = tl.maximum(tl.minimum(count, tl.num_programs(1)), 1)
            is_last = part < 0
            if part < working:
                tl.debug_barrier()  # all of this program's stores come before its ticket
                is_last = tl.atomic_add(tickets + pair, 1, sem="acq_rel") == working - 1
    if FOLD:  # noqa: SIM102 - decided by the compiler, the other one by the row
        if is_last:
            if SHARE:
                tl.store(tickets + pair, 0)
            top = tl.full((G,), float("-inf"), tl.float32)
            total = tl.zeros((G,), tl.float32)
            mixed = tl.zeros((G, D), tl.float32)
            for tile in tl.range(0, count, num_stages=4):
                place = pair * tiles + tile
                t = tl.load(sums + place * 2 * G + member, cache_modifier=".cg")
                s = tl.load(sums + (place * 2 + 1) * G + member, cache_modifier=".cg")
                places = (place * GROUP + member)[:, None] * D + tl.arange(0, D)[None, :]
                m = tl.load(mixes + places, mask=(member < GROUP)[:, None], other=0.0, cache_modifier=".cg")
                top, total, mixed = _fold(top, total, mixed, t, s, m)
            _finish(
                queries, top, total, mixed, k, v, keys, values, out, table, row, head, position, k_stride, v_stride,
                SCALE, KV, GROUP, G, PAGE, D,
            )  # fmt: skip


def _sizes(q: Tensor, keys: Tensor) -> tuple[dict[str, Any], int]:
    """What a kernel over pages is compiled for, and the size of a group."""
    kv_heads, page, dim = keys.shape[1:]
    group, wide = q.shape[1] // kv_heads, q.dtype == torch.float32
    sizes = {"SCALE": dim**-0.5 * _LOG2_E, "KV": kv_heads, "GROUP": group, "PAGE": page, "D": dim}
    return sizes | {"T": _TILE >> wide, "num_warps": _WARPS << wide, **projection._dependent(q)}, group


def programs_per_pair(q: Tensor, kv_heads: int) -> int:
    """How many programs share a pair's tiles; 1 is the kernel that needs no workspace. No number depends on it."""
    device, pairs = projection.device_of(q), len(q) * kv_heads
    processors = 1 if device is None else device.multiprocessors
    return 1 if pairs >= _WHOLE_PAIRS * processors else -(-_SHARED_PROGRAMS * processors // pairs)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, tables: Tensor, slots: Tensor, positions: Tensor,
    *, programs: int = 0, tile: int = 0, stages: int = _STAGES, joined: bool = JOINED,
) -> Tensor:  # fmt: skip
    """As `reference.decode_attention`. `programs` per pair are chosen by the number of pairs unless given. Numbers depend on
    `tile`, so that it must not be chosen by the number of rows. `joined`: shared tiles are folded by whichever program is the
    last, not by a second kernel; such calls of one device must not run at the same time."""
    sizes, group = _sizes(q, keys)
    sizes["T"] = tile or sizes["T"]
    sizes["G"] = max(16, triton.next_power_of_2(group))
    pairs, width = len(q) * keys.shape[1], tables.shape[1]
    programs = programs or programs_per_pair(q, keys.shape[1])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    where = (tables, slots, positions)
    strides = (q.stride(0), k.stride(0), v.stride(0), tables.stride(0), width)
    if programs == 1:
        _decode_whole[(pairs,)](q, k, v, keys, values, *where, out, *strides, **sizes, num_stages=stages)
        return out
    tiles = triton.cdiv(width * keys.shape[2], sizes["T"])
    sums = torch.empty(pairs, tiles, 2, sizes["G"], dtype=torch.float32, device=q.device)
    mixes = torch.empty(pairs, tiles, group, q.shape[2], dtype=torch.float32, device=q.device)
    tickets = _tickets(q, pairs) if joined else None
    sizes["num_stages"] = stages
    for share, fold in ((True, True),) if tickets is not None else ((True, False), (False, True)):
        _decode_shared[(pairs, min(programs, tiles) if share else 1)](
            q, k, v, keys, values, *where, sums, mixes, sums if tickets is None else tickets, out,
            *strides, tiles, **sizes, SHARE=share, FOLD=fold,
        )  # fmt: skip
    return out


def _tickets(q: Tensor, pairs: int) -> Tensor | None:
    """Zeros that kernels find and leave as zeros; None if they cannot be made now: a recording would keep them for itself."""
    found = _TICKETS.get(q.device)
    if found is None and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        found = _TICKETS[q.device] = torch.zeros(MOST_TICKETS, dtype=torch.int32, device=q.device)
    return found if found is not None and pairs <= MOST_TICKETS else None


@triton.jit
def _prefill(
    q, k, v, keys, values, table, start, out, q_stride, k_stride, v_stride, width, n,
    SCALE: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """N new positions for one key-value head: their N * G queries over what the pages hold, then over the block itself."""
    follow(DEPENDENT)
    head, begin = tl.program_id(1), tl.load(start).to(tl.int32)
    member = tl.arange(0, N * G) % G
    step = tl.program_id(0) * N + tl.arange(0, N * G) // G
    dims = tl.arange(0, D)
    real = ((member < GROUP) & (step < n))[:, None]
    queries = tl.load(q + (step * q_stride + (head * GROUP + member) * D)[:, None] + dims[None, :], mask=real, other=0.0)
    top = tl.full((N * G,), float("-inf"), tl.float32)
    total = tl.zeros((N * G,), tl.float32)
    mixed = tl.zeros((N * G, D), tl.float32)
    for tile in range(tl.cdiv(begin, T)):
        t, s, m = _tile(queries, keys, values, table, head, tile, begin, SCALE, KV, PAGE, D, T)
        top, total, mixed = _fold(top, total, mixed, t, s, m)
    # N divides T: whatever tile is looked at, every query sees its first position.
    for tile in range(tl.cdiv(tl.minimum(n, (tl.program_id(0) + 1) * N), T)):
        other = tile * T + tl.arange(0, T)
        block_k = tl.load(k + (other * k_stride + head * D)[:, None] + dims[None, :], mask=(other < n)[:, None], other=0.0)
        block_v = tl.load(v + (other * v_stride + head * D)[:, None] + dims[None, :], mask=(other < n)[:, None], other=0.0)
        t, s, m = _part(queries, block_k, block_v, other[None, :] <= step[:, None], SCALE)
        top, total, mixed = _fold(top, total, mixed, t, s, m)
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + ((step * KV + head) * GROUP + member)[:, None] * D + dims[None, :], mixed, mask=real)
    own = tl.program_id(0) * N + tl.arange(0, N)
    stored = (own < n)[:, None]
    position = tl.minimum(begin + own, width * PAGE - 1)
    page = tl.load(table + position // PAGE, mask=own < n, other=0).to(tl.int64)
    places = ((page * KV + head) * PAGE + position % PAGE)[:, None] * D + dims[None, :]
    own_k = tl.load(k + (own * k_stride + head * D)[:, None] + dims[None, :], mask=stored, other=0.0)
    own_v = tl.load(v + (own * v_stride + head * D)[:, None] + dims[None, :], mask=stored, other=0.0)
    tl.store(keys + places, own_k, mask=stored)
    tl.store(values + places, own_v, mask=stored)


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, start: Tensor
) -> Tensor:  # fmt: skip
    """As `reference.prefill_attention`. A row's numbers depend on where its block begins, as blocks are cut at fixed places."""
    sizes, group = _sizes(q, keys)
    rows = 16 if q.dtype == torch.float32 else _PREFILL_ROWS
    sizes["G"] = triton.next_power_of_2(group)
    sizes["N"] = max(1, rows // sizes["G"])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _prefill[(triton.cdiv(len(q), sizes["N"]), keys.shape[1])](
        q, k, v, keys, values, table, start, out, q.stride(0), k.stride(0), v.stride(0), len(table), len(q),
        **sizes, num_stages=_PREFILL_STAGES,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["start", "n"])
def _frame(
    q, k, v, keys, values, out, start, n, q_stride, q_step, k_stride, k_step, v_stride, v_step, room,
    SCALE: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A row's few positions of one key-value head: a single tile, of which those from `start` on are new."""
    follow(DEPENDENT)
    row, head = (tl.program_id(0) // KV).to(tl.int64), tl.program_id(0) % KV
    dims = tl.arange(0, D)[None, :]
    index = tl.arange(0, G)
    step, member = index // GROUP, index % GROUP
    real = (step < n)[:, None]
    queries = tl.load(q + row * q_stride + (step * q_step + (head * GROUP + member) * D)[:, None] + dims, mask=real, other=0.0)
    position = tl.arange(0, T)
    old = (position < start)[:, None]
    new = ((position >= start) & (position < start + n))[:, None]
    places = ((row * KV + head) * room + position)[:, None] * D + dims
    fresh = (position - start)[:, None]
    new_k = tl.load(k + row * k_stride + fresh * k_step + head * D + dims, mask=new, other=0.0)
    new_v = tl.load(v + row * v_stride + fresh * v_step + head * D + dims, mask=new, other=0.0)
    all_k = tl.where(new, new_k, tl.load(keys + places, mask=old, other=0.0))
    all_v = tl.where(new, new_v, tl.load(values + places, mask=old, other=0.0))
    _, total, mixed = _part(queries, all_k, all_v, position[None, :] <= (start + step)[:, None], SCALE)
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (((row * n + step) * KV + head) * GROUP + member)[:, None] * D + dims, mixed, mask=real)
    tl.store(keys + places, new_k, mask=new)
    tl.store(values + places, new_v, mask=new)


def frame_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """As `reference.frame_attention`: 8 KB of keys and values for a row and head in S2 Pro, read once."""
    batch, n, heads, dim = q.shape
    kv_heads, room = keys.shape[1:3]
    group = heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _frame[(batch * kv_heads,)](
        q, k, v, keys, values, out, start, n, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], room,
        SCALE=dim**-0.5 * _LOG2_E, KV=kv_heads, GROUP=group, G=max(16, triton.next_power_of_2(n * group)), D=dim,
        T=max(16, triton.next_power_of_2(room)), num_warps=_WARPS, **projection._dependent(q),
    )  # fmt: skip
    return out
