"""Launches of the codec decoder's Triton kernels: block sizes, strides and grids. Their contracts are in `duetts.kernels`.

Block sizes are chosen by an estimate, once for each shape: a kernel takes as long as the L2 needs to feed all its programs, or
a processor to feed and multiply its share of them. So few large blocks often beat many small ones even where they leave
processors idle, and few rows split their taps. The rates are assumed, not measured; a benchmark may put other blocks in
their place with `tile=`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from duetts.kernels import TAIL_PIECE, projection
from duetts.kernels.codec_conv import GELU, NONE, SNAKE, conv_kernel, unit_kernel
from duetts.kernels.codec_parts import (
    depthwise_kernel,
    embed_kernel,
    last_kernel,
    load_tails_kernel,
    pcm_kernel,
    store_tails_kernel,
    window_kernel,
)

NARROW = 192  # channels up to which a residual unit is one kernel: its inner signal and its sums fit in registers
MIN_BLOCKS = 4  # of inputs, in each of the programs that share a tile
MAX_SPLITS = 16
MAX_SHARED_TILES = 1024  # `counts` has a place for each

# An H200, assumed: bytes a second from the L2 to all processors and to one, FLOP a second of one, a step's latency, the cost of
# counting programs, and bytes a second of partial sums.
L2_RATE, PROCESSOR_RATE, PROCESSOR_FLOPS, STEP_S, SHARING_S, SUMS_RATE = 5.5e12, 115e9, 6.0e12, 0.15e-6, 1.5e-6, 3e12


class Tile(NamedTuple):
    """A product's blocks: rows, outputs, inputs of one step, programs that share a tile, warps, steps under way, and whether
    the signal comes through the L1 (`codec_conv.py`)."""

    rows: int
    outputs: int
    inputs: int
    splits: int = 1
    warps: int = 4
    stages: int = 3
    near: bool = False


class Card(NamedTuple):
    """What blocks are chosen for: processors, and bytes of shared memory that a program may take."""

    processors: int
    memory: int


# What compiles for sm_90 without spilling registers; wgmma multiplies 64 rows at least, below it is the older instruction.
TILES = (
    Tile(16, 64, 128, stages=4), Tile(32, 64, 128, stages=4), Tile(64, 64, 128, stages=4), Tile(64, 64, 64, stages=4),
    Tile(64, 128, 64, stages=4), Tile(128, 128, 64, warps=8), Tile(128, 256, 64, warps=8), Tile(256, 128, 64, warps=8),
)  # fmt: skip


class UnitTile(NamedTuple):
    """A residual unit's blocks: rows, inputs of one step, warps, steps under way, and the L1 as for a `Tile`."""

    rows: int
    inputs: int
    warps: int
    stages: int
    near: bool = False


def multiplies(rows: int, outputs: int) -> bool:
    """Whether programs of so many rows and outputs give right sums (`codec_conv.py` says what went wrong)."""
    return rows < 64 or outputs >= 64


