"""Lines, speakers, rows and labels: the same everywhere, and nothing held out is ever spoken for training."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest
from training.data.grammar import made_lines
from training.data.manifest import Manifest
from training.data.phonemes import CLASSES, OPEN, SILENCE, labels
from training.data.speakers import HELD_OUT, blend_speakers, heart_speakers
from training.data.texts import Lines, read_lines, sentence, split
from training.recipe import LABEL_HOP, SAMPLE_RATE


@pytest.fixture(scope="module")
def lines() -> Lines:
    return split(list(made_lines(3000)))


def test_lines_repeat_and_split_by_content_alone(tmp_path: Path, lines: Lines) -> None:
    path = tmp_path / "lines.txt.xz"
    path.write_bytes(lzma.compress("\n".join(reversed(made_lines(3000))).encode()))
    assert read_lines(path).held_out == lines.held_out
    assert not set(lines.held_out) & set(lines.train)


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ("(Greek mythology) a goddess of the dawn", "A goddess of the dawn."),
        ("was it you?", "Was it you?"),
        ("tiny", None),
        ("12345 6789 0123 4567", None),
    ],
)
def test_a_gloss_becomes_a_sentence_or_nothing(raw: str, wanted: str | None) -> None:
    assert sentence(raw) == wanted


def test_no_training_speaker_is_near_a_held_out_one() -> None:
    speakers = [*heart_speakers(), *blend_speakers()]
    assert len(speakers) > 350
    assert not any(speaker.is_near(held) for speaker in speakers for held in HELD_OUT)
    assert all(abs(sum(weight for _, weight in speaker.style) - 1) < 0.05 for speaker in speakers)


@pytest.mark.parametrize("kind", ["heart", "blend", "held-heart", "held-blend"])
def test_rows_are_functions_of_their_number(lines: Lines, kind: str) -> None:
    first, second = Manifest(lines, kind), Manifest(lines, kind)
    assert [first.row(n) for n in range(50)] == [second.row(n) for n in reversed(range(50))][::-1]
    spoken = {text for n in range(50) for text in first.row(n).texts}
    assert spoken <= set(lines.held_out if kind.startswith("held") else lines.train)


def test_labels_follow_the_symbols_ends() -> None:
    hop = LABEL_HOP / SAMPLE_RATE
    found = labels("|ˈn ɛ.", np.array([2, 3, 5, 6, 8, 9]) * hop, 10 * LABEL_HOP)
    n, e = CLASSES["n"], CLASSES["ɛ"]
    assert found.tolist() == [SILENCE, SILENCE, n, n, n, OPEN, e, e, SILENCE, SILENCE]
