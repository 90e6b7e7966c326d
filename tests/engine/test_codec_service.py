"""Both ends of the codec's socket in one process, with vocoders that only remember: order, credit, faults."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq.asyncio

from duetts.engine import wire
from duetts.engine.codec_service import CREDIT, CREDIT_OF_ONE, CodecService
from duetts.engine.host import DEAD, Host, Started
from duetts.engine.link import Link
from duetts.engine.parts import MAX_FAULTS, DecodeCall, Decoded, Decoding
from duetts.engine.wire import Message
from duetts.errors import Aborted, EngineFailure, NotReady, WireError
from duetts.types import Float32, Int32
from tests.waiting import LIMIT_S, until

from .fake_engine import CODEBOOKS, FRAME, INFO
from .test_remote_link import LIFE, QUICK, Raw

SLOTS, VOCABULARY = 4, (100, 50)


class Held:
    """A call that is done when the test says so."""

    seconds = 0.25

    def __init__(self, sounds: list[bytes | None]) -> None:
        self._sounds = sounds
        self.done = threading.Event()

    def ready(self) -> bool:
        return self.done.is_set()

    def result(self) -> list[bytes | None]:
        assert self.done.wait(LIMIT_S)
        return self._sounds


class Vocoder:
    """Every sample of a frame is its first code; a first code of 99 raises, one of 98 has no sound."""

    def __init__(self, quantum: int | None = None) -> None:
        self.quantum = quantum
        self.slots = SLOTS
        self.log: list[Any] = []
        self.held: list[Held] | None = None
        self.away = False
        self.gate = threading.Event()
        self.gate.set()

    def reset(self, slot: int) -> None:
        self.log.append(slot)

    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> Decoding:
        assert self.gate.wait(LIMIT_S)
        self.log.append((slots, codes[:, 0].tolist(), keep))
        if self.away:
            raise NotReady("away")
        if (codes == 99).any():
            raise RuntimeError("the device lost its mind")
        sounds = [None if 98 in row else sound(row) for row in codes[:, 0].tolist()]
        if self.held is None:
            return Decoded(sounds)
        self.held.append(Held(sounds))
        return self.held[-1]


class Encoder:
    """An encoder that its owner must step."""

    def __init__(self) -> None:
        self.jobs: list[Future[Int32]] = []
        self.closed = False
        self.fault: Exception | None = None

    @property
    def waiting(self) -> int:
        return len(self.jobs)

    def submit(self, wave: Float32) -> Future[Int32]:
        if self.closed:
            raise NotReady("closed")
        self.jobs.append(Future())
        return self.jobs[-1]

    def step(self) -> bool:
        if self.fault is not None:
            raise self.fault
        self.jobs.pop(0).set_result(np.full((CODEBOOKS, 2), 7, np.int32))
        return True

    def close(self) -> None:
        self.closed = True
        for job in self.jobs:
            job.set_exception(Aborted("closed"))
        self.jobs.clear()


def sound(row: list[int]) -> bytes:
    return np.repeat(np.array(row, "<i2"), FRAME).tobytes()


def call(*rows: list[int], slots: list[int] | None = None, fresh: list[int] | None = None, keep: bool = True) -> DecodeCall:
    codes = np.zeros((len(rows), CODEBOOKS, len(rows[0])), np.int32)
    codes[:, 0] = rows
    chosen = list(range(len(rows))) if slots is None else slots
    return DecodeCall(chosen, chosen if fresh is None else fresh, codes, keep)


@asynccontextmanager
async def served(tmp_path: Path, vocoder: Vocoder, encoder: Encoder) -> AsyncIterator[tuple[CodecService, Link, Raw]]:
    """A service behind a host, a link to it, and a second client."""
    address = f"ipc://{tmp_path}/c"
    service = CodecService(INFO, vocoder, encoder, None)

    async def start() -> Started:
        return Started(service, VOCABULARY)

    host = Host(address, LIFE, QUICK)
    running = asyncio.create_task(host.run(start))
    context = zmq.asyncio.Context()
    link, raw = Link(context, address, LIFE, lambda: None), Raw(context, address)
    link.beat()
    await until(lambda: link.state == "ready")
    try:
        yield service, link, raw
        host.end()
        await asyncio.wait_for(running, LIMIT_S)
    finally:
        await link.close()
        context.destroy(linger=0)


def send(link: Link, one: DecodeCall) -> "asyncio.Task[Decoded]":
    return asyncio.create_task(link.decode(one))


async def answers(*calls: "asyncio.Task[Decoded]") -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), LIMIT_S)


async def test_calls_are_begun_in_their_order_and_come_back_as_they_were(tmp_path: Path) -> None:
    vocoder = Vocoder()
    async with served(tmp_path, vocoder, Encoder()) as (_, link, _):
        made = await answers(
            send(link, call([1, 2], [3, 4], slots=[2, 0])),
            send(link, call([5], slots=[2], fresh=[], keep=False)),
            send(link, call([6], [98], [7], slots=[3, 1, 0], fresh=[3, 1])),
        )
        assert [each.sounds for each in made] == [[sound([1, 2]), sound([3, 4])], [sound([5])], [sound([6]), None, sound([7])]]
        assert all(each.seconds >= 0 for each in made)
        assert vocoder.log == [
            2, 0, ([2, 0], [[1, 2], [3, 4]], True),
            ([2], [[5]], False),
            3, 1, ([3, 1, 0], [[6], [98], [7]], True),
        ]  # fmt: skip
        assert link.load == 0
        await until(lambda: (link.stats["calls"], link.stats["frames"]) == (3, 8))


async def test_a_call_that_raises_is_lost_alone(tmp_path: Path) -> None:
    async with served(tmp_path, Vocoder(), Encoder()) as (_, link, _):
        bad, good = await answers(send(link, call([99])), send(link, call([3])))
        assert isinstance(bad, EngineFailure)
        assert "RuntimeError" in str(bad)
        assert good.sounds == [sound([3])]


async def test_a_device_that_fails_again_and_again_ends_the_process(tmp_path: Path) -> None:
    """A call that succeeds between shows that the failures were the calls' own; errors of ours say nothing of the device."""
    vocoder = Vocoder()
    service = CodecService(INFO, vocoder, Encoder(), None)

    async def start() -> Started:
        return Started(service, VOCABULARY)

    async def fail(times: int, first: int = 99) -> None:
        for _ in range(times):
            with pytest.raises((RuntimeError, NotReady)):
                await service.decode(call([first]))

    running = asyncio.create_task(Host(f"ipc://{tmp_path}/c", LIFE, QUICK).run(start))
    await fail(MAX_FAULTS - 1)
    await service.decode(call([3]))
    await fail(MAX_FAULTS - 1)
    vocoder.away = True
    await fail(MAX_FAULTS, 3)
    assert service.stats()["alive"]
    vocoder.away = False
    await fail(1)
    assert not service.stats()["alive"]
    assert await asyncio.wait_for(running, LIMIT_S) == DEAD


