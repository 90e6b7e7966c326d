"""Encoding in blocks, each going on from where the last left off, equals encoding the whole signal."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from duetts.checkpoint import randomise_codec
from duetts.model_config import CodecConfig
from duetts.models.codec import Codec
from duetts.models.codec_state import StreamView

from ..dimensions import CODEC

FRAME = 2048
TOLERANCE = 1e-4


def make_codec(dtype: torch.dtype, seed: int = 1, **changes: object) -> Codec:
    codec = Codec(CodecConfig.from_dict({**CODEC, **changes})).eval().requires_grad_(False)
    randomise_codec(codec, torch.Generator().manual_seed(seed))
    return codec.to(dtype)


SINGLE, DOUBLE = make_codec(torch.float32), make_codec(torch.float64)


def signal(samples: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(1, samples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def whole(codec: Codec, wave: Tensor) -> Tensor:
    return codec.latents(F.pad(wave, (0, -wave.shape[-1] % FRAME)))


def in_blocks(codec: Codec, wave: Tensor, frames: int, view: StreamView) -> Tensor:
    """Latents of a signal in blocks of `frames`, the last one padded with zeros and all cut to the signal's frames."""
    padded = F.pad(wave, (0, -wave.shape[-1] % (frames * FRAME)))
    blocks = [codec.latents(block, view) for block in padded.split(frames * FRAME, dim=-1)]
    return torch.cat(blocks, dim=-1)[..., : -(-wave.shape[-1] // FRAME)]


def fresh(codec: Codec) -> StreamView:
    return codec.new_encoder_state(1).view([0])


# The tiny codec's windows hold 16 frames, so the last two lengths slide past them.
LENGTHS = [1, FRAME - 1, FRAME, FRAME + 1, 4 * FRAME - 1, 4 * FRAME, 4 * FRAME + 1, 20 * FRAME + 5, 40 * FRAME]


@pytest.mark.parametrize(
    ("samples", "frames"), [*((samples, 4) for samples in LENGTHS), (1, 1), (FRAME + 1, 1), (18 * FRAME, 1), (33 * FRAME, 16)]
)
@torch.inference_mode()
def test_blocks_equal_the_whole(samples: int, frames: int) -> None:
    expected = whole(SINGLE, signal(samples, torch.float32))
    assert expected.shape[-1] == -(-samples // FRAME)
    assert (in_blocks(SINGLE, signal(samples, torch.float32), frames, fresh(SINGLE)) - expected).abs().max() <= TOLERANCE
    wave = signal(samples, torch.float64)
    codes = DOUBLE.quantizer.search(in_blocks(DOUBLE, wave, frames, fresh(DOUBLE)))
    assert torch.equal(codes, DOUBLE.encode(wave))


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), missing=st.integers(0, FRAME - 1), seed=st.integers(0, 99))
@torch.inference_mode()
def test_blocks_of_any_sizes_equal_the_whole(sizes: list[int], missing: int, seed: int) -> None:
    wave = signal(sum(sizes) * FRAME - missing, torch.float64, seed)
    view = fresh(DOUBLE)
    padded = F.pad(wave, (0, missing)).split([size * FRAME for size in sizes], dim=-1)
    latents = torch.cat([DOUBLE.latents(block, view) for block in padded], dim=-1)
    assert (latents - whole(DOUBLE, wave)).abs().max() <= 1e-10
    assert torch.equal(DOUBLE.quantizer.search(latents), DOUBLE.encode(wave))


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder_transformer_layers": [0, 1, 0, 2], "encoder_transformer_head_dim": 4},
        {"encoder_rates": [4, 2, 8, 8], "downsample_factor": [4], "decoder_rates": [8, 8, 2, 4]},
    ],
    ids=["transformers at two rates", "other strides"],
)
@torch.inference_mode()
def test_other_dimensions(changes: dict[str, object]) -> None:
    codec = make_codec(torch.float64, **changes)
    wave = signal(23 * FRAME + 9, torch.float64)
    assert (in_blocks(codec, wave, 5, fresh(codec)) - whole(codec, wave)).abs().max() <= 1e-10


@torch.inference_mode()
def test_slots_are_streams_of_their_own_and_clean_after_a_reset() -> None:
    state = DOUBLE.new_encoder_state(3)
    lengths = {0: 6, 1: 9, 2: 12}
    waves = {slot: signal(frames * FRAME, torch.float64, slot) for slot, frames in lengths.items()}
    parts: dict[int, list[Tensor]] = {slot: [] for slot in lengths}
    for turn in range(4):  # three streams, one block each in turn, until each is complete
        for slot, wave in waves.items():
            block = wave[:, turn * 3 * FRAME : (turn + 1) * 3 * FRAME]
            if block.shape[-1]:
                parts[slot].append(DOUBLE.latents(block, state.view([slot])))
    for slot, wave in waves.items():
        assert (torch.cat(parts[slot], dim=-1) - whole(DOUBLE, wave)).abs().max() <= 1e-10
    state.reset(1)
    again = in_blocks(DOUBLE, waves[2], 4, state.view([1]))
    assert (again - whole(DOUBLE, waves[2])).abs().max() <= 1e-10


@torch.inference_mode()
def test_several_streams_in_one_call() -> None:
    state = DOUBLE.new_encoder_state(3)
    waves = [signal(8 * FRAME, torch.float64, seed) for seed in (1, 2)]
    first = DOUBLE.latents(waves[0][:, : 3 * FRAME], state.view([2]))  # the first is three frames ahead of the second
    both = DOUBLE.latents(torch.cat((waves[0][:, 3 * FRAME :], waves[1][:, : 5 * FRAME])), state.view([2, 0]))
    assert (torch.cat((first, both[:1]), dim=-1) - whole(DOUBLE, waves[0])).abs().max() <= 1e-10
    assert (both[1:] - whole(DOUBLE, waves[1])[..., :5]).abs().max() <= 1e-10


def test_both_directions_have_memories_of_their_own() -> None:
    encoding, decoding = SINGLE.new_encoder_state(1), SINGLE.new_state(1)
    assert len(encoding.windows) == 1 + 1  # the encoder's and the pre-module's
    assert [keys.shape[2] for keys, _ in encoding.windows] == [23, 15]
    assert [keys.shape[2] for keys, _ in decoding.windows] == [15, 15]
    with torch.inference_mode():
        SINGLE.decode(SINGLE.encode(signal(5 * FRAME, torch.float32)), decoding.view([0]))
    assert decoding.position.tolist() == [5]
    assert encoding.position.tolist() == [0]


def test_an_id_is_of_the_encoding_half_to_the_last_bit() -> None:
    ids = {codec.encoding_id() for codec in (SINGLE, DOUBLE, make_codec(torch.float32, seed=2))}
    assert len(ids) == 3
    assert make_codec(torch.float32).encoding_id() == SINGLE.encoding_id()
    quantizer = CODEC["quantizer_transformer"]
    assert make_codec(torch.float32, quantizer_transformer={**quantizer, "window": 17}).encoding_id() not in ids
    changed = make_codec(torch.float32)
    changed.decoder.model[0].conv.weight.add_(1.0)
    changed.quantizer.post_module.norm.weight.add_(1.0)
    assert changed.encoding_id() == SINGLE.encoding_id()
    book = changed.quantizer.quantizer.books[-1].codebook.weight.view(torch.int32)
    book[-1, -1] ^= 1
    assert changed.encoding_id() not in ids
    half = make_codec(torch.bfloat16)
    assert half.encoding_id() not in ids
