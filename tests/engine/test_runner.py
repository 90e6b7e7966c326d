"""The runner's two ways, fixed shapes row by row and any rows in one call, on a CPU: in float64 they draw the same codes.

Drawn by hand through a scheduler, so that slots change hands, pages are shared and taken away, and tables grow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from duetts.checkpoint import load_model
from duetts.engine.pace import Pace
from duetts.engine.pages import PagePool, pages_for
from duetts.engine.parts import UNSOUND
from duetts.engine.playout import Playout
from duetts.engine.runner import Runner
from duetts.engine.scheduler import Room, Scheduler
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.models.dual_ar import DualAR
from duetts.types import Int32, Sampling, Utterance

LENGTH = 256


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Such small products only lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(endless_folder: Path, one_thread: None) -> DualAR:
    cpu = torch.device("cpu")
    return load_model(endless_folder, device=cpu, dtype=torch.float64, codec_dtype=torch.float64, max_positions=LENGTH).dual_ar


class Bench:
    """A runner driven turn by turn, without a codec."""

    def __init__(self, model: DualAR, *, fixed: bool, pages: int, slots: int = 4, rereads: bool = False) -> None:
        self.runner = Runner(model, slots=slots, rows=slots, pages=pages, max_model_len=LENGTH, fixed=fixed)
        room = Room(slots, slots, 32, LENGTH, 0.05, rereads=rereads)
        self.scheduler = Scheduler(room, PagePool(pages), Pace())
        self.now = 0.0

    def add(self, utterance: Utterance) -> Sequence:
        blocks = self.scheduler.prepare(utterance)
        sequence = Sequence(utterance, cast(Channel, None), Playout(0.05), blocks=blocks)
        self.scheduler.add(sequence)
        return sequence

    def turn(self) -> None:
        self.now += 0.01
        for sequence, block in self.scheduler.choose_blocks(self.now):
            self.runner.read(sequence, block)
            self.scheduler.has_read(sequence, block)
        rows = self.scheduler.choose_rows(self.now)
        if not rows:
            return
        columns = self.runner.launch(rows)()
        for sequence, column in zip(rows, columns, strict=True):
            self.scheduler.has_launched(sequence, self.now)
            assert column[0] != UNSOUND
            if sequence.settled < sequence.num_frames:
                assert np.array_equal(sequence.frames[sequence.settled], column)
                sequence.settled += 1
            else:
                sequence.keep(column)
            if sequence.is_over:
                self.scheduler.remove(sequence)

    def run(self, work: list[Utterance], every: int) -> list[Int32]:
        """A new utterance comes every so many turns. Returns each one's columns [1 + codebooks, frames]."""
        sequences: list[Sequence] = []
        for turn in range(10_000):
            if turn % every == 0 and len(sequences) < len(work):
                sequences.append(self.add(work[len(sequences)]))
            self.turn()
            if len(sequences) == len(work) and self.scheduler.idle:
                self.scheduler.assert_idle()
                return [np.stack(sequence.frames, axis=1) for sequence in sequences]
        raise AssertionError("the work does not end")


def work(count: int) -> list[Utterance]:
    """Two voices, texts of all lengths, ways of sampling, some with listeners."""
    chance = random.Random(3)
    rng = np.random.default_rng(3)
    voices = [rng.integers(0, 32, (5, 50)), rng.integers(0, 32, (5, 0))]
    made = []
    for index in range(count):
        text = rng.integers(0, 32, (5, chance.randrange(1, 40)))
        prompt = np.concatenate((voices[index % 2], text), axis=1).astype(np.int32)
        prompt[1:, :] *= prompt[0] >= 16  # codes at some positions only, where the token is a semantic one
        prompt[0] = np.where(prompt[0] >= 16, 48 + prompt[1], prompt[0])
        sampling = Sampling(
            temperature=(0.7, 0.0, 1.2)[index % 3], top_k=(30, 0, 5)[index % 3], repetition_penalty=(1.0, 1.3)[index % 2]
        )
        made.append(
            Utterance(
                f"r{index}", prompt, sampling, index, chance.randrange(5, 60), streaming=index % 3 == 0,
                shared_positions=voices[index % 2].shape[1],
            )
        )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def alone(model: DualAR) -> list[Int32]:
    return [Bench(model, fixed=True, pages=pages_for(LENGTH)).run([one], 1)[0] for one in work(14)]


@pytest.mark.parametrize("rereads", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_all_rows_in_one_call_draw_what_each_draws_alone(model: DualAR, alone: list[Int32], rereads: bool, fixed: bool) -> None:
    bench = Bench(model, fixed=fixed, pages=18, rereads=rereads)
    together = bench.run(work(14), 5)
    assert bench.scheduler.preemptions > 0
    assert bench.scheduler.reused_positions > 0
    for number, (expected, found) in enumerate(zip(alone, together, strict=True)):
        assert np.array_equal(expected, found), f"utterance {number}"


def test_what_earlier_owners_left_in_pages_harms_nobody(model: DualAR) -> None:
    (one,) = work(1)
    for fixed in (True, False):
        bench = Bench(model, fixed=fixed, pages=pages_for(LENGTH))
        (expected,) = bench.run([one], 1)
        bench = Bench(model, fixed=fixed, pages=pages_for(LENGTH))
        bench.runner._cache.keys.fill_(torch.nan)
        bench.runner._cache.values.fill_(torch.nan)
        assert np.array_equal(bench.run([one], 1)[0], expected)
