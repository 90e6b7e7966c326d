"""The codec decoder on a GPU: kernels against twins at S2 Pro's shapes, the whole program in float16 against `Codec.decode` in
float32, streamed against whole, and recorded against eager."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from duetts import kernels
from duetts.checkpoint import randomise_codec
from duetts.engine.vocoder import GraphedVocoder
from duetts.kernels import codec_reference
from duetts.model_config import CodecConfig
from duetts.models.codec import Codec
from duetts.models.stream_decoder import StreamDecoder

pytestmark = pytest.mark.gpu

HALF, CUDA = torch.float16, torch.device("cuda")
# Root mean square of the error over that of the samples. The twins, which round where the kernels do, have 1.5e-3 in float16
# and 1.5e-6 in float32 with S2 Pro's dimensions and random weights (measured on a CPU, 12 frames).
HALF_ERROR = 4e-3
SINGLE_ERROR = 3e-5
TILE_ERROR = 4e-3  # of one kernel in float16, beside the largest value


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Full float32 products for the twins, no gradients."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def codec() -> Codec:
    with CUDA:
        codec = Codec(CodecConfig()).eval().requires_grad_(False)
    randomise_codec(codec, torch.Generator(CUDA).manual_seed(1))
    return codec


def normal(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed + sum(shape))
    return torch.randn(shape, device=CUDA, generator=generator).to(dtype)


def alphas(channels: int) -> Tensor:
    alpha = normal(channels, dtype=torch.float32).abs() + 0.1
    return torch.stack((alpha, 1 / alpha))


def assert_close(found: Tensor, expected: Tensor, tolerance: float = TILE_ERROR) -> None:
    worst = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert worst <= tolerance, f"off by {worst:.1e} of the largest value"


# Inputs, outputs, taps, dilation of every product, and rows from one stream's frame to 256 frames of many.
PRODUCTS = [(1024, 4096, 1, 1), (4096, 1024, 1, 1), (1024, 1536, 7, 1), (1536, 6144, 2, 1), (768, 768, 7, 9), (768, 768, 1, 1)]
PRODUCTS += [(768, 3072, 2, 1), (384, 384, 7, 3), (384, 768, 2, 1), (192, 192, 2, 1)]


@pytest.mark.parametrize("steps", [1, 4, 32, 33, 500, 4100])
@pytest.mark.parametrize(("inputs", "outputs", "taps", "dilation"), PRODUCTS)
@pytest.mark.parametrize("form", ["snake", "residual"])
def test_conv(form: str, inputs: int, outputs: int, taps: int, dilation: int, steps: int) -> None:
    streams, past = 3, (taps - 1) * dilation
    x = normal(streams, past + steps, inputs)
    weight, bias = normal(taps * inputs, outputs) / (taps * inputs) ** 0.5, normal(outputs, dtype=torch.float32)
    counts, made = torch.zeros(1024, device=CUDA, dtype=torch.int32), []
    for kernel in (codec_reference.conv, kernels.conv):
        residual, ahead = normal(streams, steps, outputs, seed=1), normal(streams, 6 + steps, outputs, seed=2)
        extra = {"residual": residual, "raw": residual} if form == "residual" else {}
        kernel(x, weight, bias, taps=taps, dilation=dilation, alpha=alphas(outputs), ahead=ahead[:, 6:], counts=counts, **extra)
        made.append((ahead, residual))
    for expected, found in zip(*made, strict=True):
        assert_close(found, expected)
    assert not counts.any()


@pytest.mark.parametrize("steps", [1, 30, 700, 3000, 12000])
@pytest.mark.parametrize(("channels", "dilation"), [(768, 3), (192, 1), (192, 9), (96, 3), (96, 9)])
def test_residual_unit(channels: int, dilation: int, steps: int) -> None:
    streams, made = 2, []
    weights = [normal(7 * channels, channels) / (7 * channels) ** 0.5, normal(channels, dtype=torch.float32), alphas(channels)]
    weights += [normal(channels, channels) / channels**0.5, normal(channels, dtype=torch.float32, seed=1)]
    x = normal(streams, 6 * dilation + steps, channels)
    for kernel in (codec_reference.residual_unit, kernels.residual_unit):
        residual, ahead = normal(streams, steps, channels, seed=1), normal(streams, 1 + steps, channels, seed=2)
        kernel(
            x, *weights, dilation=dilation, residual=residual, raw=residual, next_alpha=alphas(channels), ahead=ahead[:, 1:],
            counts=torch.zeros(1024, device=CUDA, dtype=torch.int32),
        )  # fmt: skip
        made.append((ahead, residual))
    for expected, found in zip(*made, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("frames", [1, 4, 16])
def test_window_attention(frames: int) -> None:
    heads, dim, window, ring, now = 16, 64, 128, 143, torch.tensor([0, 60, 1000], device=CUDA)
    slots, rope, made = torch.tensor([3, 0, 2], device=CUDA), normal(2048, dim // 2, 2, dtype=torch.float32), []
    for kernel in (codec_reference.window_attention, kernels.window_attention):
        keys, values = normal(5, heads, ring, dim, seed=1), normal(5, heads, ring, dim, seed=2)
        keys[3], values[3] = torch.nan, torch.inf
        out = kernel(normal(3, frames, 3 * heads * dim), rope, now, slots, keys, values, window)
        made.append((out, keys[[0, 2]], values[[0, 2]], values[3, :, :frames]))
    for expected, found in zip(*made, strict=True):
        assert_close(found, expected)


def test_small_kernels(codec: Codec) -> None:
    x, weight = normal(3, 6 + 9, 1024), normal(7, 1024, dtype=torch.float32)
    bias, gain, shift = (normal(1024, dtype=torch.float32, seed=seed) for seed in range(3))
    assert_close(
        kernels.depthwise_norm(x, weight, bias, gain, shift, 1e-6),
        codec_reference.depthwise_norm(x, weight, bias, gain, shift, 1e-6),
    )
    x, weight, bias = normal(3, 6 + 4096, 96), normal(7, 96, dtype=torch.float32) / 20, normal(1, dtype=torch.float32)
    wave = kernels.last_conv(x, weight, bias)
    assert_close(wave, codec_reference.last_conv(x, weight, bias), 1e-5)
    wave[1, 7] = torch.nan
    assert torch.equal(kernels.pcm16(wave), codec_reference.pcm16(wave))
    table, starts = normal(300, 1024), torch.tensor([0, 200, 260, 300], device=CUDA)
    codes = torch.randint(0, 210, (3, 3, 5), device=CUDA, generator=torch.Generator(CUDA).manual_seed(0))
    assert_close(kernels.embed_codes(codes, table, starts), codec_reference.embed_codes(codes, table, starts))


def random_codes(streams: int, frames: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 1024, (streams, 10, frames), device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def stream(decoder: StreamDecoder, codes: Tensor, sizes: list[int]) -> Tensor:
    state, parts, done = decoder.new_state(len(codes)), [], 0
    slots = torch.arange(len(codes), device=CUDA).flip(0)
    while done < codes.shape[2]:
        size = min(sizes[len(parts) % len(sizes)], codes.shape[2] - done)
        parts.append(decoder.decode(codes[..., done : done + size], slots, state))
        done += size
    assert not decoder._counts.any()
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, SINGLE_ERROR), (HALF, HALF_ERROR)])
@pytest.mark.parametrize("sizes", [[16], [1], [1, 2, 5, 8, 16]], ids=str)
def test_streams_equal_the_whole_in_float32(codec: Codec, dtype: torch.dtype, tolerance: float, sizes: list[int]) -> None:
    codes = random_codes(3, 160)  # beyond the window of 128
    whole = torch.cat([codec.decode(one[None]) for one in codes])
    assert whole.std() > 0.01
    found = error(stream(StreamDecoder(codec, dtype), codes, sizes), whole)
    print(f"{dtype}, chunks {sizes}: relative error {found:.1e}")
    assert found <= tolerance


def test_largest_values_leave_room_in_float16(codec: Codec) -> None:
    wave = stream(StreamDecoder(codec, HALF), random_codes(8, 32), [16])
    assert wave.isfinite().all()


def test_recordings_equal_eager_calls_and_lose_only_what_is_not_finite(codec: Codec) -> None:
    """A call of 5 frames of 3 streams is a replay of 4 x 4 and one of 4 x 1, padded with a scratch stream."""
    decoder = StreamDecoder(codec, HALF)
    own, state = GraphedVocoder(decoder, slots=5, streams=(1, 2, 4), frames=(1, 4), most=16), decoder.new_state(5)
    own.prepare(60.0)
    slots, codes = torch.tensor([4, 0, 2, state.scratch], device=CUDA), random_codes(4, 15)
    codes[3] = 0
    for begin in range(0, 15, 5):
        part = codes[..., begin : begin + 5]
        eager = [kernels.pcm16(decoder.decode(piece.contiguous(), slots, state)) for piece in (part[..., :4], part[..., 4:])]
        call = own.start([4, 0, 2], part[:3].to(torch.int32).cpu().numpy(), keep=True)
        sounds = call.result()
        assert call.ready()
        assert call.seconds is not None
        assert call.seconds > 0
        expected = torch.cat([each[:, :-1] for each in eager], dim=1)[:3].cpu().numpy()
        for row, (found, sound) in enumerate(zip(sounds, expected, strict=True)):
            lost = begin == 10 and row == 1
            assert (found is None) == lost
            assert lost or np.array_equal(np.frombuffer(found or b"", "<i2"), sound)
        if begin == 5:
            own._state.tails[0] = torch.nan
    assert not decoder._counts.any()