def _seconds(programs: int, num_bytes: int, flops: int, num_steps: int, beside: int, processors: int) -> float:
    """An estimate, for programs that take so much each and of which `beside` fit a processor."""
    turns = -(-programs // processors)
    waiting = num_steps * STEP_S / min(turns, beside)
    own = turns * max(num_bytes / PROCESSOR_RATE, flops / PROCESSOR_FLOPS, waiting)
    return max(programs * num_bytes / L2_RATE, own)


def _tile_seconds(tile: Tile, rows: int, inputs: int, outputs: int, taps: int, processors: int) -> float:
    tiles = _tiles(rows, outputs, tile.rows, tile.outputs)
    num_steps = -(-taps * inputs // (tile.inputs * tile.splits))
    depth = num_steps * tile.inputs
    beside = 2 if tile.rows * tile.outputs <= 128 * 128 else 1
    seconds = _seconds(
        tiles * tile.splits, 2 * depth * (tile.rows + tile.outputs), 2 * max(tile.rows, 64) * tile.outputs * depth, num_steps,
        beside, processors,
    )  # fmt: skip
    return seconds + (2 * 4 * tile.splits * rows * outputs / SUMS_RATE + SHARING_S if tile.splits > 1 else 0.0)


@cache
def choose_tile(rows: int, inputs: int, outputs: int, taps: int, size: int, card: Card, shared: bool) -> Tile:
    """Blocks for values of `size` bytes. `shared`: programs may share a tile."""
    processors, memory = card
    fitting = [tile for tile in TILES if inputs % tile.inputs == 0]
    fitting = [tile for tile in fitting if 2 * tile.stages * tile.inputs * (tile.rows + tile.outputs) <= memory]
    if size > 2 or not fitting:  # nothing that must be fast
        return Tile(min(64 if size > 2 else 32, _power(rows)), min(64, _power(outputs)), min(32, _power(inputs)), stages=2)
    tries = list(fitting)
    for tile in fitting if shared else ():
        tiles, blocks = _tiles(rows, outputs, tile.rows, tile.outputs), taps * inputs // tile.inputs
        most = min(processors // tiles, blocks // MIN_BLOCKS, MAX_SPLITS) if tiles <= MAX_SHARED_TILES else 1
        for splits in range(2, most + 1):
            share = -(-blocks // splits)
            if -(-blocks // share) == splits:  # else some program would have no block
                tries.append(tile._replace(splits=splits))
    return min(tries, key=lambda tile: _tile_seconds(tile, rows, inputs, outputs, taps, processors))


@cache
def choose_unit_tile(rows: int, channels: int, taps: int, size: int, card: Card) -> UnitTile:
    """Blocks of a residual unit for values of `size` bytes."""
    processors, memory = card
    inputs = 64 if channels % 64 == 0 else 32
    if size > 2 or channels % inputs:
        return UnitTile(16, min(32, _power(channels)), 4, 2)
    tries = [UnitTile(16, inputs, 4, 4), UnitTile(32, inputs, 4, 4), UnitTile(64, inputs, 4, 3), UnitTile(128, inputs, 8, 3)]
    if channels <= 96:
        tries.append(UnitTile(256, inputs, 8, 3))
    tries = [tile for tile in tries if multiplies(tile.rows, min(_halves(channels)))]
    tries = [tile for tile in tries if 2 * tile.stages * inputs * (tile.rows + channels) <= memory] or tries[:1]

    def seconds(tile: UnitTile) -> float:
        products = (taps + 1) * channels * channels
        moved = 2 * (products + (taps + 3) * tile.rows * channels)
        num_steps = taps * channels // inputs + 4  # the end of a unit takes as long as a few steps
        return _seconds(-(-rows // tile.rows), moved, 2 * max(tile.rows, 64) * products, num_steps, 1, processors)

    return min(tries, key=seconds)


def _power(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


def _tiles(rows: int, outputs: int, tile_rows: int, tile_outputs: int) -> int:
    return -(-rows // tile_rows) * -(-outputs // tile_outputs)


def _card(x: Tensor) -> Card:
    """The device of x; outside a GPU an H200, for which these kernels can be compiled anywhere."""
    device = projection.device_of(x)
    return Card(132, 227 * 1024) if device is None else Card(device.multiprocessors, device.shared - 1024)


def _dependent(x: Tensor) -> dict[str, bool]:
    """Programmatic dependent launch, where the device has it: 76 kernels in a row are many gaps."""
    return {"DEPENDENT": True, "launch_pdl": True} if projection._starts_early(x) else {"DEPENDENT": False}


def _halves(channels: int) -> tuple[int, int]:
    """Two powers of two that a number of channels is made of, at least 16; zeros if there are none."""
    first = 1 << ((channels - 1).bit_length() - 1)
    rest = channels - first
    return (first, rest) if rest >= 16 and rest & (rest - 1) == 0 else (0, 0)


def conv(
    x: Tensor, weight: Tensor, bias: Tensor, *, taps: int = 1, dilation: int = 1, alpha: Tensor | None = None,
    gelu: bool = False, residual: Tensor | None = None, raw: Tensor | None = None, ahead: Tensor | None = None,
    counts: Tensor | None = None, tile: Tile | None = None,
) -> None:  # fmt: skip
    """See `duetts.kernels.conv`."""
    streams, inputs, outputs = len(x), x.shape[2], weight.shape[1]
    steps = x.shape[1] - (taps - 1) * dilation
    rows = streams * steps
    tile = tile or choose_tile(rows, inputs, outputs, taps, x.element_size(), _card(x), counts is not None)
    tiles = _tiles(rows, outputs, tile.rows, tile.outputs)
    partial = bias
    if tile.splits > 1:
        assert counts is not None, "programs that share a tile must count themselves"
        assert tiles <= len(counts), f"{tiles} tiles are more than can be shared"
        partial = torch.empty(tile.splits * rows * outputs, device=x.device, dtype=torch.float32)
    act = SNAKE if alpha is not None else GELU if gelu else NONE
    conv_kernel[tiles, tile.splits](
        x, weight, bias, _or(alpha, bias), _or(residual, x), _or(raw, x), _or(ahead, x), partial, _or(counts, bias),
        rows, steps, taps * -(-inputs // tile.inputs), dilation, x.stride(0), *(0 if each is None else each.stride(0) for each
        in (residual, raw, ahead)), inputs, outputs, taps, act, residual is not None, raw is not None, ahead is not None,
        tile.splits, tile.rows, tile.outputs, tile.inputs, tile.near, num_warps=tile.warps, num_stages=tile.stages,
    **_dependent(x), )  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is never followed where there is no tensor."""
    return other if tensor is None else tensor


def residual_unit(
    x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor, weight_out: Tensor, bias_out: Tensor, *, dilation: int,
    residual: Tensor, next_alpha: Tensor, ahead: Tensor, raw: Tensor | None = None, counts: Tensor | None = None,
    tile: UnitTile | None = None,
) -> None:  # fmt: skip
    """See `duetts.kernels.residual_unit`."""
    channels = x.shape[2]
    taps = weight.shape[0] // channels
    first, second = _halves(channels)
    if channels > NARROW or not first:
        inner = torch.empty(residual.shape, device=x.device, dtype=x.dtype)
        conv(x, weight, bias, taps=taps, dilation=dilation, alpha=alpha, ahead=inner, counts=counts)
        conv(inner, weight_out, bias_out, alpha=next_alpha, residual=residual, raw=raw, ahead=ahead, counts=counts)
        return
    steps = x.shape[1] - (taps - 1) * dilation
    rows = len(x) * steps
    tile = tile or choose_unit_tile(rows, channels, taps, x.element_size(), _card(x))
    unit_kernel[(-(-rows // tile.rows),)](
        x, weight, bias, alpha, weight_out, bias_out, next_alpha, residual, _or(raw, residual), ahead, rows, steps,
        taps * -(-channels // tile.inputs), dilation, x.stride(0), residual.stride(0), _or(raw, residual).stride(0),
        ahead.stride(0), channels, taps, raw is not None, tile.rows, first, second, tile.inputs, tile.near,
    num_warps=tile.warps, num_stages=tile.stages, **_dependent(x), )  # fmt: skip


def last_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See `duetts.kernels.last_conv`."""
    streams, channels, taps = len(x), x.shape[2], len(weight)
    steps = x.shape[1] - taps + 1
    wave = torch.empty(streams, steps, device=x.device, dtype=torch.float32)
    block = 32
    last_kernel[(-(-streams * steps // block),)](
        x, weight, bias, wave, streams * steps, steps, x.stride(0), channels, taps, block,
        triton.next_power_of_2(channels), **_dependent(x),
    )  # fmt: skip
    return wave


def depthwise_norm(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """See `duetts.kernels.depthwise_norm`."""
    streams, channels, taps = len(x), x.shape[2], len(weight)
    steps = x.shape[1] - taps + 1
    out = torch.empty(streams, steps, channels, device=x.device, dtype=x.dtype)
    block = 2
    depthwise_kernel[(-(-streams * steps // block),)](
        x, weight, bias, gain, shift, out, streams * steps, steps, x.stride(0), eps, channels, taps, block,
        triton.next_power_of_2(channels), **_dependent(x),
    )  # fmt: skip
    return out


def embed_codes(codes: Tensor, table: Tensor, starts: Tensor) -> Tensor:
    """See `duetts.kernels.embed_codes`."""
    streams, books, frames = codes.shape
    channels = table.shape[1]
    out = torch.empty(streams, frames, channels, device=table.device, dtype=table.dtype)
    embed_kernel[(streams * frames,)](
        codes.contiguous(), table, starts, out, frames, books, channels, triton.next_power_of_2(channels),
        **_dependent(table),
    )  # fmt: skip
    return out


def window_attention(
    qkv: Tensor, rope: Tensor, now: Tensor, slots: Tensor, keys: Tensor, values: Tensor, window: int
) -> Tensor:  # fmt: skip
    """See `duetts.kernels.window_attention`."""
    streams, frames, _ = qkv.shape
    _, heads, ring, dim = keys.shape
    assert window - 1 + frames <= ring, f"{frames} new positions and a window of {window} do not fit a ring of {ring}"
    out = torch.empty(streams, frames, heads * dim, device=qkv.device, dtype=qkv.dtype)
    window_kernel[streams, heads](
        qkv.contiguous(), rope, now, slots, keys, values, out, frames, window, heads, ring, dim, len(rope), _power(frames),
        _power(window - 1), max(32, _power(dim)), num_warps=4, **_dependent(qkv),
    )  # fmt: skip
    return out


def load_tails(tails: Tensor, halo: Tensor, layout: Tensor, slots: Tensor, position: Tensor, now: Tensor) -> None:
    """See `duetts.kernels.load_tails`."""
    load_tails_kernel[len(slots), len(layout)](
        tails, halo, layout, slots, position, now, tails.shape[1], TAIL_PIECE, num_warps=8, **_dependent(tails)
    )


def store_tails(
    tails: Tensor, halo: Tensor, layout: Tensor, slots: Tensor, position: Tensor, now: Tensor, frames: int
) -> None:  # fmt: skip
    """See `duetts.kernels.store_tails`."""
    store_tails_kernel[len(slots), len(layout)](
        tails, halo, layout, slots, position, now, tails.shape[1], frames, TAIL_PIECE, num_warps=8, **_dependent(tails)
    )


def pcm16(wave: Tensor) -> Tensor:
    """See `duetts.kernels.pcm16`."""
    streams, length = wave.shape
    samples = torch.empty(streams, length + 1, device=wave.device, dtype=torch.int16)
    pcm_kernel[(streams,)](wave, samples, length, 2048, num_warps=8, **_dependent(wave))
    return samples