async def test_calls_under_way_on_a_device_do_not_hold_up_the_next_ones(tmp_path: Path) -> None:
    vocoder = Vocoder()
    vocoder.held = []
    async with served(tmp_path, vocoder, Encoder()) as (service, link, _):
        futures = [send(link, call([number], slots=[number])) for number in range(3)]
        await until(lambda: len(vocoder.held or []) == 3)  # all are begun while none is done
        assert service.stats()["open_calls"] == 3
        for held in vocoder.held:
            held.done.set()
        assert [(each.sounds, each.seconds) for each in await answers(*futures)] == [([sound([n])], 0.25) for n in range(3)]


class Touched:
    """A call that notes which threads touch it; the first time it is asked it is not ready."""

    def __init__(self, threads: set[int], is_ready: bool) -> None:
        self._threads, self._is_ready = threads, is_ready

    @property
    def seconds(self) -> float:
        self._threads.add(threading.get_ident())
        return 0.1

    def ready(self) -> bool:
        self._threads.add(threading.get_ident())
        return self._is_ready

    def result(self) -> list[bytes | None]:
        self._threads.add(threading.get_ident())
        return [sound([1])]


async def test_only_threads_that_have_chosen_the_device_touch_its_calls() -> None:
    """Marks of a GPU that are asked for by another thread would open a context on the first one."""
    prepared, touched = set[int](), set[int]()

    class Marked(Vocoder):
        def start(self, slots: list[int], codes: Int32, *, keep: bool) -> Decoding:
            touched.add(threading.get_ident())
            return Touched(touched, is_ready=bool(codes.any()))

    service = CodecService(INFO, Marked(), Encoder(), None, lambda: prepared.add(threading.get_ident()))
    try:
        for row in ([0], [1]):
            made = await service.decode(call(row))
            assert (made.sounds, made.seconds) == ([sound([1])], 0.1)
    finally:
        await service.close()
    assert touched == prepared
    assert len(prepared) == 2
    assert threading.get_ident() not in touched


