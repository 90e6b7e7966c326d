"""The trainer of the language model computes what the engine computes, on pairs laid out as the engine lays them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from training.codec.state import export_codec
from training.export_lm import export
from training.lm.alignment import frame_bytes, match_words, symbol_places
from training.lm.attention import TensorBatch
from training.lm.clips import Pair, Spoken
from training.lm.loader import temporary_tokenizer
from training.lm.model import Trainee, to_device
from training.lm.noise import NEIGHBOURS, disturb
from training.lm.packing import Batch, Document, Packer, Writer
from training.lm.sample import Task, speak
from training.lm.state import export_model, load_weights
from training.recipe import FRAME, SAMPLE_RATE, codec_config

from duetts.checkpoint import load_model, randomise_codec
from duetts.habits import Habits, read_habits
from duetts.models.codec import Codec
from duetts.models.kv_cache import FrameCache, KVCache, SeparateRows

SOUNDS = "|hˌi mˈɪst skˈul.|"
TEXT = "He missed school."


def spoken(seed: int, frames: int, text: str = TEXT, known: bool = True) -> Spoken:
    rng = np.random.default_rng(seed)
    codes = np.concatenate((rng.integers(1024, size=(1, frames)), rng.integers(512, size=(7, frames)))).astype(np.int16)
    places = np.linspace(0, len(text) - 1, frames).astype(np.int16) if known else None
    return Spoken("heart", seed, "heart", text, 1, codes, places)


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    torch.manual_seed(0)
    _, config = temporary_tokenizer()
    return Trainee(config).eval()


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(temporary_tokenizer()[0])


@pytest.fixture(scope="module")
def documents(writer: Writer) -> list[Document]:
    pairs = [
        Pair(spoken(1, 12), spoken(2, 20, "Yes.")),
        Pair(None, spoken(3, 30)),
        Pair(spoken(4, 7, "No, £3!"), spoken(5, 15, known=False)),
    ]
    return [writer.document(pair) for pair in pairs]


@pytest.fixture(scope="module")
def batch(documents: list[Document]) -> Batch:
    packer = Packer(2, 1024, 160, 64)
    return next(packer.batches(iter(documents), np.random.default_rng(0)))


@pytest.fixture(scope="module")
def tensors(batch: Batch) -> TensorBatch:
    return to_device({name: torch.from_numpy(value) for name, value in batch.items()}, torch.device("cpu"))


def engine_logits(trainee: Trainee, document: Document) -> tuple[Tensor, Tensor]:
    """The engine's path, one position after another: choice logits of all positions, and their hidden states."""
    model, config = trainee.model, trainee.config
    cache = KVCache(config.slow, 1, 256, device=torch.device("cpu"), dtype=torch.float32)
    columns = torch.from_numpy(document.columns).long()[None]
    hidden = [model.prefill(columns[:, :, i : i + 1], SeparateRows(cache, [[0]], [i], 1))[:, 0] for i in range(len(document))]
    normed = model.slow.norm(torch.cat(hidden))
    return model.slow.choice_logits(normed), normed


def test_packed_rows_give_the_engines_logits(trainee: Trainee, documents: list[Document], tensors: TensorBatch) -> None:
    with torch.no_grad():
        trainee.prepare()
        hidden, _ = trainee.hidden(tensors)
        logits = trainee.choice_logits(hidden)
        for document in documents:
            wanted, _ = engine_logits(trainee, document)
            found = [
                logits[row, start : start + len(document)]
                for row in range(len(logits))
                for start in range(161 - len(document))
                if np.array_equal(tensors["tokens"][row, start : start + len(document)].numpy(), document.columns[0])
            ]
            assert len(found) == 1
            torch.testing.assert_close(found[0], wanted, atol=1e-4, rtol=1e-4)


def test_the_fast_decoder_gives_the_engines_logits(trainee: Trainee) -> None:
    fast, config = trainee.model.fast, trainee.config
    with torch.no_grad():
        hidden, codes = torch.randn(3, config.slow.dim), torch.randint(512, (3, 8))
        found = trainee.fast_logits(hidden, codes)
        cache = FrameCache(config.fast, 3, device=torch.device("cpu"), dtype=torch.float32)
        x = fast(fast.open_frame(hidden, codes[:, 0]), 0, cache)[:, -1]
        for book in range(1, 8):
            if book > 1:
                x = fast(fast.embeddings(codes[:, book - 1])[:, None], book, cache)[:, 0]
            torch.testing.assert_close(found[:, book - 1], fast.logits(x, 512), atol=1e-4, rtol=1e-4)


def test_labels_are_what_comes_next(documents: list[Document], writer: Writer) -> None:
    start = writer.tokenizer.semantic_start
    for document in documents:
        tokens = document.columns[0]
        assert document.choice[-1] == 1024
        for at in np.flatnonzero(document.choice[:-1] >= 0):
            assert tokens[at + 1] == start + document.choice[at]
        frames = (tokens >= start).sum()
        assert (document.choice >= 0).sum() == frames + 1
        assert set(np.unique(document.weight)) <= {np.float32(0), np.float32(0.3), np.float32(1)}


