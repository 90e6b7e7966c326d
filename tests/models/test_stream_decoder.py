"""The fast decoder's program, with twins for kernels: the samples of `Codec.decode`, whatever the chunks and the company."""

import numpy as np
import pytest
import torch
from torch import Tensor

from duetts.checkpoint import randomise_codec
from duetts.model_config import CodecConfig
from duetts.models.codec import Codec
from duetts.models.stream_decoder import MAX_FRAMES, StreamDecoder

from ..dimensions import CODEC

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def codec() -> Codec:
    codec = Codec(CodecConfig.from_dict(CODEC)).eval().requires_grad_(False)
    randomise_codec(codec, torch.Generator().manual_seed(1))
    for (
        name,
        parameter,
    ) in codec.named_parameters():  # frequencies, gains and biases that would hide each other's faults if alike
        if name.endswith(("alpha", "gamma", "bias")):
            parameter.data.uniform_(0.3, 1.5, generator=torch.Generator().manual_seed(len(name)))
            parameter.data *= 0.1 if name.endswith("bias") else 1.0
    return codec


@pytest.fixture(scope="module")
def decoder(codec: Codec) -> StreamDecoder:
    return StreamDecoder(codec, torch.float32)


def random_codes(frames: int, seed: int, rows: int = 1) -> Tensor:
    return torch.randint(0, 40, (rows, 4, frames), generator=torch.Generator().manual_seed(seed))  # residual books have 32


@pytest.mark.parametrize("sizes", [[1], [2], [5], [8], [16], [1, 8, 2, 5, 3]], ids=str)
def test_chunks_of_any_size_equal_the_whole(codec: Codec, decoder: StreamDecoder, sizes: list[int]) -> None:
    codes = random_codes(40, seed=2)  # longer than the window of 16 and its ring, so that both go round
    whole = codec.decode(codes)
    assert whole.std() > 0.1
    state, slots, parts = decoder.new_state(2), torch.tensor([1]), []
    while (done := sum(part.shape[1] for part in parts) // decoder.frame_length) < 40:
        parts.append(decoder.decode(codes[..., done : done + sizes[len(parts) % len(sizes)]], slots, state))
    wave = torch.cat(parts, dim=-1)
    assert wave.dtype == torch.float32
    assert (wave - whole).abs().max() <= TOLERANCE


def test_streams_that_start_pause_and_end_at_different_times(codec: Codec, decoder: StreamDecoder) -> None:
    lengths = [21, 9, 30, 14, 5, 26]
    codes = [random_codes(length, seed=index) for index, length in enumerate(lengths)]
    state = decoder.new_state(3)
    for each in (state.tails, state.keys, state.values):
        each.fill_(torch.nan)  # what was in a slot before is nobody's business
    free, slot_of, waiting = [0, 1, 2], dict[int, int](), list(range(len(lengths)))
    parts: list[list[Tensor]] = [[] for _ in lengths]
    rng = np.random.default_rng(0)
    while waiting or slot_of:
        while free and waiting:
            index = waiting.pop(0)
            slot_of[index] = free.pop(0)
            state.reset(torch.tensor([slot_of[index]]))
        awake = [index for index in slot_of if rng.random() < 0.7]
        left = [lengths[index] - sum(part.shape[0] for part in parts[index]) // 2048 for index in awake]
        size = min([int(rng.choice([1, 2, 5])), *left])
        if not awake:
            continue
        chunk = torch.cat(
            [codes[index][..., lengths[index] - rest :][..., :size] for index, rest in zip(awake, left, strict=True)]
        )
        padded = torch.cat((chunk, torch.zeros_like(chunk[:1]), torch.zeros_like(chunk[:1])))
        slots = torch.tensor([*(slot_of[index] for index in awake), state.scratch, state.scratch])
        for index, wave in zip(awake, decoder.decode(padded, slots, state), strict=False):
            parts[index].append(wave)
        for index, rest in zip(awake, left, strict=True):
            if rest == size:
                free.append(slot_of.pop(index))
    for index, length in enumerate(lengths):
        wave = torch.cat(parts[index])
        assert len(wave) == length * 2048
        assert (wave - codec.decode(codes[index])[0]).abs().max() <= TOLERANCE


def test_a_stream_that_is_not_finite_is_lost_alone(codec: Codec, decoder: StreamDecoder) -> None:
    codes = random_codes(6, seed=7, rows=2)
    state, slots = decoder.new_state(2), torch.tensor([1, 0])
    decoder.decode(codes[..., :3], slots, state)
    for each in (state.tails, *state.keys, *state.values):
        each[0] = torch.inf
    wave = decoder.decode(codes[..., 3:], slots, state)
    assert not wave[1].isfinite().all()
    assert (wave[0] - codec.decode(codes)[0, 3 * 2048 :]).abs().max() <= TOLERANCE
    state.reset(torch.tensor([0]))
    assert (decoder.decode(codes[1:], torch.tensor([0]), state) - codec.decode(codes[1:])).abs().max() <= TOLERANCE


def test_a_call_has_a_largest_size(decoder: StreamDecoder) -> None:
    with pytest.raises(AssertionError, match="16 frames"):
        decoder.decode(random_codes(MAX_FRAMES + 1, seed=0), torch.tensor([0]), decoder.new_state(1))
