"""The codec worker with more streams than a call or its slots can take: every frame is decoded once, in order."""

from __future__ import annotations

from collections import Counter
from typing import cast

import numpy as np
import pytest

from duetts.engine.codec_worker import MAX_STREAMS, CodecWorker
from duetts.engine.pace import Pace
from duetts.engine.parts import Decoded, Decoding
from duetts.engine.playout import ChunkPolicy, Playout
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.errors import EngineFailure, NotReady
from duetts.types import Chunk, Int32, Sampling, Utterance


class Ear:
    def __init__(self) -> None:
        self.heard: list[int] = []

    def put(self, item: Chunk) -> None:
        self.heard += item.codes[0].tolist()

    def wake(self) -> None:
        pass


class Vocoder:
    quantum: int | None = None

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.calls: list[int] = []

    def reset(self, slot: int) -> None:
        pass

    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> Decoding:
        assert len(set(slots)) == len(slots) == len(codes), "a slot is used twice in one call"
        self.calls.append(len(slots))
        return Decoded([bytes(2 * codes.shape[2])] * len(slots))


def sequence(number: int, *, streaming: bool, first_chunk: int = 0) -> tuple[Sequence, Ear]:
    ear = Ear()
    prompt = np.zeros((2, 4), np.int32)
    utterance = Utterance(str(number), prompt, Sampling(), 0, 20, streaming=streaming, first_chunk=first_chunk)
    return Sequence(utterance, cast(Channel, ear), Playout(0.05)), ear


@pytest.mark.parametrize(("streams", "slots"), [(MAX_STREAMS + 37, 2 * MAX_STREAMS), (40, 7)])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_frame_is_decoded_once_and_in_order(streams: int, slots: int, streaming: bool) -> None:
    ended: Counter[Sequence] = Counter()
    vocoder = Vocoder(slots)
    worker = CodecWorker(vocoder, ChunkPolicy(2, 4), Pace(), lambda sequence: ended.update([sequence]))
    pairs = [sequence(number, streaming=streaming) for number in range(streams)]
    for frame in range(6):
        worker.push((each, np.array([frame], np.int32)) for each, _ in pairs)
    for each, _ in pairs:
        each.finished = "stop"
        worker.end(each)
    for _ in range(10 * streams):
        worker.step()
    assert [ear.heard for _, ear in pairs] == [list(range(6))] * streams
    assert [ended[each] for each, _ in pairs] == [1] * streams
    assert max(vocoder.calls) <= min(MAX_STREAMS, slots)
    assert worker.idle


def push(worker: CodecWorker, each: Sequence, frames: int) -> None:
    for frame in range(each.playout.handed, each.playout.handed + frames):
        worker.push([(each, np.array([frame], np.int32))])


def test_small_chunks_of_one_listener_do_not_make_those_of_others_small() -> None:
    vocoder, now = Vocoder(200), 0.0
    worker = CodecWorker(vocoder, ChunkPolicy(2, 8), Pace(), lambda sequence: None, lambda: now)
    complete, ear = zip(*(sequence(number, streaming=False) for number in range(60)), strict=True)
    listeners = [sequence(number, streaming=True)[0] for number in range(3)]
    for each in complete:
        push(worker, each, 8)
    for each in listeners:
        push(worker, each, 2)
    assert worker.step()
    assert vocoder.calls == [3, 60]
    assert [one.heard for one in ear] == [list(range(8))] * 60


def test_a_small_call_that_nobody_needs_waits_for_company() -> None:
    vocoder, now = Vocoder(200), 0.0
    worker = CodecWorker(vocoder, ChunkPolicy(2, 8), Pace(), lambda sequence: None, lambda: now)
    (complete, _), (listener, _) = sequence(0, streaming=False), sequence(1, streaming=True)
    push(worker, complete, 8)
    push(worker, listener, 2)
    assert worker.step()
    assert vocoder.calls == [1]
    assert listener.playout.handed == 2
    assert worker.step()
    assert (vocoder.calls, complete.playout.handed) == ([1, 1], 8)


def test_a_listener_who_waits_is_not_handed_less_than_what_a_call_computes_anyway() -> None:
    """One frame at a time, each in a call of four, made whoever was late ever later."""
    vocoder, now = Vocoder(4), 0.0
    vocoder.quantum = 4
    worker = CodecWorker(vocoder, ChunkPolicy(2, 8), Pace(), lambda sequence: None, lambda: now)
    listener, ear = sequence(0, streaming=True)
    push(worker, listener, 2)
    assert worker.step()
    assert ear.heard == [0, 1]
    now, worker.made_s = 9.0, 0.05  # nothing is left in hand
    push(worker, listener, 10)
    handed = []
    while worker.step():
        handed.append(len(ear.heard))
    assert handed == [4, 8, 12]
    push(worker, listener, 3)
    assert not worker.step()  # late or not, the fourth comes with the next step
    push(worker, listener, 1)
    assert worker.step()
    assert len(ear.heard) == 16


