"""Scheduler and pages under random work, with a device that remembers what every page holds and nothing around them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from duetts.engine.pace import Pace
from duetts.engine.pages import PagePool, pages_for
from duetts.engine.playout import Playout
from duetts.engine.scheduler import Room, Scheduler
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.types import Sampling, Utterance

from .null_parts import BOOKS, NullDevice, solo

FRAME_S = 0.05
LENGTH = 160
VOICES = [np.random.default_rng(number).integers(0, 99, (1 + BOOKS, length)) for number, length in enumerate((70, 33, 16, 0))]
TEXTS = [np.random.default_rng(100 + number).integers(0, 99, (1 + BOOKS, 50)) for number in range(4)]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 5), rows=st.integers(1, 4), spare=st.integers(0, 12), block=st.sampled_from([16, 32, 64]),
        rereads=st.booleans(), step_s=st.sampled_from([0.0, 0.002, 0.03]), watch=st.booleans(), back=st.booleans(),
    )  # fmt: skip
    def build(
        self, slots: int, rows: int, spare: int, block: int, rereads: bool, step_s: float, watch: bool, back: bool
    ) -> None:
        self.now = 50.0
        self.step_s = step_s
        self.pool = PagePool(pages_for(LENGTH) + spare)
        self.device = NullDevice(self.pool.num_pages, rows=rows)
        self.device.pool = self.pool
        room = Room(slots, rows, block, LENGTH, FRAME_S, rereads=rereads)
        self.pace = Pace()
        self.scheduler = Scheduler(room, self.pool, self.pace, watch_lateness=watch, stand_back=back)
        self.seeds = 0
        self.still = 0  # turns in a row that did nothing

    @rule(
        voice=st.integers(0, 3), text=st.integers(0, 3), length=st.integers(1, 50), frames=st.integers(1, 40),
        streaming=st.booleans(), continues=st.sampled_from([False] * 4 + [True]), told=st.booleans(), count=st.integers(1, 4),
    )  # fmt: skip
    def add(
        self, voice: int, text: int, length: int, frames: int, streaming: bool, continues: bool, told: bool, count: int
    ) -> None:
        prompt = np.concatenate((VOICES[voice], TEXTS[text][:, :length]), axis=1).astype(np.int32)
        for _ in range(count):
            self.seeds += 1
            utterance = Utterance(
                "r", prompt, Sampling(), self.seeds, frames, streaming=streaming, continues=continues,
                shared_positions=VOICES[voice].shape[1] if told else 0,
            )  # fmt: skip
            blocks = self.scheduler.prepare(utterance)
            self.scheduler.add(Sequence(utterance, cast(Channel, None), Playout(FRAME_S), blocks, submitted=self.now))

    @rule(seconds=st.sampled_from([0.01, 0.3, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(turns=st.integers(1, 40))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.one_turn()

    @rule(data=st.data())
    @precondition(lambda self: not self.scheduler.idle)
    def leave(self, data: Any) -> None:
        self.scheduler.remove(data.draw(st.sampled_from(self.scheduler.everyone())))

    def one_turn(self) -> None:
        if self.scheduler.idle:
            return
        self.now += self.step_s
        blocks = self.scheduler.choose_blocks(self.now)
        assert sum(block.end - block.start for _, block in blocks) <= self.scheduler.room.block
        for sequence, block in blocks:
            self.device.read(sequence, block)
            self.scheduler.has_read(sequence, block)
        rows = self.scheduler.choose_rows(self.now)
        columns = self.device.launch(rows)() if rows else []
        for sequence, column in zip(rows, columns, strict=True):
            self.scheduler.has_launched(sequence, self.now)
            self.settle(sequence, column)
        if rows:
            self.pace.saw_step(len(rows), self.step_s)
        self.still = 0 if rows or blocks else self.still + 1
        assert self.still == 0, "there is work and a turn does nothing"
        self.books()

    def settle(self, sequence: Sequence, column: Any) -> None:
        if sequence.settled < sequence.num_frames:
            assert np.array_equal(sequence.frames[sequence.settled], column)
            sequence.settled += 1
        else:
            sequence.keep(column)
        if sequence.streaming:
            sequence.playout.hand_over(1, self.now)
        if sequence.num_frames == sequence.utterance.max_frames:
            frames = solo(sequence.utterance)[0]
            assert all(np.array_equal(*pair) for pair in zip(frames, sequence.frames, strict=False))
            self.scheduler.remove(sequence)

    @invariant()
    def books(self) -> None:
        scheduler = self.scheduler
        running = list(scheduler.running)
        self.pool.assert_sound([sequence.pages for sequence in running])
        slots = [sequence.slot for sequence in running]
        assert sorted([*slots, *scheduler._free_slots]) == list(range(scheduler.room.slots))
        assert all(sequence.slot is None and not sequence.pages for line in scheduler._lines for sequence in line)
        assert all(len(sequence.pages) <= sequence.most_pages for sequence in running)
        promised = [sequence.most_pages for sequence in running if sequence.streaming]
        assert (scheduler._listeners, scheduler._promised) == (len(promised), sum(promised))
        assert sum(promised) <= self.pool.num_pages
        assert all(not sequence.run for sequence in running if sequence.streaming), "a listener has lost its place"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if self.scheduler.idle:
                break
            self.one_turn()
        self.scheduler.assert_idle()
        assert self.device.complaints == []


QUICK = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)  # fmt: skip


def test_scheduler_and_pages_keep_their_books_whatever_happens() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_scheduler_and_pages_keep_their_books_for_very_long() -> None:
    long = settings(QUICK, max_examples=2000, stateful_step_count=150, derandomize=False)
    run_state_machine_as_test(SchedulerMachine, settings=long)
