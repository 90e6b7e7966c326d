"""Who comes in, what is read, who draws, and who gives way. Milliseconds, no torch, time as the tests say."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from duetts.engine.pace import Pace
from duetts.engine.pages import PAGE, PagePool
from duetts.engine.playout import COMFORT_S, Playout
from duetts.engine.scheduler import (
    BRISK,
    MAX_DISPLACED,
    NEED_S,
    OPENING_FRAMES,
    PATIENCE_S,
    Room,
    Scheduler,
    stands_back,
    urgency,
)
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.types import Int32, Sampling, Utterance

FRAME_S = 0.05
NOW = 100.0


class Bench:
    """A scheduler, and the turns of an engine without a device."""

    def __init__(self, *, slots: int = 4, rows: int = 4, pages: int = 40, block: int = 32, **options: Any) -> None:
        self.pool = PagePool(pages)
        self.pace = Pace()
        self.scheduler = Scheduler(Room(slots, rows, block, 16 * pages, FRAME_S, **options), self.pool, self.pace)

    def sequence(self, prompt: Int32 | int = 20, frames: int = 20, *, streaming: bool = False, **options: Any) -> Sequence:
        """`prompt`: columns, or how many positions of it nobody else has."""
        if isinstance(prompt, int):
            prompt = columns(prompt, seed=len(self.scheduler.everyone()) + 1000 * prompt)
        utterance = Utterance("r", prompt, Sampling(), 0, frames, streaming=streaming, **options)
        blocks = self.scheduler.prepare(utterance)
        return Sequence(utterance, cast(Channel, None), Playout(FRAME_S), blocks=blocks, submitted=NOW)

    def add(self, *arguments: Any, **options: Any) -> Sequence:
        sequence = self.sequence(*arguments, **options)
        self.scheduler.add(sequence)
        return sequence

    def read(self, now: float = NOW) -> list[tuple[Sequence, tuple[int, int]]]:
        blocks = self.scheduler.choose_blocks(now)
        for sequence, block in blocks:
            self.scheduler.has_read(sequence, block)
        self.check()
        return [(sequence, (block.start, block.end)) for sequence, block in blocks]

    def draw(self, now: float = NOW) -> list[Sequence]:
        rows = self.scheduler.choose_rows(now)
        for sequence in rows:
            self.scheduler.has_launched(sequence, now)
            if sequence.settled < sequence.num_frames:
                sequence.settled += 1
            else:
                sequence.keep(columns(1, seed=sequence.num_frames)[:, 0])
        self.check()
        return rows

    def turn(self, now: float = NOW) -> list[Sequence]:
        self.read(now)
        return self.draw(now)

    def check(self) -> None:
        self.pool.assert_sound([sequence.pages for sequence in self.scheduler.running])

    def ready(self, *sequences: Sequence) -> None:
        """Turns without frames until all blocks are read."""
        while not all(sequence.is_read for sequence in sequences):
            assert self.read()

    def end(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.remove(sequence)
        self.check()


def columns(length: int, seed: int = 0) -> Int32:
    return np.random.default_rng(seed).integers(0, 1000, (4, length)).astype(np.int32)


def listening(sequence: Sequence, ahead_s: float, now: float = NOW) -> None:
    """A listener who has so much in hand, counting what is launched."""
    sequence.playout.began = now - sequence.launched * FRAME_S + ahead_s


# -- coming in ---------------------------------------------------------------------------------------------------------


def test_slots_are_given_in_order_of_arrival_listeners_first() -> None:
    bench = Bench(slots=2)
    complete = [bench.add() for _ in range(2)]
    listeners = [bench.add(streaming=True) for _ in range(2)]
    bench.read()
    assert list(bench.scheduler.running) == listeners
    assert [sequence.slot is None for sequence in complete] == [True, True]
    assert bench.scheduler.num_waiting == 2
    bench.end(*listeners)
    bench.read()
    assert list(bench.scheduler.running) == complete
    bench.end(*complete)
    bench.scheduler.assert_idle()


def test_a_sequence_begins_with_the_pages_of_its_prompt_and_gets_more_one_by_one() -> None:
    bench = Bench(block=64)
    sequence = bench.add(31, 40)
    bench.read()
    assert len(sequence.pages) == 2
    for frame in range(40):
        assert bench.draw() == [sequence]
        assert len(sequence.pages) == (30 + frame) // PAGE + 1
    assert bench.draw() == []  # its bound is launched
    assert len(sequence.pages) <= sequence.most_pages
    bench.end(sequence)
    bench.scheduler.assert_idle()


def test_who_has_not_come_in_can_leave_the_line() -> None:
    bench = Bench(slots=1)
    first, second, third = bench.add(), bench.add(), bench.add(streaming=True)
    bench.read()
    assert list(bench.scheduler.running) == [third]
    bench.end(second, third)
    bench.read()
    assert list(bench.scheduler.running) == [first]


def test_listeners_are_promised_all_the_pages_that_they_may_come_to_need() -> None:
    bench = Bench(pages=12)
    first = bench.add(20, 76, streaming=True)  # 6 pages
    second = bench.add(20, 77, streaming=True)  # 7 pages
    small = bench.add(20, 4, streaming=True)
    complete = bench.add(20, 4)
    bench.read()
    assert list(bench.scheduler.running) == [first]  # nobody passes a listener who waits for pages
    assert bench.pool.available == 10
    bench.end(first)
    bench.read()
    assert list(bench.scheduler.running) == [second, small, complete]


def test_promises_come_back() -> None:
    bench = Bench(pages=6, slots=1)
    for _ in range(20):
        sequence = bench.add(20, 76, streaming=True)
        assert bench.turn() == [sequence]
        bench.end(sequence)
    bench.scheduler.assert_idle()


def test_complete_answers_leave_a_page_for_everybody_to_go_on_with() -> None:
    bench = Bench(pages=5)
    sequences = [bench.add(16, 60) for _ in range(4)]  # a page each
    bench.read()
    assert list(bench.scheduler.running) == sequences[:3]  # 1 + 0, 1 + 1, 1 + 2 pages; then 1 + 3 were needed and 2 are there


def test_an_answer_that_has_waited_long_comes_in_before_later_listeners() -> None:
    bench = Bench(slots=1)
    running = bench.add(streaming=True)
    bench.read()
    complete = bench.add()
    early, late = bench.sequence(streaming=True), bench.sequence(streaming=True)
    early.submitted, late.submitted = NOW + PATIENCE_S, NOW + PATIENCE_S + 1
    bench.scheduler.add(early)
    bench.scheduler.add(late)
    order = []
    for _ in range(3):
        bench.end(running)
        bench.read()
        (running,) = bench.scheduler.running
        order.append(running)
    assert order == [early, complete, late]


def test_how_long_one_listener_more_would_wait() -> None:
    bench = Bench(slots=2)
    bench.pace.saw_stay(3.0)
    assert bench.scheduler.line_s == 0
    for _ in range(2):
        bench.add(streaming=True)
        bench.add()
    bench.read()
    assert bench.scheduler.line_s == 0
    for _ in range(4):
        bench.add(streaming=True)
    assert bench.scheduler.line_s == 4 * 3.0 / 2  # four before it, and two leave every 3 s


def test_a_listener_too_many_waits_while_complete_answers_come_in() -> None:
    bench = Bench(slots=8)
    for _ in range(10):
        bench.pace.saw_step(4, 0.08)  # 4 rows in 80 ms: the device is short for two
        bench.pace.saw_step(1, 0.02)
    listeners = [bench.add(streaming=True) for _ in range(4)]
    complete = bench.add()
    bench.read()
    most = bench.pace.streams(4, FRAME_S, shared_thread=False)
    assert 2 <= most < 3
    assert list(bench.scheduler.running) == [*listeners[:2], complete]
    bench.end(listeners[0])
    bench.read()
    assert list(bench.scheduler.running) == [listeners[1], complete, listeners[2]]


def test_where_a_step_takes_the_time_of_all_rows_nobody_stands_back() -> None:
    """It would not be shorter without them: those with plenty, and complete answers, take the rows that are free."""
    bench = Bench(padded=True)
    short, ahead, complete = bench.add(streaming=True), bench.add(streaming=True), bench.add()
    bench.ready(short, ahead, complete)
    for _ in range(OPENING_FRAMES):
        bench.draw()
    listening(short, 0.0)
    listening(ahead, 9.0)
    assert bench.draw() == [short, complete, ahead]


def test_who_goes_on_with_a_request_is_let_in_however_late_and_before_others() -> None:
    bench = Bench(slots=8)
    bench.pace.saw_step(4, 10.0)
    bench.pace.saw_step(1, 10.0)
    bench.add(streaming=True)
    bench.read()
    waiting = [bench.add(streaming=True) for _ in range(5)]
    going_on = [bench.add(streaming=True, continues=True) for _ in range(2)]
    bench.scheduler._admit(NOW)
    assert list(bench.scheduler.running)[1:3] == going_on  # in order of arrival
    assert waiting[-1].slot is None


def test_a_complete_answer_that_goes_on_comes_after_those_that_lost_their_place() -> None:
    bench = Bench(slots=2)
    lost, other = bench.add(), bench.add()
    bench.read()
    listener = bench.add(streaming=True)
    bench.read()
    assert other.slot is None  # the younger
    waiting, going_on = bench.add(), bench.add(continues=True)
    bench.end(listener, lost)
    bench.read()
    assert list(bench.scheduler.running) == [other, going_on]
    assert waiting.slot is None


# -- giving way --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rereads", [False, True])
def test_the_youngest_complete_answer_gives_way_to_a_listener_and_comes_back_first(rereads: bool) -> None:
    bench = Bench(slots=2, rereads=rereads)
    old, young = bench.add(40), bench.add(40)
    bench.ready(old, young)
    for _ in range(5):
        bench.draw()
    listener, later = bench.add(streaming=True), bench.add()
    bench.read()
    assert list(bench.scheduler.running) == [old, listener]
    assert (young.slot, young.pages, young.run, young.num_frames) == (None, [], 1, 5)
    bench.end(old)
    bench.ready(young)
    assert list(bench.scheduler.running) == [listener, young]
    assert later.slot is None
    said = [frame.copy() for frame in young.frames]
    if rereads:
        assert young.blocks[-1].end == 40 - 1 + 5
        assert young.launched == young.settled == 5
    else:
        assert young.blocks[-1].end == 39
        assert young.launched == young.settled == 0
    while young.num_frames == 5:
        listening(listener, 9.0)
        assert young in bench.draw()
    assert young.position == 40 - 1 + 6
    assert np.array_equal(young.frames[:5], said)
    bench.end(young, listener, later)
    bench.scheduler.assert_idle()


def test_nobody_gives_way_more_often_than_allowed() -> None:
    bench = Bench(slots=1)
    patient = bench.add(frames=200)
    for time in range(MAX_DISPLACED):
        bench.turn()
        listener = bench.add(streaming=True)
        assert bench.turn() == [listener]
        assert patient.run == time + 1
        bench.end(listener)
    assert bench.turn() == [patient]
    listener = bench.add(streaming=True)
    assert bench.turn() == [patient]
    bench.end(patient)
    assert bench.turn() == [listener]


def test_complete_answers_do_not_push_each_other_out_to_come_in() -> None:
    bench = Bench(slots=1)
    first = bench.add()
    bench.read()
    bench.add()
    bench.read()
    assert list(bench.scheduler.running) == [first]
    assert bench.scheduler.preemptions == 0


@pytest.mark.parametrize("rereads", [False, True])
def test_without_a_page_the_youngest_complete_answer_is_computed_again_later(rereads: bool) -> None:
    bench = Bench(pages=6, rereads=rereads)
    old, _ = bench.add(30, 60), bench.add(30, 60)
    drawn = 0
    while bench.scheduler.running or bench.scheduler.num_waiting:
        rows = bench.turn()
        drawn += len(rows)
        assert not rows or old.finished or old in rows  # the older one always goes on
        for sequence in rows:
            if sequence.num_frames == 60:
                sequence.finished = "length"
                bench.end(sequence)
    assert bench.scheduler.preemptions == 1  # once, and not again and again
    assert old.run == 0
    assert (drawn > 120) is not rereads
    bench.scheduler.assert_idle()


def test_short_pages_do_not_make_answers_begin_again_and_again() -> None:
    """Who comes back waits for the pages of all that it will say again, so that it gets beyond."""
    bench = Bench(pages=8, slots=8)
    for _ in range(6):
        bench.add(30, 60)
    drawn = 0
    while bench.scheduler.running or bench.scheduler.num_waiting:
        rows = bench.turn()
        drawn += len(rows)
        bench.end(*[sequence for sequence in rows if sequence.settled == 60])
    assert bench.scheduler.preemptions <= 6
    assert drawn < 1.5 * 6 * 60


def test_a_listener_takes_its_promised_page_from_an_answer_that_is_drawing_in_the_same_step() -> None:
    bench = Bench(pages=4)
    listener = bench.add(15, 40, streaming=True)
    complete = bench.add(11, 40)
    bench.ready(listener, complete)
    while listener.position < 2 * PAGE:
        listening(listener, 9.0)
        complete.served = NOW - 100.0
        assert bench.draw() == [complete, listener]
    assert bench.pool.available == 0
    listening(listener, 9.0)
    complete.served = NOW - 100.0
    assert bench.draw() == [listener]
    assert (complete.slot, complete.run, complete.num_frames) == (None, 1, listener.num_frames - 1)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_turn_reads_so_many_positions_listeners_first() -> None:
    bench = Bench(block=32, slots=8, pages=100)
    complete = bench.add(60)
    listener = bench.add(70, streaming=True)
    small = bench.add(10, streaming=True)
    assert bench.read() == [(listener, (0, 32))]
    assert bench.read() == [(listener, (32, 64))]
    assert bench.read() == [(listener, (64, 69)), (small, (0, 9))]  # 18 positions are left, the next block has 32
    assert bench.read() == [(complete, (0, 32))]
    assert bench.read() == [(complete, (32, 59))]
    assert bench.read() == []


def test_a_prompt_of_one_position_needs_no_reading() -> None:
    bench = Bench()
    sequence = bench.add(1)
    assert bench.turn() == [sequence]


def test_what_was_read_before_is_shared() -> None:
    bench = Bench(block=32)
    voice = columns(64)
    prompts = [np.concatenate((voice, columns(9, seed=seed)), axis=1) for seed in (1, 2)]
    first = bench.add(prompts[0])
    bench.ready(first)
    second = bench.add(prompts[1])
    assert bench.read() == [(second, (64, 72))]
    assert second.pages[:4] == first.pages[:4]
    assert second.pages[4] != first.pages[4]
    assert bench.scheduler.reused_positions == 64
    bench.end(first, second)
    assert (bench.pool.used, bench.pool.cached) == (0, 4)
    third = bench.add(prompts[0])
    assert bench.read() == [(third, (64, 72))]


def test_what_another_reads_in_this_turn_is_waited_for_and_then_shared() -> None:
    bench = Bench(block=64, pages=100, slots=8)
    voice = columns(32)
    prompts = [np.concatenate((voice, columns(9, seed=seed)), axis=1) for seed in range(3)]
    same = [bench.add(prompt, streaming=True, shared_positions=32) for prompt in prompts]
    other = bench.add(20, streaming=True)
    assert bench.read() == [(same[0], (0, 32)), (other, (0, 19))]
    assert bench.read() == [(each, (32, 40)) for each in same]
    assert len({tuple(each.pages[:2]) for each in same}) == 1
    assert bench.pool.used == 2 + 3 + 2
    assert bench.scheduler.reused_positions == 2 * 32
    bench.end(*same, other)
    bench.scheduler.assert_idle()


def test_who_is_half_way_shares_what_somebody_else_has_read_meanwhile() -> None:
    bench = Bench(block=32, pages=100)
    prompt = columns(100)
    slow = bench.add(prompt)
    bench.read()
    fast = bench.add(prompt, streaming=True)
    assert bench.read() == [(fast, (32, 64))]
    assert bench.read() == [(fast, (64, 96))]
    assert bench.read() == [(fast, (96, 99)), (slow, (96, 99))]  # parts of pages are not shared
    assert slow.pages[:6] == fast.pages[:6]
    assert bench.scheduler.reused_positions == 32 + 64


def test_sharing_a_prompt_costs_no_pages_that_are_not_there() -> None:
    """Idle pages that a newcomer would hold are not there for it to take."""
    bench = Bench(pages=6, block=32)
    prompt = columns(65)
    first = bench.add(prompt, 10)
    bench.ready(first)
    bench.end(first)
    assert (bench.pool.cached, bench.pool.available) == (4, 6)
    taken = bench.add(17, 1)
    bench.read()
    assert bench.pool.available == 4
    again = bench.add(prompt, 10)  # its 4 known pages and one of its own: but only the 4 are there
    bench.read()
    assert again.slot is None
    bench.end(taken)
    assert bench.turn() == [again]


# -- drawing -----------------------------------------------------------------------------------------------------------


def test_new_listeners_go_first_then_whoever_has_least_in_hand() -> None:
    bench = Bench()
    new, newer, short, well = (bench.sequence(streaming=True) for _ in range(4))
    complete = bench.sequence()
    complete.served = NOW - 1.0
    listening(short, 0.4)
    listening(well, 1.5)
    everyone = [well, complete, short, newer, new]
    everyone.sort(key=lambda sequence: urgency(sequence, NOW))
    assert everyone == [new, newer, short, complete, well]


def test_a_new_listener_is_one_like_others_after_its_opening() -> None:
    bench = Bench()
    sequence = bench.sequence(streaming=True)
    sequence.launched = OPENING_FRAMES - 1
    assert urgency(sequence, NOW)[0] == 0
    sequence.launched = OPENING_FRAMES
    assert urgency(sequence, NOW) == (1, pytest.approx(OPENING_FRAMES * FRAME_S))


def test_a_complete_answer_becomes_urgent_with_time() -> None:
    bench = Bench()
    complete, listener = bench.sequence(), bench.sequence(streaming=True)
    complete.served = NOW
    listening(listener, 1.0)
    assert urgency(complete, NOW) > urgency(listener, NOW)
    listening(listener, 1.0, NOW + 1.5)
    assert urgency(complete, NOW + 1.5) < urgency(listener, NOW + 1.5)


def test_who_has_plenty_stands_back_only_while_somebody_is_short() -> None:
    bench = Bench(rows=4)
    short, well, rich = (bench.add(2, 200, streaming=True) for _ in range(3))
    complete = bench.add(2, 200)
    bench.ready(short, well, rich, complete)
    complete.served = NOW
    listening(well, 1.0)
    listening(rich, COMFORT_S + 0.1)
    listening(short, NEED_S + 0.01)
    assert set(bench.draw()) == {short, well, rich, complete}
    listening(well, 1.0)
    listening(rich, COMFORT_S + 0.1)
    listening(short, NEED_S - 0.01)
    assert set(bench.draw()) == {short, well}
    complete.served = NOW - COMFORT_S - 0.1
    listening(short, NEED_S - 0.01)
    listening(well, 1.0)
    assert set(bench.draw()) == {short, well, complete}


def test_complete_answers_fill_a_step_up_as_long_as_it_stays_brisk() -> None:
    bench = Bench(rows=4, slots=8, pages=100)
    short, rich = (bench.add(2, 200, streaming=True) for _ in range(2))
    complete = [bench.add(2, 200) for _ in range(4)]
    bench.ready(short, rich, *complete)
    for rows in (1, 2, 3, 4) * 5:
        bench.pace.saw_step(rows, 0.09 * BRISK * FRAME_S * (1 + 3 * rows))  # three rows are brisk, four are not
    for sequence in complete:
        sequence.served = NOW
    listening(rich, COMFORT_S + 0.1)
    listening(short, NEED_S - 0.01)
    assert bench.draw() == [short, *complete[:2]]


@pytest.mark.parametrize(("ahead_s", "expected"), [(COMFORT_S - 0.1, False), (COMFORT_S + 0.1, True)])
def test_when_a_listener_stands_back(ahead_s: float, expected: bool) -> None:
    sequence = Bench().sequence(streaming=True)
    listening(sequence, ahead_s)
    assert stands_back(sequence, NOW) is expected


def test_more_than_the_rows_take_turns() -> None:
    bench = Bench(slots=8, rows=2, pages=100)
    sequences = [bench.add(2, 50) for _ in range(6)]
    for turn in range(30):
        assert len(bench.turn(NOW + turn * 0.1)) == 2
    assert {sequence.launched for sequence in sequences} <= {9, 10, 11}


def test_nobody_draws_before_its_prompt_is_read() -> None:
    bench = Bench(block=16)
    sequence = bench.add(40)
    assert bench.turn() == bench.turn() == []
    assert bench.turn() == [sequence]


# -- the books ---------------------------------------------------------------------------------------------------------


def test_an_idle_scheduler_that_leaks_is_noticed() -> None:
    bench = Bench()
    sequence = bench.add(streaming=True)
    bench.read()
    with pytest.raises(AssertionError, match="waiting or running"):
        bench.scheduler.assert_idle()
    bench.end(sequence)
    bench.scheduler.assert_idle()
    bench.scheduler._free_slots.pop()
    with pytest.raises(AssertionError, match="slots leaked"):
        bench.scheduler.assert_idle()


def test_what_can_never_fit_is_not_taken() -> None:
    bench = Bench(pages=3)
    with pytest.raises(AssertionError, match="4 pages are needed"):
        bench.add(20, 40)