async def test_a_connection_that_ends_fails_what_is_open(tmp_path: Path) -> None:
    vocoder = Vocoder()
    async with served(tmp_path, vocoder, Encoder()) as (_, link, _):
        vocoder.gate.clear()
        waiting = send(link, call([1]))
        await until(lambda: link.num_calls == 1)
        link.fail(EngineFailure("codec 0 ended with code -9"))
        late = send(link, call([2]))
        vocoder.gate.set()
        found = await answers(waiting, late)
        assert [str(each) for each in found] == ["codec 0 ended with code -9", "the codec process: the process has just ended"]


async def test_references_are_encoded_between_calls(tmp_path: Path) -> None:
    encoder = Encoder()
    async with served(tmp_path, Vocoder(), encoder) as (_, link, _):
        codes = await asyncio.gather(*(link.encode(np.ones(16, np.float32)) for _ in range(3)))
        assert [each.tolist() for each in codes] == [[[7, 7]] * CODEBOOKS] * 3
        encoder.fault = ValueError("a fault of the program")
        with pytest.raises(Aborted):  # nobody waits for ever, and the process is started anew
            await asyncio.wait_for(link.encode(np.ones(16, np.float32)), LIMIT_S)
        await until(lambda: not link.stats["alive"] or link.failed)


async def test_nothing_that_is_sent_reaches_the_device_out_of_range(tmp_path: Path) -> None:
    vocoder = Vocoder()
    good = wire.decode(1, call([1]))
    async with served(tmp_path, vocoder, Encoder()) as (_, link, raw):
        for values, parts in (
            ({"slots": []}, good.parts), ({"slots": [0, 0]}, good.parts * 2), ({"slots": [SLOTS]}, good.parts),
            ({"slots": [[0]]}, good.parts), ({"slots": [True]}, good.parts), ({"fresh": [1]}, good.parts),
            ({"keep": 1}, good.parts), ({}, (b"abc",)), ({}, (b"",)), ({}, ()),
            ({}, wire.decode(1, call([VOCABULARY[0]])).parts), ({}, (np.full(CODEBOOKS, -1, "<i4").tobytes(),)),
            ({}, (np.full(CODEBOOKS, VOCABULARY[1], "<i4").tobytes(),)),
        ):  # fmt: skip
            await raw.send(Message("decode", {**good.values, **values}, parts))
            assert isinstance(await raw.refusal(), WireError), (values, parts)
        await raw.send(Message("speak", {"id": 2, "utterance": {}}, good.parts))
        assert "does not speak" in str(await raw.refusal())
        assert vocoder.log == []
        (made,) = await answers(send(link, call([4])))
        assert made.sounds == [sound([4])]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"finite": [True]}, (bytes(2 * FRAME - 1),)), ({"finite": [True]}, ()), ({"finite": [False]}, (bytes(2 * FRAME),)),
        ({"finite": [True, False]}, (bytes(2 * FRAME),)), ({"finite": 1}, (bytes(2 * FRAME),)),
        ({"finite": [True], "seconds": "long"}, (bytes(2 * FRAME),)),
    ],
)  # fmt: skip
def test_sounds_that_are_not_those_of_the_call_are_refused(values: dict[str, Any], parts: tuple[bytes, ...]) -> None:
    with pytest.raises(WireError):
        wire.read_sounds(Message("sounds", values, parts), call([1]), FRAME)


def test_how_many_calls_an_engine_may_have_follows_from_the_device() -> None:
    credits = [CodecService(INFO, Vocoder(quantum), Encoder(), None).stats()["credit"] for quantum in (4, None)]
    assert credits == [CREDIT_OF_ONE, CREDIT]
