"""The codec in a process of its own, real processes on the tiny model: the same bytes, and what each death costs."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from duetts.checkpoint import load_codec
from duetts.config import ProcessConfig
from duetts.engine.remote import RemoteSpeaker
from duetts.errors import ConfigError, EngineFailure, NotReady, Overloaded
from duetts.types import Chunk, Outcome, Utterance
from tests.waiting import LIMIT_S, until

from .test_process import ENGINE as ROOMY
from .test_process import LONG, WAVE, alone, work
from .test_remote import gone, temporary
from .test_remote_link import collect

__all__ = ["alone", "temporary"]  # fixtures
pytestmark = pytest.mark.asyncio(loop_scope="module")

# Two places and four streams of the codec: of eight requests no more than four can be held by it.
ENGINE = replace(ROOMY, max_num_seqs=2, max_queue=14)
HELD = 4
CONFIG = ProcessConfig(codec_device="cpu", heartbeat_s=0.05, silence_s=3.0, stuck_s=20.0, restart_s=0.1, wait_s=60.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart(endless_folder: Path, alone: dict[int, bytes]) -> AsyncIterator[RemoteSpeaker]:
    """Begins after what is computed here, while which the loop stands still: engines that hear nobody for 30 s end."""
    speaker = await RemoteSpeaker.start(endless_folder, ENGINE, CONFIG)
    yield speaker
    await speaker.close()


def engine(speaker: RemoteSpeaker) -> dict[str, Any]:
    found: dict[str, Any] = speaker.stats()["engines"][0]
    return found


def codec(speaker: RemoteSpeaker) -> dict[str, Any]:
    """What is known of the codec process; nothing while the engine is away."""
    found: dict[str, Any] = engine(speaker).get("codec", {})
    return found


async def idle(speaker: RemoteSpeaker) -> None:
    """Both processes are up, and neither they nor this side hold anything of a request."""
    await until(
        lambda: (
            engine(speaker)["state"] == codec(speaker).get("state") == "ready"
            and not engine(speaker)["open"] + engine(speaker)["calls"] + engine(speaker)["decoding"]
        )
    )


async def test_the_same_bytes_as_on_one_device(apart: RemoteSpeaker, alone: dict[int, bytes], endless_folder: Path) -> None:
    """Streamed and whole, in company; and a reference has the same codes."""
    items = work(8)
    assert {item.streaming for item in items} == {True, False}
    for item, (pcm, outcome) in zip(items, await asyncio.gather(*(collect(apart, item) for item in items)), strict=True):
        assert (outcome.reason, len(pcm)) == ("length", 4096 * item.max_frames)
        assert pcm == alone[item.seed][: len(pcm)]
    for item in items[:2]:
        pcm, _ = await collect(apart, replace(item, streaming=not item.streaming))
        assert pcm == alone[item.seed][: len(pcm)]
    assert (await apart.encode_reference(WAVE)).tobytes() == alone[-1]
    own = load_codec(endless_folder, device=torch.device("cpu"), dtype=torch.float32)
    assert apart.info.codec_id == own.encoding_id()  # so that codes of voices stay good
    assert (apart.info.codec_device, apart.info.repeats) == ("cpu", True)
    await idle(apart)
    assert (codec(apart)["role"], codec(apart)["expected_s"]) == ("codec", 0)
    assert codec(apart)["pid"] != engine(apart)["pid"]
    assert codec(apart)["calls"] >= 8


def lost(items: list[Utterance], done: list[tuple[bytes, Outcome]], alone: dict[int, bytes]) -> list[int]:
    """Asserts that each is whole or visibly failed after the right bytes; which have failed."""
    failed = []
    for index, (item, (pcm, outcome)) in enumerate(zip(items, done, strict=True)):
        whole = alone[item.seed][: 4096 * item.max_frames]
        if outcome.reason == "length":
            assert pcm == whole
        else:
            failed.append(index)
            assert isinstance(outcome.error, EngineFailure)
            assert whole.startswith(pcm)
            assert len(pcm) < len(whole)
    return failed


async def speaking(speaker: RemoteSpeaker, items: list[Utterance]) -> "list[asyncio.Task[tuple[bytes, Outcome]]]":
    """These, when the first are being decoded."""
    calls = codec(speaker)["calls"]
    tasks = [asyncio.ensure_future(collect(speaker, item)) for item in items]
    await until(lambda: codec(speaker)["calls"] > calls + 2)
    return tasks


async def test_a_killed_codec_costs_the_streams_that_it_held(apart: RemoteSpeaker, alone: dict[int, bytes]) -> None:
    """They fail visibly. Those in line, the engine and its next requests lose nothing."""
    await idle(apart)
    pid, start_s, starts = engine(apart)["pid"], engine(apart)["start_s"], codec(apart)["starts"]
    items = work(8, frames=LONG)
    running = await speaking(apart, items)
    os.kill(codec(apart)["pid"], signal.SIGKILL)
    done = await asyncio.wait_for(asyncio.gather(*running), LIMIT_S)
    failed = lost(items, done, alone)
    assert 1 <= len(failed) <= HELD
    assert all("codec" in str(done[index][1].error) for index in failed)
    await idle(apart)
    assert (engine(apart)["pid"], engine(apart)["start_s"], codec(apart)["starts"]) == (pid, start_s, starts + 1)
    again = await asyncio.gather(*(collect(apart, item) for item in items))
    assert [pcm for pcm, _ in again] == [alone[item.seed] for item in items]


async def test_a_killed_engine_takes_its_codec_along_and_both_come_back(apart: RemoteSpeaker, alone: dict[int, bytes]) -> None:
    await idle(apart)
    pids, starts = (engine(apart)["pid"], codec(apart)["pid"]), engine(apart)["starts"]
    items = work(8, frames=LONG)
    running = await speaking(apart, items)
    os.kill(pids[0], signal.SIGKILL)
    assert lost(items, await asyncio.wait_for(asyncio.gather(*running), LIMIT_S), alone)
    await until(lambda: gone(pids[1]))
    await idle(apart)
    assert (engine(apart)["starts"], codec(apart)["starts"]) == (starts + 1, 1)
    again = await asyncio.gather(*(collect(apart, item) for item in items))
    assert [pcm for pcm, _ in again] == [alone[item.seed] for item in items]


async def test_a_codec_that_stands_still_gets_no_more_than_its_credit(apart: RemoteSpeaker, alone: dict[int, bytes]) -> None:
    """The engine speaks on and keeps the frames; when the codec goes on, nothing is missing."""
    await idle(apart)
    items = work(8, frames=LONG)
    before = engine(apart)["frames"]
    running = await speaking(apart, items)
    stopped = codec(apart)
    os.kill(stopped["pid"], signal.SIGSTOP)
    try:
        await until(lambda: engine(apart)["frames"] == before + 8 * LONG)  # all are drawn, and wait
        waiting = [task for task in running if not task.done()]
        assert waiting
        assert engine(apart)["decoding"] >= len(waiting)
    finally:
        os.kill(stopped["pid"], signal.SIGCONT)
    assert lost(items, await asyncio.wait_for(asyncio.gather(*running), LIMIT_S), alone) == []
    assert codec(apart)["starts"] == stopped["starts"]
    await idle(apart)
    assert codec(apart)["most_calls"] <= codec(apart)["credit"]


async def test_a_signal_to_all_processes_costs_no_stream(apart: RemoteSpeaker, alone: dict[int, bytes]) -> None:
    """As a service manager sends it: the server's own work, and theirs goes on."""
    await idle(apart)
    pids = [codec(apart)["pid"], engine(apart)["pid"]]
    items = work(8, frames=LONG)
    running = await speaking(apart, items)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert lost(items, await asyncio.wait_for(asyncio.gather(*running), LIMIT_S), alone) == []
    await idle(apart)
    assert [codec(apart)["pid"], engine(apart)["pid"]] == pids


