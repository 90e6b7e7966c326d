"""The whole engine loop under random work, driven by hand: requests come, leave, fail, expire and lose their pages.

Parts without a model (`null_parts`) check every page and every frame. Time is the test's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from duetts.engine.engine import Engine
from duetts.engine.pages import pages_for
from duetts.engine.parts import MAX_FAULTS, Parts
from duetts.engine.playout import ChunkPolicy
from duetts.engine.scheduler import Room
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.errors import EmptyGeneration, EngineFailure, NotReady, Overloaded
from duetts.types import Int32, Sampling, Utterance

from .null_parts import BOOKS, END, FAULTS, Ear, NullDevice, NullEncoder, NullVocoder, solo, solo_bytes

FRAME_S = 0.05
LENGTH = 160  # positions of one sequence
VOICES = [np.random.default_rng(number).integers(0, 99, (1 + BOOKS, length)) for number, length in enumerate((70, 33, 16, 0))]
ENOUGH_TURNS = 20_000


@dataclass(eq=False)
class Asked:
    """A request, what is heard of it, and what the test did to it."""

    utterance: Utterance
    ear: Ear
    sequence: Sequence
    cancelled: bool = False


TEXTS = [np.random.default_rng(100 + number).integers(0, 99, (1 + BOOKS, 50)) for number in range(4)]


@dataclass(frozen=True)
class Request:
    """What a request is like, but for its seed."""

    voice: int
    text: int
    length: int
    frames: int
    streaming: bool
    lead_s: float | None  # of one that continues a request
    timeout_s: float | None
    fault: int
    repeats: int
    told: bool  # the utterance tells which part is the voice's

    def utterance(self, number: int) -> Utterance:
        prompt = np.concatenate((VOICES[self.voice], TEXTS[self.text][:, : self.length]), axis=1).astype(np.int32)
        return Utterance(
            f"r{number}", prompt, Sampling(), number + 1_000_000 * self.fault, self.frames, self.timeout_s, self.streaming,
            shared_positions=VOICES[self.voice].shape[1] if self.told else 0, max_repeats=self.repeats,
            continues=self.lead_s is not None, lead_s=self.lead_s or 0.0,
        )  # fmt: skip


def mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    return st.integers(0, 9).flatmap(lambda number: st.sampled_from(others) if number == 0 else st.just(usual))


REQUESTS = st.builds(
    Request, voice=st.integers(0, 3), text=st.integers(0, 3), length=st.integers(1, 50), frames=st.integers(1, 40),
    streaming=st.booleans(), lead_s=mostly(None, 0.0, 0.3, 5.0), timeout_s=mostly(None, 0.0, 0.3, 2.0),
    fault=mostly(0, *range(1, len(FAULTS) + 1)), repeats=mostly(0, 5), told=st.booleans(),
)  # fmt: skip


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 4), rows=st.integers(1, 5), spare=st.integers(0, 20), block=st.sampled_from([16, 32, 48, 160]),
        lag=st.integers(0, 1), rereads=st.booleans(), quantum=st.sampled_from([None, 1, 3, 4]), codec_lag=st.integers(0, 3),
        queue=st.integers(0, 5), policy=st.builds(ChunkPolicy, st.integers(1, 4), st.integers(1, 8)),
        step_s=st.sampled_from([0.0, 0.001, 0.02, 0.06]), shared_thread=st.booleans(), ending=st.sampled_from(["drained",
    "closed", "broken"]), )  # fmt: skip
    def build(
        self, slots: int, rows: int, spare: int, block: int, lag: int, rereads: bool, quantum: int | None, codec_lag: int,
        queue: int, policy: ChunkPolicy, step_s: float, shared_thread: bool, ending: str,
    ) -> None:  # fmt: skip
        self.now = 1000.0
        self.step_s = step_s
        pages = pages_for(LENGTH) + spare
        self.device = NullDevice(pages, lag=lag, rows=rows, tick=self.tick)
        self.vocoder = NullVocoder(2 * slots, quantum, tick=self.tick, lag=codec_lag)
        self.encoder = NullEncoder()
        room = Room(slots, rows, block, LENGTH, FRAME_S, rereads=rereads, padded=not rereads, shared_thread=shared_thread)
        parts = Parts(self.device, self.vocoder, self.encoder, room, pages, END, queue, policy)
        self.engine = Engine(parts, start=False, clock=lambda: self.now)
        self.device.pool = self.engine.pool
        self.scheduler = self.engine._scheduler
        self.asked: list[Asked] = []
        self.clips: list[tuple[int, Future[Int32]]] = []
        self.seeds = 0
        self.ending = ending
        self.idle_turns = 0

    def tick(self) -> None:
        self.now += self.step_s

    # -- what may happen ---------------------------------------------------------------------------------------------

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            self.seeds += 1
            self.ask(request.utterance(self.seeds))

    def ask(self, utterance: Utterance) -> None:
        parts, ear = self.engine._parts, Ear()
        full = len(self.unheard) >= parts.room.slots + parts.max_queue and not utterance.continues
        try:
            sequence = self.engine.submit(utterance, cast(Channel, ear))
        except Overloaded:
            assert full
        except NotReady:  # nothing but failures in a row, however few, is held to be the device's end
            failed = [one for one in self.asked if one.ear.outcome is not None and one.ear.outcome.reason == "failed"]
            assert len(failed) >= MAX_FAULTS
            assert not self.engine.stats()["alive"]
        else:
            assert not full
            self.asked.append(Asked(utterance, ear, sequence))

    @rule(data=st.data())
    @precondition(lambda self: self.asked)
    def cancel(self, data: Any) -> None:
        asked = data.draw(st.sampled_from(self.asked[-8:]))
        asked.cancelled = asked.cancelled or asked.ear.outcome is None
        self.engine.cancel(asked.sequence)

    @rule(length=st.integers(1, 5), leave=st.booleans())
    def encode(self, length: int, leave: bool) -> None:
        try:
            future = self.engine.encode(np.zeros(length, np.float32))
        except Overloaded:
            assert self.encoder.waiting == 4
        else:
            if leave:
                future.cancel()
            self.clips.append((length, future))

    @rule(seconds=st.sampled_from([0.01, 0.2, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(turns=st.integers(1, 30))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.one_turn()

    # -- what must hold ----------------------------------------------------------------------------------------------

    @property
    def unheard(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.ear.outcome is None]

    def one_turn(self) -> None:
        engine = self.engine
        if not engine._has_work():
            assert not self.unheard, "requests wait and the loop sleeps"
            return
        before = (self.progress(), len(engine._inbox))
        assert engine._turn()
        self.idle_turns = 0 if (self.progress(), 0) != before else self.idle_turns + 1
        assert self.idle_turns == 0, "a turn did nothing"
        self.books()

    def progress(self) -> tuple[int, ...]:
        encoder = self.encoder
        return (
            self.device.calls, self.vocoder.calls, self.vocoder.asked, encoder.waiting, encoder._done, len(self.unheard),
        len(self.engine._flights) )  # fmt: skip

    @invariant()
    def books(self) -> None:
        assert self.device.complaints == self.vocoder.complaints == []
        scheduler, engine = self.scheduler, self.engine
        running = list(scheduler.running)
        engine.pool.assert_sound([sequence.pages for sequence in running])
        slots = [sequence.slot for sequence in running]
        assert sorted([*slots, *scheduler._free_slots]) == list(range(scheduler.room.slots))
        assert all(sequence.slot is None and not sequence.pages for line in scheduler._lines for sequence in line)
        listeners = [sequence for sequence in running if sequence.streaming]
        assert scheduler._listeners == len(listeners)
        assert scheduler._promised == sum(sequence.most_pages for sequence in listeners) <= engine.pool.num_pages
        assert all(len(sequence.pages) <= sequence.most_pages for sequence in running)
        assert engine._open == len(self.unheard)
        assert len(engine._flights) <= self.device.lag
        assert len(self.device._states) <= scheduler.room.slots
        streams = engine._codec._streams.values()
        speaking = [s for s in engine._codec.sequences() if s.finished is None and not s.streaming]
        assert len(speaking) <= scheduler.room.slots, "answers that lost their place hold the codec's slots"
        held = [stream.slot for stream in streams if stream.slot is not None]
        assert sorted([*held, *engine._codec._free]) == list(range(self.vocoder.slots))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        if self.ending == "drained":
            for _ in range(ENOUGH_TURNS):
                if not engine._has_work():
                    break
                self.one_turn()
            assert not engine._flights
        elif self.ending == "broken":
            self.scheduler.choose_rows = None  # type: ignore[assignment]
        engine.close()
        if self.ending != "broken" or not self.asked:
            engine.assert_idle()
        for asked in self.asked:
            self.judge(asked)
        for length, future in self.clips:
            assert future.done()
            assert self.ending != "drained" or future.cancelled() or future.result()[0, 0] == length
        with pytest.raises(NotReady):
            engine.submit(Utterance("late", VOICES[1].astype(np.int32), Sampling(), 0, 1), cast(Channel, Ear()))
        stats = engine.stats()
        note(f"{stats['finished']} {stats['preemptions']} preemptions, {stats['prefix_positions_reused']} reused")

    def judge(self, asked: Asked) -> None:
        utterance, outcome = asked.utterance, asked.ear.outcome
        assert outcome is not None, "no outcome"
        expected, reason = solo(utterance)
        whole = solo_bytes(utterance)
        assert whole.startswith(asked.ear.pcm), "what was heard is not the beginning of the solo run"
        if outcome.reason in ("stop", "length"):
            assert (outcome.reason, outcome.num_frames) == (reason, len(expected))
            assert asked.ear.pcm == whole
            assert outcome.error is None
        elif outcome.reason == "aborted":
            assert asked.cancelled or self.ending != "drained"
        elif outcome.reason == "timeout":
            assert utterance.timeout_s is not None
        elif not expected:
            assert isinstance(outcome.error, EmptyGeneration | EngineFailure)
        else:
            assert isinstance(outcome.error, EngineFailure)
            lost = self.device.lost | self.vocoder.lost
            assert utterance.seed >= 1_000_000 or utterance.seed in lost or self.ending == "broken", (
                "it failed and had no fault"
            )
        assert outcome.timings.total_s >= 0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failures are part of the game; thousands of tracebacks are not."""
    log = logging.getLogger("duetts.engine")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


QUICK = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)  # fmt: skip


def test_the_engine_keeps_its_books_whatever_happens() -> None:
    run_state_machine_as_test(EngineMachine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_engine_keeps_its_books_for_very_long() -> None:
    run_state_machine_as_test(
        EngineMachine, settings=settings(QUICK, max_examples=1500, stateful_step_count=150, derandomize=False)
    )
