"""Launches of the codec decoder's Triton kernels: block sizes, strides and grids. Their contracts are in `duetts.kernels`.

Block sizes are chosen per call from the numbers of rows, inputs and outputs: `Tile.of` and `UnitTile.of`, with the reasons in
`codec_conv.py`. A benchmark may put its own in their place with `tile=`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from duetts.kernels import projection
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

NARROW = (
    192  # channels up to which a residual unit is one kernel: its inner signal and accumulators fit a processor's registers
)
MIN_BLOCKS = 4  # of inputs, in each of the programs that share a tile
MAX_SPLITS = 16


class Tile(NamedTuple):
    """A product's blocks: rows, outputs, inputs of one step, programs that share a tile, warps, steps under way."""

    rows: int
    outputs: int
    inputs: int
    splits: int = 1
    warps: int = 4
    stages: int = 3

    @classmethod
    def of(cls, rows: int, inputs: int, outputs: int, taps: int, *, processors: int, wide: bool, shared: bool) -> Tile:
        """`wide`: 4-byte values, of which half as many fit. `shared`: programs may share a tile. Products of one tap are
        short: at 128 x 128 two programs fit a processor, and one multiplies while the other one ends."""
        if rows <= 64:  # weights are all there is to read
            tile = cls(max(16, triton.next_power_of_2(rows)), 64, 128, stages=4)
        elif _tiles(rows, outputs, 128, 128) < processors:
            tile = cls(64, 64, 64, stages=4)
        elif taps == 1 or _tiles(rows, outputs, 128, 256) < 2 * processors:
            tile = cls(128, 128, 64, warps=8)
        elif outputs % 256 == 0:
            tile = cls(128, 256, 64, warps=8)
        else:
            tile = cls(256, 128, 64, warps=8)
        if wide:
            tile = cls(min(tile.rows, 64), 64, 32, stages=2)
        tile = tile._replace(outputs=min(tile.outputs, _power(outputs)), inputs=min(tile.inputs, _power(inputs)))
        if inputs % tile.inputs and inputs % 32 == 0:
            tile = tile._replace(inputs=32)
        blocks = taps * -(-inputs // tile.inputs)
        splits = min(processors // _tiles(rows, outputs, tile.rows, tile.outputs), blocks // MIN_BLOCKS, MAX_SPLITS)
        if not shared or splits < 2:
            return tile
        share = -(-blocks // splits)
        return tile._replace(splits=-(-blocks // share))  # no program without a block


class UnitTile(NamedTuple):
    """A residual unit's blocks: rows, inputs of one step, warps, steps under way."""

    rows: int
    inputs: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, channels: int, *, processors: int, wide: bool) -> UnitTile:
        """As many rows as leave work for every processor."""
        inputs = 64 if channels % 64 == 0 else 32
        if wide:
            return cls(16, min(inputs, 32, _power(channels)), 4, 2)
        inputs = min(inputs, _power(channels))
        if rows >= 128 * processors:
            return cls(128, inputs, 8, 3)
        if rows >= 64 * processors:
            return cls(64, inputs, 4, 3)
        return cls(32 if rows >= 32 * processors else 16, inputs, 4, 4)


def _power(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


def _tiles(rows: int, outputs: int, tile_rows: int, tile_outputs: int) -> int:
    return -(-rows // tile_rows) * -(-outputs // tile_outputs)


def _processors(x: Tensor) -> int:
    device = projection.device_of(x)
    return 132 if device is None else device.multiprocessors


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
    tile = tile or Tile.of(
        rows, inputs, outputs, taps, processors=_processors(x), wide=x.element_size() > 2, shared=counts is not None
    )
    tiles = _tiles(rows, outputs, tile.rows, tile.outputs)
    partial = bias
    if tile.splits > 1:
        assert counts is not None, "programs that share a tile must count themselves"
        assert tiles <= len(counts), f"{tiles} tiles are more than can be shared"
        partial = torch.empty(tile.splits * rows * outputs, device=x.device, dtype=torch.float32)
    act = SNAKE if alpha is not None else GELU if gelu else NONE
    conv_kernel[tiles, tile.splits](
        x, weight, bias, _or(alpha, bias), _or(residual, x), _or(raw, x), _or(ahead, x), partial, _or(counts, bias),
        rows, steps, taps, dilation, x.stride(0), *(0 if each is None else each.stride(0) for each in (residual, raw, ahead)),
        inputs, outputs, act, residual is not None, raw is not None, ahead is not None,
        tile.splits, tile.rows, tile.outputs, tile.inputs, num_warps=tile.warps, num_stages=tile.stages, **_dependent(x),
    )  # fmt: skip


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
    tile = tile or UnitTile.of(rows, channels, processors=_processors(x), wide=x.element_size() > 2)
    unit_kernel[(-(-rows // tile.rows),)](
        x, weight, bias, alpha, weight_out, bias_out, next_alpha, residual, _or(raw, residual), ahead, rows, steps, taps,
        dilation, x.stride(0), residual.stride(0), _or(raw, residual).stride(0), ahead.stride(0), channels, raw is not None,
        tile.rows, first, second, tile.inputs, num_warps=tile.warps, num_stages=tile.stages, **_dependent(x),
    )  # fmt: skip


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


def load_tails(
    tails: Tensor, halo: Tensor, layout: Tensor, largest: int, slots: Tensor, position: Tensor, now: Tensor
) -> None:  # fmt: skip
    """See `duetts.kernels.load_tails`."""
    block = 2048
    grid = (len(slots), len(layout), -(-largest // block))
    load_tails_kernel[grid](tails, halo, layout, slots, position, now, tails.shape[1], block, num_warps=8, **_dependent(tails))


def store_tails(
    tails: Tensor, halo: Tensor, layout: Tensor, largest: int, slots: Tensor, position: Tensor, now: Tensor, frames: int
) -> None:  # fmt: skip
    """See `duetts.kernels.store_tails`."""
    block = 2048
    grid = (len(slots), len(layout), -(-largest // block))
    store_tails_kernel[grid](
        tails, halo, layout, slots, position, now, tails.shape[1], frames, block, num_warps=8, **_dependent(tails)
    )


def pcm16(wave: Tensor) -> Tensor:
    """See `duetts.kernels.pcm16`."""
    streams, length = wave.shape
    samples = torch.empty(streams, length + 1, device=wave.device, dtype=torch.int16)
    pcm_kernel[(streams,)](wave, samples, length, 2048, num_warps=8, **_dependent(wave))
    return samples
