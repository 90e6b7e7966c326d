"""Faults of the engine's own threads, and races between them, on parts without a model: nobody waits for ever."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from duetts.engine import codec_worker
from duetts.engine.codec_worker import CodecWorker
from duetts.engine.engine import Engine
from duetts.engine.inprocess import InProcessSpeaker
from duetts.engine.pace import Pace
from duetts.engine.parts import MAX_FAULTS, Parts, Threads
from duetts.engine.playout import ChunkPolicy, Playout
from duetts.engine.scheduler import Room
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.errors import Aborted, EngineFailure, NotReady
from duetts.types import Outcome, Sampling, SpeakerInfo, Utterance
from tests.waiting import LIMIT_S, until

from .null_parts import BOOKS, END, FAULT_FRAME, FAULTS, Ear, NullDevice, NullEncoder, NullVocoder, solo, solo_bytes

INFO = SpeakerInfo("null", 44100, 2048, BOOKS, 160)
PROMPT = np.arange(4 * 20, dtype=np.int32).reshape(4, 20)


class Standing:
    """An encoder's thread that has nothing to do."""

    alive = True

    def close(self) -> None:
        pass


def engine(
    *, threads: bool = True, slots: int = 4, queue: int = 400, lag: int = 0, pages: int = 40, quantum: int | None = None,
    start: bool = True,
) -> Engine:  # fmt: skip
    device, vocoder = NullDevice(pages, lag=lag, rows=slots), NullVocoder(2 * slots, quantum)
    room = Room(slots, slots, 32, 160, 0.05, shared_thread=not threads)
    beside = Threads(Standing()) if threads else None
    return Engine(
        Parts(device, vocoder, NullEncoder(), room, pages, END, queue, ChunkPolicy(2, 4), threads=beside), start=start
    )  # fmt: skip


@pytest.mark.parametrize("threads", [False, True])
def test_threads_that_compute_are_prepared_first(threads: bool) -> None:
    """On a machine of several GPUs that is how each knows which one is meant."""
    own = engine(threads=threads, start=False)
    prepared: list[str] = []
    parts = replace(own._parts, prepare=lambda: prepared.append(threading.current_thread().name))
    own.close()
    own = Engine(parts)
    submit(own, spoken(1, frames=2))[1].wait(LIMIT_S)
    own.close()
    assert sorted(prepared) == ["duetts-codec", "duetts-engine"][not threads :]


def spoken(number: int, frames: int = 30, fault: int = 0, **options: Any) -> Utterance:
    return Utterance(f"r{number}", PROMPT, Sampling(), number + 1_000_000 * fault, frames, **options)


def submit(own: Engine, utterance: Utterance) -> tuple[Ear, threading.Event]:
    heard = threading.Event()
    ear = Ear(on_outcome=heard.set)
    own.submit(utterance, cast(Channel, ear))
    return ear, heard


@pytest.fixture
def owns() -> Iterator[list[Engine]]:
    """Engines that are closed at the end, within a bounded time."""
    mine: list[Engine] = []
    yield mine
    for own in mine:
        closing = threading.Thread(target=own.close, daemon=True)
        closing.start()
        closing.join(LIMIT_S)
        assert not closing.is_alive(), "the engine does not close"