def test_led_positions_are_the_bytes_being_spoken(documents: list[Document]) -> None:
    first, second, third = documents
    for document, text in ((first, "Yes."), (second, TEXT)):
        target = np.flatnonzero((document.weight == 1) & (document.align >= 0))
        letters = bytes(document.columns[0, document.align[target]].astype(np.uint8)).decode()
        assert list(dict.fromkeys(letters)) == list(dict.fromkeys(text))
    reference = np.flatnonzero(np.isclose(third.weight, 0.3))
    assert bytes(third.columns[0, third.align[reference][:2]].astype(np.uint8)) == b"No"
    assert (third.align[third.weight == 1] == -1).all()


def test_batches_hold_whole_documents_and_fixed_shapes(batch: Batch, documents: list[Document]) -> None:
    assert int(batch["pairs"]) == len(documents)
    assert (batch["choice"] >= 0).sum() == sum((document.choice >= 0).sum() for document in documents)
    starts = batch["starts"]
    assert (np.diff(starts) >= 0).all()
    assert starts[-1] == 320
    assert batch["fast_weight"].astype(bool).sum() == min(64, sum((d.choice >= 0).sum() - 1 for d in documents))


def test_a_step_lowers_the_loss(tensors: TensorBatch) -> None:
    torch.manual_seed(0)
    trainee = Trainee(temporary_tokenizer()[1])
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=1e-3)
    totals = []
    for _ in range(4):
        losses = trainee(tensors, torch.tensor(0.2), 0.05, False)
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
        totals.append(losses.total.item())
    assert totals[-1] < totals[0]
    assert all(value.grad is not None for value in trainee.parameters())


def test_noise_changes_inputs_and_no_labels(tensors: TensorBatch) -> None:
    table = torch.full((8, 1024, NEIGHBOURS), 7)
    noisy = disturb(tensors, table, 274, rate=1.0)
    frames = tensors["tokens"] >= 274
    assert 0.4 < (noisy["codes"][:, 1] == 7)[frames].float().mean() < 0.8
    assert torch.equal(noisy["tokens"][~frames], tensors["tokens"][~frames])
    assert torch.equal(noisy["tokens"][frames] - 274, noisy["codes"][:, 0][frames])
    assert noisy["clean"] is tensors["codes"]


def test_weights_travel_and_the_exported_folder_speaks(trainee: Trainee, tmp_path: Path) -> None:
    export_model(trainee.model, tmp_path / "weights", {"step": 5, "spent_s": 1.0})
    codec = Codec(codec_config())
    randomise_codec(codec, torch.Generator().manual_seed(0))
    export_codec(codec, tmp_path / "codec")
    assert export(tmp_path / "weights", tmp_path / "codec", tmp_path / "mini") < 45_000_000
    other = Trainee(trainee.config)
    assert load_weights(other.model, tmp_path / "weights")["step"] == 5
    model = load_model(tmp_path / "mini", device=torch.device("cpu"), dtype=torch.float32, codec_dtype=torch.float32)
    for mine, theirs in zip(other.model.parameters(), model.dual_ar.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    habits = read_habits(tmp_path / "mini")
    assert habits == Habits(habits.sampling, longest_piece=160, conditioned=False, single_line=True)
    assert habits.sampling.residual_temperature == 0.6
    utterance = Task("Yes.", spoken(9, 5)).utterance(temporary_tokenizer()[0], 1)
    [(codes, _)] = speak(model.dual_ar, [utterance])
    assert codes.shape[0] == 8


@pytest.mark.parametrize(
    ("written", "said", "counts"),
    [
        (["Room", "43.8", "is", "free."], ["ɹum", "fɔɹTi", "θɹi", "pYnt", "At", "ɪz", "fɹi"], [1, 4, 1, 1]),
        (["a", "cat"], ["ɐ", "kæt"], [1, 1]),
        (["all", "pH", "conditions"], ["ɔl", "pi", "Aʧ", "kəndɪʃənz"], [1, 2, 1]),
    ],
)
def test_written_words_get_their_spoken_ones(written: list[str], said: list[str], counts: list[int]) -> None:
    assert match_words(written, said) == counts


def test_symbols_stand_for_letters_in_order() -> None:
    places = symbol_places(TEXT, SOUNDS)
    assert (np.diff(places) >= 0).all()
    assert TEXT[places[SOUNDS.index("s", 6)]] in "missed"
    assert TEXT[places[SOUNDS.index("k")]] in "sch"


def test_frames_point_at_bytes_not_characters() -> None:
    ends = np.arange(1, 6) * FRAME / SAMPLE_RATE
    found = frame_bytes("£9 a", "|n ɐ|", ends, 5)
    assert found[-1] == 4
    assert found[0] == 2