class TimedVocoder(Vocoder):
    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> Decoding:
        return Decoded(super().start(slots, codes, keep=keep).result(), 0.04)


def test_a_part_of_a_chunk_does_not_make_the_codec_look_slow() -> None:
    """Listeners were kept waiting since openings of two frames in calls of four counted as half as fast."""
    vocoder, pace = TimedVocoder(4), Pace()
    vocoder.quantum = 4
    worker = CodecWorker(vocoder, ChunkPolicy(2, 8), pace, lambda sequence: None, lambda: 0.0)
    listener, ear = sequence(0, streaming=True)
    push(worker, listener, 2)
    assert worker.step()
    assert ear.heard == [0, 1]
    assert pace.codec_frame_s == pytest.approx(0.01)


@pytest.mark.parametrize(("asked", "handed"), [(0, 2), (1, 1), (4, 4), (5, 5), (100, 8)])
def test_a_listener_may_say_how_many_frames_come_first(asked: int, handed: int) -> None:
    worker = CodecWorker(Vocoder(4), ChunkPolicy(2, 8), Pace(), lambda sequence: None, lambda: 0.0)
    (listener, _), (complete, _) = (
        sequence(0, streaming=True, first_chunk=asked),
        sequence(1, streaming=False, first_chunk=asked),
    )
    first = []
    for _ in range(8):
        for each in (listener, complete):
            worker.push([(each, np.zeros(1, np.int32))])
        worker.step()
        first += [listener.playout.handed] if listener.playout.handed and not first else []
        assert complete.playout.handed in (0, 8)
    assert first == [handed]


class Held:
    """A call that is done when the test says so."""

    seconds = 0.125

    def __init__(self, sounds: list[bytes | None], fault: Exception | None = None) -> None:
        self.done = False
        self.waited = False
        self._sounds = sounds
        self.fault = fault

    def ready(self) -> bool:
        return self.done

    def result(self) -> list[bytes | None]:
        self.waited = not self.done
        if self.fault is not None:
            raise self.fault
        return self._sounds