@pytest.mark.parametrize("place", ["_take", "_drop_lost"])
def test_a_fault_of_the_codecs_thread_fails_everybody_also_those_who_had_no_audio_yet(
    owns: list[Engine], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = engine(slots=2)
    owns.append(own)
    launch, breaks = own._device.launch, threading.Event()

    def launched(rows: list[Sequence]) -> Any:
        if own._device.calls > 40:  # type: ignore[attr-defined]
            breaks.wait(LIMIT_S)  # the first have audio, nobody is at the end
        return launch(rows)

    own._device.launch = launched  # type: ignore[method-assign]
    heard = [submit(own, spoken(3 * number, frames=100)) for number in range(12)]

    def broken(*arguments: Any) -> Any:
        raise AssertionError("slots leaked")

    setattr(own._codec, place, broken)
    breaks.set()
    for ear, event in heard:
        assert event.wait(LIMIT_S), "no outcome"
        assert ear.outcome is not None
        assert ear.outcome.reason in ("failed", "length")
    assert any(isinstance(ear.error, EngineFailure) for ear, _ in heard)
    assert not own.stats()["alive"]
    with pytest.raises(NotReady):
        submit(own, spoken(1))
    assert "the codec decodes no more" in caplog.text
    own.close()
    own.assert_idle()


@pytest.mark.parametrize("threads", [False, True])
def test_a_fault_of_the_loop_ends_requests_references_and_leaves_the_engine_closable(
    owns: list[Engine], threads: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own = engine(threads=threads, start=False)
    owns.append(own)
    heard = [submit(own, spoken(3 * number, streaming=bool(number % 2))) for number in range(8)]
    clip = own.encode(np.zeros(1000, np.float32))
    for _ in range(4):
        own._turn()

    def broken(now: float) -> Any:
        raise AssertionError("pages leaked")

    own._scheduler.choose_blocks = broken  # type: ignore[method-assign]
    late = submit(own, spoken(99))
    own._run()
    for ear, event in [*heard, late]:
        assert event.wait(LIMIT_S)
        assert isinstance(ear.error, EngineFailure)
    if not threads:
        assert isinstance(clip.exception(timeout=LIMIT_S), Aborted)
    assert own.stats()["open"] == 0
    assert "the engine's loop ends" in caplog.text


def test_what_a_device_reports_late_harms_nobody_who_had_ended_before() -> None:
    """With the host one frame behind, the step after somebody's last frame still has a row of it."""
    own = engine(threads=False, lag=1, start=False)
    ending = next(number for number in range(1, 200, 3) if number % 29 == FAULT_FRAME - 1)
    failing = spoken(3, fault=FAULTS.index("landing") + 1)
    assert solo(spoken(ending))[1] == "stop"
    (well, _), (bad, _) = submit(own, spoken(ending)), submit(own, failing)
    while own._has_work():
        own._turn()
    assert isinstance(bad.error, EngineFailure)
    assert well.error is None
    assert well.pcm == solo_bytes(spoken(ending))


@pytest.mark.parametrize("kind", ["mute", "unsound", "launch"])
@pytest.mark.parametrize("lag", [0, 1])
def test_of_those_computed_together_one_fails_alone(kind: str, lag: int) -> None:
    own = engine(threads=False, lag=lag, start=False)
    work = [spoken(number) for number in (3, 6, 9)]
    (bad, _), *others = [submit(own, one) for one in [spoken(12, fault=FAULTS.index(kind) + 1), *work]]
    while own._has_work():
        own._turn()
    assert isinstance(bad.error, EngineFailure)
    assert [bytes(ear.pcm) for ear, _ in others] == [solo_bytes(one) for one in work]
    own.assert_idle()
    own.close()


class Dead:
    """A step under way that comes to nothing."""

    def ready(self) -> bool:
        return True

    def __call__(self) -> Any:
        raise RuntimeError("the device is lost")


def lost(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("the device is lost")


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("part", ["read", "launch", "landing", "vocoder"])
def test_a_device_that_has_failed_for_good_ends_the_engine(owns: list[Engine], part: str, lag: int) -> None:
    """However late it tells. Nobody waits for ever, and nothing more is taken, so that the process is started anew."""
    own = engine(lag=lag)
    owns.append(own)
    assert submit(own, spoken(1))[1].wait(LIMIT_S)
    if part == "vocoder":
        own._codec._vocoder.start = lost  # type: ignore[method-assign]
    else:
        setattr(own._device, "read" if part == "read" else "launch", (lambda rows: Dead()) if part == "landing" else lost)
    for number in range(MAX_FAULTS):
        assert own.stats()["alive"]
        prompt = np.full((4, 20), number, np.int32)  # no part of it is known
        ear, heard = submit(own, replace(spoken(3), prompt=prompt))
        assert heard.wait(LIMIT_S)
        assert isinstance(ear.error, EngineFailure)
    assert not own.stats()["alive"]
    with pytest.raises(NotReady):
        submit(own, spoken(1))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", ["read", "launch"])
def test_requests_that_fail_beside_one_that_is_served_say_nothing_of_the_device(kind: str, lag: int) -> None:
    own = engine(threads=False, lag=lag, start=False, slots=5)
    good, _ = submit(own, spoken(3, frames=100))
    bad = [spoken(3 * number, fault=FAULTS.index(kind) + 1) for number in range(4, 4 + 4 * MAX_FAULTS)]
    ears = []
    for one in [bad[start : start + 4] for start in range(0, len(bad), 4)]:  # several in the same turns
        ears += [submit(own, each)[0] for each in one]
        for _ in range(8):
            own._turn()
        assert own.stats()["alive"]
    assert all(isinstance(ear.error, EngineFailure) for ear in ears)
    while own._has_work():
        own._turn()
    assert bytes(good.pcm) == solo_bytes(spoken(3, frames=100))
    own.close()


def test_one_speech_between_failures_shows_that_the_device_lives() -> None:
    own = engine(threads=False, start=False)
    broken = [FAULTS.index("read") + 1] * (MAX_FAULTS - 1)
    for number, fault in enumerate([*broken, 0, *broken, 0]):
        submit(own, spoken(3 * number + 3, fault=fault))
        while own._has_work():
            own._turn()
        assert own.stats()["alive"]
    own.close()


def worker(slots: int) -> CodecWorker:
    return CodecWorker(NullVocoder(slots), ChunkPolicy(2, 4), Pace(), lambda sequence: None)


def sequence(number: int) -> Sequence:
    return Sequence(spoken(number, streaming=True), cast(Channel, Ear()), Playout(0.05))


def test_frames_that_come_between_a_step_and_its_wait_are_not_slept_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_worker, "LOOK_S", 10 * LIMIT_S)
    own, one = worker(2), sequence(1)
    own.push([(one, np.zeros(BOOKS, np.int32))])
    assert not own.step()
    own.push([(one, np.zeros(BOOKS, np.int32))])
    waiting = threading.Thread(target=own._wait, daemon=True)
    waiting.start()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    assert own.step()


def test_an_ended_stream_without_a_slot_is_waited_for_without_haste() -> None:
    own, holder, waiting = worker(1), sequence(1), sequence(2)
    for one in (holder, waiting):
        own.push([(one, np.zeros(BOOKS, np.int32))] * 2)
    assert own.step()
    waiting.finished = "stop"
    own.end(waiting)
    steps = 0
    step = own.step

    def counted() -> bool:
        nonlocal steps
        steps += 1
        return step()

    own.step = counted  # type: ignore[method-assign]
    own.start(lambda: None)
    time.sleep(0.3)
    assert steps < 100
    holder.finished = "stop"
    own.end(holder)
    own.close()
    assert own.idle


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
async def test_many_callers_on_real_threads(owns: list[Engine], threads: bool, lag: int) -> None:
    """Some leave, some fail, pages are short; whoever stays hears its solo run."""
    own = engine(threads=threads, lag=lag, pages=24, quantum=4 if threads else None)
    owns.append(own)
    speaker = InProcessSpeaker(own, INFO)
    chance = random.Random(lag)
    counts = {"stayed": 0, "left": 0, "failed": 0}

    async def one(number: int) -> None:
        await asyncio.sleep(chance.random() * 0.3)
        fault = chance.choice([0] * 9 + [FAULTS.index(kind) + 1 for kind in ("read", "launch", "unsound", "mute")])
        utterance = spoken(number, chance.randrange(1, 60), fault, streaming=chance.random() < 0.5)
        leave = chance.randrange(0, 12) if chance.random() < 0.4 else None
        pcm = b""
        stream = speaker.speak(utterance)
        async for item in stream:
            if isinstance(item, Outcome):
                failed = isinstance(item.error, EngineFailure) and fault > 0
                assert failed or item.num_frames == 0 or pcm == solo_bytes(utterance)
                counts["failed" if failed else "stayed"] += 1
                return
            pcm += item.pcm
            assert solo_bytes(utterance).startswith(pcm)
            if leave is not None and len(pcm) >= leave * 16:
                counts["left"] += 1
                await stream.aclose()
                return

    await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(1, 300))), LIMIT_S)
    assert sum(counts.values()) == 299
    assert min(counts.values()) > 10
    await until(lambda: own.stats()["open"] == 0)
    own.assert_idle()
    assert own._device.complaints == own._codec._vocoder.complaints == []  # type: ignore[attr-defined]
