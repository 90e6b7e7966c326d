"""The codec's training pass computes what the engine computes, and its files can be read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from training.codec.codes import CodedClip, book_bits, load_codec, read_codes, write_codes
from training.codec.heads import phoneme_loss
from training.codec.model import start_codec
from training.codec.pool import Pool
from training.codec.quantising import Usage, books, quantise
from training.codec.spectra import MEL_WINDOWS, LoudnessDistance, MagnitudeDistance, MelDistance, mel_filters
from training.codec.state import export_codec, read_weights
from training.data.clips import Clip
from training.data.manifest import Row
from training.data.shards import write_shard
from training.data.speakers import DEFAULT
from training.recipe import FRAME, LABEL_HOP

from duetts.models.codec import Codec


@pytest.fixture(scope="module")
def codec() -> Codec:
    torch.manual_seed(0)
    return start_codec().eval()


def test_training_quantises_as_the_engine_does(codec: Codec) -> None:
    z = torch.randn(2, codec.config.latent_dim, 7)
    found = quantise(codec.quantizer, z)
    codes = codec.quantizer.search(z)
    assert torch.equal(torch.stack(found.codes, 1), codes)
    torch.testing.assert_close(found.values, codec.quantizer.value(codes), atol=1e-4, rtol=1e-4)


def test_dropped_books_do_not_count(codec: Codec) -> None:
    z = torch.randn(2, codec.config.latent_dim, 5)
    found = quantise(codec.quantizer, z, torch.tensor([0, 7]))
    torch.testing.assert_close(found.values[0], found.semantic[0])
    assert not torch.allclose(found.values[1], found.semantic[1])


def test_dead_codes_come_back_as_inputs(codec: Codec) -> None:
    quantizer = start_codec().quantizer
    found = quantise(quantizer, torch.randn(8, codec.config.latent_dim, 50))
    usage = Usage(quantizer)
    usage.count(found)
    usage.revive(quantizer, found)
    for book, queries, codes in zip(books(quantizer), found.queries, found.codes, strict=True):
        unused = torch.ones(book.codebook.num_embeddings, dtype=torch.bool)
        unused[codes.unique()] = False
        assert torch.cdist(book.codebook.weight[unused], queries).min(1).values.max() < 1e-2


def test_export_is_what_the_engine_loads(codec: Codec, tmp_path: Path) -> None:
    export_codec(codec, tmp_path)
    loaded = load_codec(tmp_path, torch.device("cpu"))
    codes = torch.randint(0, 512, (1, codec.config.num_codebooks, 3))
    torch.testing.assert_close(loaded.decode(codes), codec.decode(codes), atol=0.02, rtol=0.1)


def test_codes_survive_packing(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    clips = []
    for number, frames in enumerate((1, 5, 33)):
        codes = np.stack([rng.integers(1 << bits, size=frames) for bits in book_bits()]).astype(np.int16)
        clips.append(CodedClip("blend" if number else "heart", number, codes))
    write_codes(tmp_path / "codes.safetensors", clips)
    for wanted, found in zip(clips, read_codes(tmp_path / "codes.safetensors"), strict=True):
        assert (wanted.kind, wanted.number) == (found.kind, found.number)
        np.testing.assert_array_equal(wanted.codes, found.codes)


def test_mel_distance_is_zero_for_equals_and_has_a_gradient_at_silence() -> None:
    distance = MelDistance()
    wave = torch.randn(2, 4 * FRAME) * 0.1
    assert distance(wave, wave).item() == 0
    silence = torch.zeros(2, 4 * FRAME, requires_grad=True)
    distance(silence, wave).backward()
    assert silence.grad is not None
    assert silence.grad.isfinite().all()


@pytest.mark.parametrize(("window", "bands"), MEL_WINDOWS.items())
def test_every_band_hears_something(window: int, bands: int) -> None:
    torch.testing.assert_close(mel_filters(window, bands).sum(1), torch.ones(bands))


def test_labels_at_half_rate_are_taken_from_the_middle() -> None:
    labels = torch.tensor([[1, 2, 3, 255]], dtype=torch.uint8)
    logits = torch.full((1, 5, 2), -50.0)
    logits[0, 2, 0] = 50.0
    assert phoneme_loss(logits, labels).item() == pytest.approx(0.0)


def test_a_pool_cuts_clips_and_leaves_silence_after_them(tmp_path: Path) -> None:
    clips = []
    for number, frames in enumerate((2, 6)):
        samples = np.full(frames * FRAME, 1000 * (number + 1), np.int16)
        marks = np.full(frames * FRAME // LABEL_HOP, number + 1, np.uint8)
        clips.append(Clip(samples, marks, Row(number, ("x",), DEFAULT, 0), "|x|", np.zeros(3)))
    write_shard(tmp_path, "heart-00000", clips)
    pool = Pool(torch.device("cpu"), 0.01)
    assert pool.load(tmp_path) == 1
    assert pool.load(tmp_path) == 0
    wave, labels = pool.cut(torch.tensor([0, 1]), torch.tensor([FRAME, 0]), 3)
    assert wave[0, FRAME - 1] > 0
    assert wave[0, FRAME] == 0
    assert (wave[1] == 2000 / 32768).all()
    assert labels.tolist() == [[1] * 4 + [0] * 8, [2] * 12]
    crops, _ = pool.crops(3, 4)
    assert crops.shape == (3, 4 * FRAME)


def test_kinds_come_in_their_shares_however_few_their_clips(tmp_path: Path) -> None:
    for kind, count in (("heart", 30), ("blend", 1)):
        clips = [
            Clip(np.full(2 * FRAME, 1000 if kind == "heart" else -1000, np.int16), np.zeros(8, np.uint8),
                 Row(number, ("x",), DEFAULT, 0), "|x|", np.zeros(3))
            for number in range(count)
        ]  # fmt: skip
        write_shard(tmp_path, f"{kind}-00000", clips)
    torch.manual_seed(0)
    pool = Pool(torch.device("cpu"), 0.01, {"blend": 0.4})
    pool.load(tmp_path)
    wave, _ = pool.crops(2000, 1)
    assert (wave[:, 0] < 0).float().mean().item() == pytest.approx(0.4, abs=0.05)
    alone = Pool(torch.device("cpu"), 0.01, {"blend": 0.4}, only="blend")
    alone.load(tmp_path)
    assert len(alone) == 1
    assert (alone.crops(10, 1)[0] < 0).all()


def test_weights_that_travelled_are_started_from(codec: Codec, tmp_path: Path) -> None:
    export_codec(codec, tmp_path)
    assert all(torch.equal(value, codec.state_dict()[name].bfloat16().float()) for name, value in
               read_weights(tmp_path, "codec").items())  # fmt: skip
    assert read_weights(tmp_path, "readers") == {}


@pytest.mark.parametrize("distance", [MagnitudeDistance(), LoudnessDistance()])
def test_levels_pull_towards_the_target(distance: torch.nn.Module) -> None:
    torch.manual_seed(0)
    target = 0.1 * torch.randn(2, 8192)
    assert distance(target, target).item() == pytest.approx(0, abs=0.02)
    louder, quieter = (distance(gain * target, target).item() for gain in (2.0, 0.5))
    assert min(louder, quieter) > 0.2
    gain = torch.tensor(0.7, requires_grad=True)
    distance(gain * target, target).backward()
    assert gain.grad is not None
    assert gain.grad < 0
