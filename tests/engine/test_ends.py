"""How requests end: when their place is free, who may still end them, and that nobody waits for ever."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetts.engine.inprocess import InProcessSpeaker
from duetts.errors import Aborted, DeadlineExceeded, EngineFailure, NotReady, Overloaded
from duetts.types import Chunk, Int32, Sampling, Utterance
from tests.waiting import LIMIT_S, holding, until

from .test_engine import collect, prompts, settled, speaker

__all__ = ["prompts"]


class Gate:
    """Holds the codec's thread before each call while it is shut."""

    def __init__(self, own: InProcessSpeaker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.holds = False
        self.open = threading.Event()
        self.open.set()
        self._start = own._engine._codec._vocoder.start
        monkeypatch.setattr(own._engine._codec._vocoder, "start", self._held)

    def _held(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        self.holds = True
        self.open.wait(LIMIT_S)
        self.holds = False
        return self._start(*arguments, **options)


def spoken(prompt: Int32, frames: int, **options: Any) -> Utterance:
    return Utterance("r", prompt, Sampling(), 1, frames, **options)


async def all_frames_drawn(own: InProcessSpeaker, frames: int) -> None:
    await until(lambda: own.stats()["frames"] >= frames and not own.stats()["running"])


async def test_a_place_is_taken_until_the_last_audio_is_out(
    endless_folder: Path, prompts: list[Int32], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A codec slower than the model must not gather a line without a bound."""
    async with speaker(endless_folder, max_num_seqs=1, max_queue=1) as own:
        gate = Gate(own, monkeypatch)
        gate.open.clear()
        running = [asyncio.ensure_future(collect(own, spoken(prompts[0], 4))) for _ in range(2)]
        await all_frames_drawn(own, 8)
        assert own.stats()["open"] == 2
        with pytest.raises(Overloaded):
            await collect(own, spoken(prompts[0], 4))
        gate.open.set()
        assert [outcome.reason for _, outcome in await asyncio.gather(*running)] == ["length", "length"]
        assert own.stats()["open"] == 0
        assert own.stats()["finished"] == {"length": 2}
        await settled(own)


@pytest.mark.parametrize("ending", ["left", "late", "closed"])
async def test_frames_that_wait_for_the_codec_are_dropped_with_their_request(
    endless_folder: Path, prompts: list[Int32], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    async with speaker(endless_folder) as own:
        gate = Gate(own, monkeypatch)
        stream = own.speak(spoken(prompts[0], 100, timeout_s=1000.0 if ending == "late" else None))
        assert isinstance(await anext(stream), Chunk)
        gate.open.clear()
        await all_frames_drawn(own, 100)
        called = gate.calls
        if ending == "left":
            await stream.aclose()
        elif ending == "late":
            monkeypatch.setattr(own._engine._codec, "_clock", lambda: time.monotonic() + 2000)
        closing = asyncio.ensure_future(own.close() if ending == "closed" else asyncio.sleep(0))
        if ending == "closed":
            await until(lambda: own._engine._draining)
            await until(lambda: all(one.cancelled for one in own._engine._codec.sequences()))
        gate.open.set()
        await asyncio.wait_for(closing, LIMIT_S)
        if ending != "left":
            items = [item async for item in stream]
            assert isinstance(items[-1].error, DeadlineExceeded if ending == "late" else Aborted)
        await settled(own)
        assert gate.calls - called <= 1
        assert own.stats()["finished"] == {"timeout" if ending == "late" else "aborted": 1}


async def test_a_failing_codec_and_a_leaving_caller_at_once_hold_nothing(
    endless_folder: Path, prompts: list[Int32], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with speaker(endless_folder) as own:
        gate = Gate(own, monkeypatch)
        stream = own.speak(spoken(prompts[0], 500))
        assert isinstance(await anext(stream), Chunk)
        gate.open.clear()

        def fail(*arguments: Any, **options: Any) -> Any:
            raise RuntimeError("device lost its mind")

        gate._start = fail
        await until(lambda: gate.holds)  # it is on its way into the fault
        await stream.aclose()
        await until(lambda: not own.stats()["running"])
        gate.open.set()
        await settled(own)
        assert own.stats()["finished"] == {"aborted": 1}


async def test_a_fault_of_the_loop_fails_everybody_and_takes_nothing_more(
    endless_folder: Path, prompts: list[Int32], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with speaker(endless_folder, max_num_seqs=1) as own:
        running = [asyncio.ensure_future(collect(own, spoken(prompts[0], 900))) for _ in range(2)]
        await until(lambda: own.stats()["frames"])

        def broken(now: float) -> None:
            raise AssertionError("slots leaked")

        monkeypatch.setattr(own._engine._scheduler, "choose_rows", broken)
        for _, outcome in await asyncio.wait_for(asyncio.gather(*running), LIMIT_S):
            assert outcome.reason == "failed"
            assert isinstance(outcome.error, EngineFailure)
        with pytest.raises(NotReady):
            await collect(own, spoken(prompts[0], 4))
        own._engine._thread.join(LIMIT_S)
        assert own.stats()["alive"] is False
        assert own.stats()["open"] == 0


async def test_what_does_not_fit_the_cache_harms_only_its_caller(endless_folder: Path, prompts: list[Int32]) -> None:
    async with speaker(endless_folder) as own:
        with holding(own._engine._device, "launch"):
            running = asyncio.ensure_future(collect(own, spoken(prompts[0], 20)))
            await until(lambda: own.stats()["open"] == 1)
            with pytest.raises(AssertionError, match="positions are needed"):
                await collect(own, spoken(prompts[0], 1024))
        assert (await running)[1].reason == "length"
        await settled(own)


async def test_the_line_of_references_has_a_bound_and_an_end(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with speaker(tiny_folder, max_num_seqs=1, max_queue=1) as own:
        wave = np.zeros(44100, np.float32)
        started, go = threading.Event(), threading.Event()
        encode = own._engine._parts.encoder._encode_block

        def held(job: Any) -> Any:
            started.set()
            go.wait(LIMIT_S)
            return encode(job)

        monkeypatch.setattr(own._engine._parts.encoder, "_encode_block", held)
        first, second = (asyncio.ensure_future(own.encode_reference(wave)) for _ in range(2))
        await until(started.is_set)
        await until(lambda: own.stats()["encoding"] == 2)
        with pytest.raises(Overloaded):
            await own.encode_reference(wave)
        second.cancel()
        await asyncio.wait([second])
        third = asyncio.ensure_future(own.encode_reference(wave))  # a cancelled one has left the line
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(own.close())
        await until(lambda: own._engine._parts.encoder._closed)
        with pytest.raises(NotReady):
            await own.encode_reference(wave)
        go.set()
        for waiting in (first, third):
            with pytest.raises(Aborted):
                await waiting
        await closing