async def test_leaving_frees_the_stream_in_the_codec(apart: RemoteSpeaker) -> None:
    await idle(apart)
    frames, leavings = codec(apart)["frames"], 3 * 2 * ENGINE.max_num_seqs  # more often than it has slots
    for _ in range(leavings):
        async with aclosing(apart.speak(work(1, frames=900)[0])) as stream:
            assert isinstance(await anext(stream), Chunk)
    await idle(apart)
    figures = [(-1, -1)]

    async def rests() -> bool:
        await asyncio.sleep(3 * CONFIG.heartbeat_s)  # two heartbeats bring them here, if nobody is late
        figures.append((codec(apart)["frames"], codec(apart)["open_calls"]))
        return figures[-1] == figures[-2]

    while not await rests():
        assert len(figures) < 100
    assert figures[-1][1] == 0
    assert figures[-1][0] - frames < 900 * leavings / 2  # nor was the rest decoded for nobody


@pytest.mark.slow
async def test_other_engines_and_their_codecs_go_on(endless_folder: Path, alone: dict[int, bytes]) -> None:
    """Two engines; then all processes end with the speaker, and nothing is left of them."""
    speaker = await RemoteSpeaker.start(endless_folder, ENGINE, replace(CONFIG, engines=2))
    try:
        items = [replace(item, voice_key="") for item in 2 * work(8, frames=LONG)]
        running = [asyncio.ensure_future(collect(speaker, item)) for item in items]
        each = speaker.stats()["engines"]
        await until(lambda: all(one["codec"]["calls"] > 3 for one in speaker.stats()["engines"]))
        os.kill(each[0]["codec"]["pid"], signal.SIGKILL)
        assert 1 <= len(lost(items, await asyncio.wait_for(asyncio.gather(*running), LIMIT_S), alone)) <= HELD
        assert [one["starts"] for one in speaker.stats()["engines"]] == [1, 1]
        assert speaker.stats()["engines"][1]["codec"]["starts"] == 1
        await until(lambda: all(one["state"] == one["codec"]["state"] == "ready" for one in speaker.stats()["engines"]))
        pids = [pid for one in speaker.stats()["engines"] for pid in (one["pid"], one["codec"]["pid"])]
        assert len(set(pids)) == 4
    finally:
        await speaker.close()
    assert all(gone(pid) for pid in pids)


