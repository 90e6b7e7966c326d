"""The codec behind the engine: streams in slots, of which one may be lost without the others."""

import numpy as np
import torch

from duetts.checkpoint import randomise_codec
from duetts.engine.vocoder import CodecVocoder, to_pcm
from duetts.model_config import CodecConfig
from duetts.models.codec import Codec

from ..dimensions import CODEC


def vocoder(slots: int) -> CodecVocoder:
    codec = Codec(CodecConfig.from_dict(CODEC)).eval().requires_grad_(False)
    randomise_codec(codec, torch.Generator().manual_seed(1))
    return CodecVocoder(codec, slots=slots, quantum=None)


def test_a_stream_with_numbers_that_are_not_finite_is_lost_alone_and_its_slot_serves_again() -> None:
    own = vocoder(3)
    codes = np.random.default_rng(0).integers(0, 32, (2, 4, 3)).astype(np.int32)
    for slot in (0, 2):
        own.reset(slot)
    expected = own.decode([2, 0], codes, keep=False)
    assert all(pcm is not None and len(pcm) == 3 * 2048 * 2 for pcm in expected)
    for tail in own._state.tails:
        tail[0] = torch.nan
    found = own.decode([2, 0], codes, keep=True)
    assert found[0] == expected[0]
    assert found[1] is None
    own.reset(0)
    own.reset(2)
    assert own.decode([2, 0], codes, keep=True) == expected


def test_full_scale_is_clipped() -> None:
    wave = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0])
    assert np.frombuffer(to_pcm(wave), "<i2").tolist() == [-32768, -32768, 0, 16384, 32767, 32767]
