"""Streaming decode equals whole-signal decode, whatever the chunks and whoever else is in the batch."""

import numpy as np
import pytest
import torch
from torch import Tensor

from duetts.checkpoint import randomise_codec
from duetts.model_config import CodecConfig
from duetts.models.codec import Codec

from ..dimensions import CODEC

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def codec() -> Codec:
    codec = Codec(CodecConfig.from_dict(CODEC)).eval().requires_grad_(False)
    randomise_codec(codec, torch.Generator().manual_seed(1))
    return codec


def random_codes(frames: int, seed: int, rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 32, (rows, 4, frames), generator=generator)


def split(frames: int, sizes: list[int]) -> list[tuple[int, int]]:
    """Ranges of repeating sizes over a number of frames, the last one cut."""
    ranges, start, turn = [], 0, 0
    while start < frames:
        end = min(frames, start + sizes[turn % len(sizes)])
        ranges.append((start, end))
        start, turn = end, turn + 1
    return ranges


@pytest.mark.parametrize("sizes", [[1], [2], [5], [8], [1, 8, 2, 5, 3], [40]], ids=str)
def test_chunks_of_any_size_equal_the_whole(codec: Codec, sizes: list[int]) -> None:
    codes = random_codes(40, seed=2)  # longer than the window of 16, so that it slides
    whole = codec.decode(codes)
    assert whole.std() > 0.1
    view = codec.new_state(1).view([0])
    parts = [codec.decode(codes[..., start:end], view) for start, end in split(40, sizes)]
    assert (torch.cat(parts, dim=-1) - whole).abs().max() <= TOLERANCE


def test_streams_that_start_pause_and_end_at_different_times(codec: Codec) -> None:
    lengths = {"a": 21, "b": 9, "c": 30, "d": 14}
    codes = {name: random_codes(length, seed=index) for index, (name, length) in enumerate(lengths.items())}
    whole = {name: codec.decode(value)[0] for name, value in codes.items()}
    state = codec.new_state(3)
    slots: dict[str, int] = {}
    free, done = [0, 1, 2], dict.fromkeys(lengths, 0)
    parts: dict[str, list[Tensor]] = {name: [] for name in lengths}
    arrivals = {0: ["a"], 2: ["b", "c"]}
    rng = np.random.default_rng(0)
    for turn in range(200):
        for name in arrivals.get(turn, []):
            slots[name] = free.pop()
            state.reset(slots[name])
        if free and turn > 2 and "d" not in slots and not done["d"]:  # it takes over a slot, dirty as it was left
            slots["d"] = free.pop()
            state.reset(slots["d"])
        awake = [name for name in slots if rng.random() < 0.7]
        size = min([int(rng.integers(1, 4)), *(lengths[name] - done[name] for name in awake)])
        if awake:
            chunk = torch.cat([codes[name][..., done[name] : done[name] + size] for name in awake])
            for name, wave in zip(awake, codec.decode(chunk, state.view([slots[name] for name in awake])), strict=True):
                parts[name].append(wave)
                done[name] += size
        for name in [name for name in slots if done[name] == lengths[name]]:
            free.append(slots.pop(name))
        if all(done[name] == length for name, length in lengths.items()):
            break
    for name, expected in whole.items():
        assert (torch.cat(parts[name], dim=-1) - expected).abs().max() <= TOLERANCE, name


def test_a_prefix_decodes_to_the_same_samples(codec: Codec) -> None:
    codes = random_codes(24, seed=5)
    assert (codec.decode(codes[..., :7]) - codec.decode(codes)[..., : 7 * 2048]).abs().max() <= TOLERANCE


def test_padding_a_row_does_not_change_it(codec: Codec) -> None:
    codes = random_codes(12, seed=6, rows=2)
    padded = codes.clone()
    padded[0, :, 5:] = 0
    together = codec.decode(padded)
    assert (together[0, : 5 * 2048] - codec.decode(codes[:1, :, :5])[0]).abs().max() <= TOLERANCE
    assert (together[1] - codec.decode(codes[1:])[0]).abs().max() <= TOLERANCE


def test_encode_pads_to_whole_frames(codec: Codec) -> None:
    wave = torch.randn(1, 2048 * 2 + 1, generator=torch.Generator().manual_seed(3))
    codes = codec.encode(wave)
    assert codes.shape == (1, 4, 3)
    assert torch.equal(codes[:, :, :2], codec.encode(wave[:, :4096]))
    assert codes[:, 0].max() < 64
    assert codes[:, 1:].max() < 32
