"""Triton kernels of the codec decoder in the interpreter, against their torch twins: float32, small and odd shapes."""

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.codec import TINY

from duetts import kernels
from duetts.checkpoint import randomise_codec
from duetts.kernels import codec, codec_reference
from duetts.kernels.codec import Tile, UnitTile
from duetts.model_config import CodecConfig
from duetts.models.codec import Codec
from duetts.models.stream_decoder import StreamDecoder

# The interpreter is numpy's, which tells of every infinite product and padded row.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
COUNTS = 1024


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def alphas(channels: int, seed: int = 0) -> Tensor:
    alpha = normal(channels, seed=seed).abs() + 0.1
    return torch.stack((alpha, 1 / alpha))


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> bool:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    return bool((found.double() - expected.double()).abs().max() <= tolerance * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize(
    ("streams", "steps", "inputs", "outputs", "taps", "dilation", "tile"),
    [
        (3, 5, 8, 6, 7, 1, None),
        (2, 9, 20, 36, 7, 3, Tile(16, 16, 16)),
        (1, 1, 16, 32, 2, 1, Tile(16, 32, 16)),
        (2, 6, 32, 24, 7, 9, Tile(16, 16, 16, splits=5, near=True)),
        (3, 7, 48, 20, 1, 1, Tile(32, 16, 16, splits=3)),
        (2, 3, 16, 136, 1, 1, Tile(16, 128, 16)),
    ],
)
@pytest.mark.parametrize("form", ["snake", "gelu", "residual", "plain"])
def test_conv(
    form: str, streams: int, steps: int, inputs: int, outputs: int, taps: int, dilation: int, tile: Tile | None
) -> None:
    past = (taps - 1) * dilation
    x = normal(streams, past + steps, inputs)
    weight, bias = normal(taps * inputs, outputs) / inputs, normal(outputs)
    counts = torch.zeros(COUNTS, dtype=torch.int32)
    options: dict[str, object] = {"taps": taps, "dilation": dilation, "gelu": form == "gelu"}
    if form == "snake":
        options["alpha"] = alphas(outputs)
    made = []
    for kernel, extra in ((codec_reference.conv, {}), (codec.conv, {"tile": tile, "counts": counts})):
        behind = normal(streams, 4 + steps, outputs, seed=1)  # `ahead` lies behind a past, which nobody may touch
        residual = normal(streams, steps, outputs, seed=2)
        raw = residual if form == "residual" else torch.zeros(streams, steps, outputs)
        kernel(
            x, weight, bias, raw=raw if form != "gelu" else None, ahead=behind[:, 4:] if form != "plain" else None,
            residual=residual if form == "residual" else None, **options, **extra,
        )  # fmt: skip
        made.append((behind, raw))
    assert all(close(found, expected) for found, expected in zip(made[1], made[0], strict=True))
    assert not counts.any()


def test_a_transposed_convolution_writes_all_its_phases_in_order() -> None:
    x, weight, bias = normal(2, 4, 16), normal(32, 3 * 8), normal(24)
    ahead = torch.zeros(2, 9 + 2, 8)
    codec.conv(x, weight, bias, taps=2, ahead=ahead[:, 2:])
    expected = x[:, :-1] @ weight[:16] + x[:, 1:] @ weight[16:] + bias
    assert close(ahead[:, 2:], expected.view(2, 9, 8))
    assert not ahead[:, :2].any()


@pytest.mark.parametrize(
    ("channels", "streams", "steps", "dilation", "tile"),
    [
        (48, 2, 9, 3, None),
        (32, 1, 17, 1, UnitTile(16, 16, 4, 2, True)),
        (24, 2, 5, 9, None),
        (96, 1, 3, 9, UnitTile(16, 32, 4, 2)),
    ],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_residual_unit(channels: int, streams: int, steps: int, dilation: int, tile: UnitTile | None, is_last: bool) -> None:
    weights = [normal(7 * channels, channels) / channels, normal(channels), alphas(channels)]
    weights += [normal(channels, channels, seed=1) / channels, normal(channels, seed=1)]
    x = normal(streams, 6 * dilation + steps, channels)
    made = []
    for kernel, extra in ((codec_reference.residual_unit, {}), (codec.residual_unit, {"tile": tile})):
        residual = normal(streams, steps, channels, seed=3)
        behind = normal(streams, 5 + steps, channels, seed=1)
        kernel(
            x, *weights, dilation=dilation, residual=residual, raw=None if is_last else residual,
            next_alpha=alphas(channels, seed=5), ahead=behind[:, 5:], **extra,
        )  # fmt: skip
        made.append((behind, residual))
    assert all(close(found, expected) for found, expected in zip(made[1], made[0], strict=True))


def test_snake_of_large_values_and_of_what_is_not_finite() -> None:
    x = torch.tensor([0.0, -3.0, 40.0, 900.0, torch.inf, torch.nan])[None, :, None].expand(1, 6, 16).contiguous()
    alpha = torch.tensor([[1.7], [1 / 1.7]]).expand(2, 16).contiguous()
    made = []
    for kernel in (codec_reference.conv, codec.conv):
        made.append(torch.zeros(1, 6, 16))
        kernel(torch.zeros(1, 6, 16), torch.eye(16), torch.zeros(16), residual=x, alpha=alpha, ahead=made[-1])
    assert not made[1][0, 4:].isfinite().any()
    assert (made[1][0, :4] - made[0][0, :4]).abs().max() < 1e-3  # the angle itself is only known to 1e-4 at 1,500


@pytest.mark.parametrize(("streams", "steps", "channels"), [(2, 5, 24), (1, 70, 3)])
def test_last_conv(streams: int, steps: int, channels: int) -> None:
    x, weight, bias = normal(streams, 6 + steps, channels) * 2, normal(7, channels), normal(1)
    x[0, -1] = 1e5  # far in tanh's saturation
    assert close(codec.last_conv(x, weight, bias), codec_reference.last_conv(x, weight, bias))


def test_depthwise_norm() -> None:
    x = normal(3, 6 + 3, 20)
    weights = [normal(7, 20), *(normal(20, seed=seed) for seed in range(3))]
    assert close(codec.depthwise_norm(x, *weights, 1e-6), codec_reference.depthwise_norm(x, *weights, 1e-6))


def test_embed_codes() -> None:
    starts = torch.tensor([0, 9, 14, 19])
    codes = torch.randint(0, 12, (2, 3, 5), generator=torch.Generator().manual_seed(0))  # residual books have 5 rows
    table = normal(19, 12)
    assert close(codec.embed_codes(codes, table, starts), codec_reference.embed_codes(codes, table, starts))


@pytest.mark.parametrize("frames", [1, 3, 5])
def test_window_attention(frames: int) -> None:
    heads, dim, window, ring = 2, 16, 12, 12 - 1 + 5
    rope = normal(40, dim // 2, 2)  # positions go round it
    slots, now = torch.tensor([3, 0, 2]), torch.tensor([0, 7, 85])
    qkv = normal(3, frames, 3 * heads * dim)
    made = []
    for kernel in (codec_reference.window_attention, codec.window_attention):
        keys, values = normal(5, heads, ring, dim, seed=1), normal(5, heads, ring, dim, seed=2)
        for memory in (keys, values):
            memory[3] = torch.nan  # its new stream has not begun
            memory[0, :, 7:] = torch.inf
        out = kernel(qkv, rope, now, slots, keys, values, window)
        made.append([out, keys[[1, 2, 4]], values[[1, 2, 4]], keys[3, :, :frames], values[0, :, :7]])
        made[-1].append(values[0, :, [(7 + frame) % ring for frame in range(frames)]])
    assert all(each.isfinite().all() for each in made[1])
    assert all(close(found, expected) for found, expected in zip(made[1], made[0], strict=True))


def test_tails_come_and_go() -> None:
    looks, streams, steps = [(6, 24), (54, 48), (1, 5)], 2, 3  # pasts longer and shorter than what is new, one of two pieces
    rows, base = [], 0
    for past, channels in looks:
        stride, kept = (past + steps) * channels, past * channels
        for begin in range(0, kept, 2048):
            offset, count = sum(row[4] for row in rows), min(2048, kept - begin)
            rows.append((offset, base + begin, base + stride - kept + begin, stride, count))
        base += streams * stride
    layout, width = torch.tensor(rows), sum(row[4] for row in rows)
    assert len(rows) == 4
    slots = torch.tensor([2, 0])
    made = []
    for room in (codec_reference, codec):
        tails, position, now = normal(4, width), torch.tensor([0, 5, 9, 1]), torch.zeros(2, dtype=torch.int64)
        tails[0] = torch.nan  # of a stream that has not begun
        halo = normal(base, seed=1)
        room.load_tails(tails, halo, layout, slots, position, now)
        loaded = halo.clone()
        room.store_tails(tails, halo, layout, slots, position, now, 7)
        made.append((loaded, now, tails, position))
    assert made[1][3].tolist() == [7, 5, 16, 1]
    assert all(close(found, expected, 0) for found, expected in zip(made[1], made[0], strict=True))


def test_pcm16() -> None:
    wave = normal(3, 2500)
    wave[0, 2100] = torch.inf
    wave[2, 3] = torch.nan
    found, expected = codec.pcm16(wave), codec_reference.pcm16(wave)
    assert expected[:, -1].tolist() == [0, 1, 0]
    assert torch.equal(found, expected)
    assert found[1].max() == 32767
    assert not found[::2].any()


def test_the_whole_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels in a row, on a codec of 16 samples a frame, 48 channels in its first stage and 24 in its second."""
    own = Codec(CodecConfig.from_dict(TINY)).eval().requires_grad_(False)
    randomise_codec(own, torch.Generator().manual_seed(1))
    decoder = StreamDecoder(own, torch.float32)
    monkeypatch.setattr(kernels, "_codec", lambda x: codec)
    codes = torch.randint(0, 8, (1, 3, 3), generator=torch.Generator().manual_seed(2))
    whole = own.decode(codes)
    assert whole.std() > 0.01
    state, parts = decoder.new_state(3), []
    for begin, end in ((0, 2), (2, 3)):
        padded = codes.repeat(2, 1, 1)[..., begin:end]
        parts.append(decoder.decode(padded, torch.tensor([2, state.scratch]), state)[:1])
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-4


def test_every_program_of_a_shared_tile_has_work_and_counts_have_room() -> None:
    for inputs, outputs, taps in (
        (1024, 2048, 1),
        (4096, 1024, 1),
        (1024, 1536, 7),
        (768, 768, 7),
        (384, 768, 2),
        (192, 192, 2),
    ):
        for rows in (1, 2, 4, 31, 32, 100, 256, 2048, 10_000, 300_000):
            tile = codec.choose_tile(rows, inputs, outputs, taps, 2, codec.Card(132, 227 * 1024), True)
            small = codec.choose_tile(rows, inputs, outputs, taps, 2, codec.Card(58, 99 * 1024), False)
            assert 2 * small.stages * small.inputs * (small.rows + small.outputs) <= 99 * 1024
            assert small.splits == 1
            blocks, tiles = taps * inputs // tile.inputs, codec._tiles(rows, outputs, tile.rows, tile.outputs)
            share = -(-blocks // tile.splits)
            assert share * (tile.splits - 1) < blocks
            assert tile.splits == 1 or (tiles <= COUNTS and tiles * tile.splits <= 132)
            assert rows > 64 or tile.rows <= 64


def test_blocks_of_64_rows_have_64_outputs() -> None:
    card = codec.Card(132, 227 * 1024)
    for channels, exponent in itertools.product((64, 96, 128, 192), range(18)):
        unit = codec.choose_unit_tile(2**exponent, channels, 7, 2, card)
        assert codec.multiplies(unit.rows, min(codec._halves(channels))), (channels, unit)
    for inputs, outputs, exponent in itertools.product((16, 96, 192, 768), (16, 96, 192, 768), range(18)):
        tile = codec.choose_tile(2**exponent, inputs, outputs, 7, 2, card, True)
        assert codec.multiplies(tile.rows, tile.outputs), (inputs, outputs, tile)