async def test_a_codec_that_cannot_be_is_told_at_once(endless_folder: Path, temporary: Path) -> None:
    with pytest.raises(ConfigError, match="cuda:77"):
        await RemoteSpeaker.start(
            endless_folder, ENGINE, replace(CONFIG, codec_device="cuda:77", restart_s=20.0, restart_max_s=30.0)
        )
    with pytest.raises(ConfigError, match="same, next, cpu, cuda:N"):
        ProcessConfig(codec_device="second")


@pytest.mark.slow
async def test_every_request_ends_rightly_or_visibly_whatever_is_killed(apart: RemoteSpeaker, alone: dict[int, bytes]) -> None:
    """A minute of requests, leavings and references, while either process is killed, ended or halted at random."""
    rng = np.random.default_rng(7)
    await idle(apart)
    end = time.monotonic() + 60
    ends: Counter[str] = Counter()

    async def caller(seed: int) -> None:
        own = np.random.default_rng(seed)
        while time.monotonic() < end:
            item = work(8, frames=int(own.integers(2, LONG)))[own.integers(8)]
            pcm, leave_at = b"", own.integers(1, 2 * LONG)
            try:
                if own.random() < 0.1:
                    assert (await apart.encode_reference(WAVE)).tobytes() == alone[-1]
                    ends["codes"] += 1
                    continue
                async with aclosing(apart.speak(item)) as stream:
                    async for part in stream:
                        if isinstance(part, Outcome):
                            ends[part.reason] += 1
                            assert part.reason != "length" or len(pcm) == 4096 * item.max_frames
                            break
                        pcm += part.pcm
                        if len(pcm) > 4096 * leave_at:
                            ends["left"] += 1
                            break
                assert alone[item.seed].startswith(pcm)
            except (EngineFailure, NotReady, Overloaded) as error:
                ends[type(error).__name__] += 1
                await asyncio.sleep(0.1)

    callers = [asyncio.ensure_future(caller(seed)) for seed in range(6)]
    while time.monotonic() < end:
        await asyncio.sleep(float(rng.uniform(2, 6)))
        pid = (codec(apart) if rng.random() < 0.9 else engine(apart)).get("pid")
        if pid is not None and not gone(pid):
            os.kill(pid, [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP][rng.integers(3)])
            await asyncio.sleep(float(rng.uniform(0.1, 1)))
            if not gone(pid):
                os.kill(pid, signal.SIGCONT)
    await asyncio.wait_for(asyncio.gather(*callers), 2 * LIMIT_S)
    print(ends)
    assert ends["length"] > 5
    await idle(apart)
    pcm, _ = await collect(apart, work(1)[0])
    assert pcm == alone[100][: len(pcm)]