class LateVocoder(Vocoder):
    """Its calls are under way until they are let go."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.held: list[Held] = []
        self.slots_of: list[list[int]] = []

    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> Held:
        sounds = super().start(slots, codes, keep=keep).result()
        self.slots_of.append(slots)
        self.held.append(Held(sounds))
        return self.held[-1]


def late_worker(slots: int = 8) -> tuple[CodecWorker, LateVocoder, Pace, list[Sequence]]:
    vocoder, pace, ended = LateVocoder(slots), Pace(), list[Sequence]()
    return CodecWorker(vocoder, ChunkPolicy(2, 2), pace, ended.append, lambda: 0.0), vocoder, pace, ended


def test_calls_are_started_without_waiting_and_handed_over_in_their_order() -> None:
    worker, vocoder, pace, ended = late_worker()
    (first, first_ear), (second, second_ear) = sequence(0, streaming=True), sequence(1, streaming=True)
    push(worker, first, 4)
    assert worker.step()
    push(worker, second, 2)
    assert worker.step()
    assert vocoder.calls == [1, 1], "a stream was cut again while a call had it, or another one had to wait for it"
    vocoder.held[1].done = True
    assert not worker.step()
    assert first_ear.heard == second_ear.heard == []
    vocoder.held[0].done = True
    assert worker.step()
    assert (first_ear.heard, second_ear.heard) == ([0, 1], [0, 1])
    assert vocoder.calls == [1, 1, 1]
    assert vocoder.slots_of[2] == vocoder.slots_of[0]
    assert not any(held.waited for held in vocoder.held)
    assert pace.codec_frame_s == pytest.approx(0.125 / 2)
    for each in (first, second):
        each.finished = "stop"
        worker.end(each)
    assert worker.step()
    assert ended == [second]
    assert not worker.idle
    assert worker.step(patient=True)
    assert vocoder.held[2].waited
    assert worker.step()
    assert (ended, first_ear.heard) == ([second, first], [0, 1, 2, 3])
    assert worker.idle


def test_a_fault_that_comes_late_loses_the_streams_of_its_call() -> None:
    worker, vocoder, _, ended = late_worker()
    (bad, bad_ear), (good, good_ear) = sequence(0, streaming=True), sequence(1, streaming=True)
    push(worker, bad, 2)
    worker.step()
    push(worker, good, 2)
    worker.step()
    vocoder.held[0].fault = RuntimeError("the device lost its mind")
    for held in vocoder.held:
        held.done = True
    assert worker.step()
    assert bad.failure is not None
    assert good.failure is None
    assert (bad_ear.heard, good_ear.heard) == ([], [0, 1])
    bad.finished = "failed"
    worker.end(bad)
    assert worker.step()
    assert ended == [bad]


def test_a_stream_that_is_aborted_ends_when_its_call_has_landed_and_says_no_more() -> None:
    worker, vocoder, _, ended = late_worker(slots=1)
    (left, ear), (next_one, next_ear) = sequence(0, streaming=True), sequence(1, streaming=True)
    push(worker, left, 2)
    worker.step()
    left.finished = "aborted"
    worker.end(left)
    push(worker, next_one, 2)
    assert not worker.step()
    assert ended == []
    vocoder.held[0].done = True
    assert worker.step()
    assert (ended, ear.heard) == ([left], [])
    assert vocoder.calls == [1, 1], "its slot serves again in the same step"
    vocoder.held[1].done = True
    assert worker.step()
    assert next_ear.heard == [0, 1]


def test_a_worker_that_gives_up_forgets_its_calls() -> None:
    worker, vocoder, _, ended = late_worker()
    lost, ear = sequence(0, streaming=True)
    push(worker, lost, 2)
    worker.step()
    worker.end(lost)
    worker.give_up(RuntimeError("the worker itself is broken"))
    assert ended == [lost]
    assert lost.failure is not None
    vocoder.held[0].done = True
    assert not worker.step()
    assert ear.heard == []
    assert worker.idle


def test_no_more_calls_are_under_way_than_the_vocoder_takes() -> None:
    worker, vocoder, _, _ = late_worker()
    streams = [sequence(number, streaming=True) for number in range(3)]
    worker.allow(2)
    for each, _ in streams:
        push(worker, each, 2)
        worker.step()
    assert vocoder.calls == [1, 1], "a third call was made"
    vocoder.held[0].done = True
    assert worker.step()
    assert vocoder.calls == [1, 1, 1]
    for held in vocoder.held:
        held.done = True
    assert worker.step()
    assert [ear.heard for _, ear in streams] == [[0, 1]] * 3


def test_a_vocoder_that_is_lost_costs_the_streams_that_it_held() -> None:
    worker, vocoder, _, ended = late_worker()
    (held, held_ear), (flying, flying_ear), (waiting, waiting_ear) = (sequence(number, streaming=True) for number in range(3))
    push(worker, held, 2)
    worker.step()
    vocoder.held[0].done = True
    worker.step()
    push(worker, flying, 2)
    worker.step()
    worker.lose(EngineFailure("the codec process has ended"), until=9.0)
    push(worker, held, 2)
    push(worker, waiting, 2)
    vocoder.held[1].fault, vocoder.held[1].done = EngineFailure("the codec process has ended"), True
    worker.step()
    assert vocoder.calls == [1, 1]
    assert [one.verdict(0.0) for one in (held, flying, waiting)] == ["failed", "failed", None]
    worker.allow(2)
    worker.step()
    assert vocoder.calls == [1, 1, 1], "the one that had not begun begins now, and nobody else goes on"
    vocoder.held[2].done = True
    for one, reason in ((held, "failed"), (flying, "failed"), (waiting, "stop")):
        one.finished = reason  # type: ignore[assignment]
        worker.end(one)
    worker.step()
    assert set(ended) == {held, flying, waiting}
    assert (held_ear.heard, flying_ear.heard, waiting_ear.heard) == ([0, 1], [], [0, 1])
    assert worker.idle


def test_a_vocoder_that_does_not_come_back_in_time_costs_the_others_too() -> None:
    vocoder, now = Vocoder(4), 0.0
    worker = CodecWorker(vocoder, ChunkPolicy(2, 8), Pace(), lambda sequence: None, lambda: now)
    early, late = sequence(0, streaming=True)[0], sequence(1, streaming=True)[0]
    worker.lose(EngineFailure("the codec process has ended"), until=5.0)
    push(worker, early, 2)
    worker.step()
    assert early.failure is None
    now = 5.0
    push(worker, late, 2)
    worker.step()
    assert vocoder.calls == []
    assert isinstance(early.failure, EngineFailure)
    assert isinstance(late.failure, EngineFailure)


class AbsentVocoder(Vocoder):
    """Has gone away at the first calls; nobody has said so yet."""

    def __init__(self, slots: int, quantum: int | None, absences: int) -> None:
        super().__init__(slots)
        self.quantum = quantum
        self._absences = absences

    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> Decoding:
        if self._absences:
            self._absences -= 1
            raise NotReady("the codec process is not up")
        return super().start(slots, codes, keep=keep)


@pytest.mark.parametrize("quantum", [None, 4])
def test_calls_that_nobody_took_are_made_again(quantum: int | None) -> None:
    worker = CodecWorker(AbsentVocoder(2, quantum, 5), ChunkPolicy(2, 4), Pace(), lambda sequence: None, lambda: 0.0)
    pairs = [sequence(number, streaming=number % 2 == 0) for number in range(4)]
    for one, _ in pairs:
        for frame in range(10):
            worker.push([(one, np.array([frame], np.int32))])
        one.finished = "stop"
        worker.end(one)
    for _ in range(60):
        worker.step()
    assert [ear.heard for _, ear in pairs] == [list(range(10))] * 4
    assert not any(one.failure for one, _ in pairs)
    assert worker.idle
