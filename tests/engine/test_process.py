"""Real engines in real processes on the tiny model: the same bytes as in this process, whatever happens to a neighbour."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from duetts.config import EngineConfig, ProcessConfig
from duetts.engine.inprocess import start_speaker
from duetts.engine.process import place, place_codec
from duetts.engine.remote import RemoteSpeaker
from duetts.errors import CheckpointError, ConfigError, EngineFailure, NotReady, Overloaded, WireError
from duetts.types import Chunk, Int32, Outcome, Sampling, Utterance
from tests.waiting import LIMIT_S, until

from .test_remote_link import collect

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = EngineConfig(device="cpu", cpu_threads=1, max_num_seqs=4, max_queue=4, max_model_len=1024)
LONG = 100  # frames: enough to be killed in the middle, also by a test that is late
CONFIG = ProcessConfig(engines=2, heartbeat_s=0.05, silence_s=3.0, stuck_s=20.0)
RNG = np.random.default_rng(5)
PROMPTS: list[Int32] = [
    np.concatenate([RNG.integers(0, 200, (1, length)), np.zeros((4, length), np.int64)]).astype(np.int32)
    for length in (3, 17, 40)
]
WAVE = (0.3 * np.sin(np.arange(44100) / 20)).astype(np.float32)


def work(count: int, frames: int = 0) -> list[Utterance]:
    """Different prompts, seeds, lengths and ways of sampling; some with a voice, some with a listener."""
    return [
        Utterance(
            f"r{index}", PROMPTS[index % 3], Sampling(temperature=(0.0, 0.7, 1.2)[index % 3], top_k=(30, 0, 5)[index % 3]),
            100 + index, frames or 8 + 5 * (index % 5), streaming=index % 2 == 0, voice_key=("", "anna", "bert")[index % 3],
        )
        for index in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(endless_folder: Path) -> dict[int, bytes]:
    """The bytes of long and short work by seed, each spoken alone by an engine in this process; -1 is the wave's codes."""

    async def speak() -> dict[int, bytes]:
        speaker = start_speaker(endless_folder, ENGINE)
        try:
            found = {item.seed: (await collect(speaker, item))[0] for item in work(8, frames=LONG)}
            return {**found, -1: (await speaker.encode_reference(WAVE)).tobytes()}
        finally:
            await speaker.close()

    return asyncio.run(speak())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def remote(endless_folder: Path, alone: dict[int, bytes]) -> AsyncIterator[RemoteSpeaker]:
    """Begins after what is computed here, while which the loop stands still: engines that hear nobody for 30 s end."""
    speaker = await RemoteSpeaker.start(endless_folder, ENGINE, CONFIG)
    yield speaker
    await speaker.close()


async def idle(remote: RemoteSpeaker) -> None:
    """Both engines are up, and neither they nor this side hold anything of a request."""

    def settled() -> bool:
        stats = remote.stats()
        return stats["engines_up"] == 2 and not stats["open"] and not any(engine["calls"] for engine in stats["engines"])

    await until(settled)


def pids(remote: RemoteSpeaker) -> list[int]:
    return [engine["pid"] for engine in remote.stats()["engines"]]


async def test_the_same_bytes_as_in_this_process(remote: RemoteSpeaker, alone: dict[int, bytes]) -> None:
    done = await asyncio.gather(*(collect(remote, item) for item in work(8)))
    for item, (pcm, outcome) in zip(work(8), done, strict=True):
        assert outcome.reason == "length"
        assert len(pcm) == 4096 * item.max_frames
        assert pcm == alone[item.seed][: len(pcm)]
        assert 0 < outcome.timings.first_audio_s <= outcome.timings.total_s
    assert (await remote.encode_reference(WAVE)).tobytes() == alone[-1]
    assert remote.info.codec_id
    await idle(remote)
    assert min(engine["frames"] for engine in remote.stats()["engines"]) > 8  # both have worked


async def test_leaving_frees_the_place_in_the_engine(remote: RemoteSpeaker) -> None:
    await idle(remote)
    before = remote.stats()["finished"].get("aborted", 0)
    for _ in range(3):
        async with aclosing(remote.speak(work(1, frames=900)[0])) as stream:
            assert isinstance(await anext(stream), Chunk)
    await until(lambda: remote.stats()["finished"].get("aborted", 0) == before + 3)
    await idle(remote)


async def test_a_prompt_out_of_range_never_reaches_the_model(remote: RemoteSpeaker, alone: dict[int, bytes]) -> None:
    good = work(2)[1]
    for prompt in (PROMPTS[0] - 1, PROMPTS[0] + 2**20, np.vstack([PROMPTS[0][:1], PROMPTS[0][1:] + 5000])):
        with pytest.raises(WireError):
            await collect(remote, replace(good, prompt=prompt))
    pcm, _ = await collect(remote, good)
    assert pcm == alone[good.seed][: len(pcm)]


async def test_a_line_that_is_full_everywhere_is_told_with_a_time(remote: RemoteSpeaker) -> None:
    await idle(remote)
    running = [asyncio.ensure_future(collect(remote, replace(item, voice_key="anna"))) for item in work(16, frames=30)]
    await until(lambda: [engine["calls"] for engine in remote.stats()["engines"]] == [8, 8])  # one voice fills both engines
    with pytest.raises(Overloaded) as refusal:
        await collect(remote, work(1)[0])
    assert refusal.value.retry_after_s >= 1
    assert {outcome.reason for _, outcome in await asyncio.gather(*running)} == {"length"}
    await idle(remote)


async def test_kill_in_mid_stream_costs_the_others_nothing(remote: RemoteSpeaker, alone: dict[int, bytes]) -> None:
    """Its streams end visibly, the others' bytes are those of their solo runs, it comes back by itself."""
    await idle(remote)
    items = work(8, frames=LONG)
    running = [asyncio.ensure_future(collect(remote, replace(item, voice_key=""))) for item in items]
    await until(lambda: all(engine["frames"] > 0 and engine["calls"] == 4 for engine in remote.stats()["engines"]))
    await until(lambda: remote.stats()["engines"][0]["owed_frames"] < 4 * (LONG - 4))
    os.kill(pids(remote)[0], signal.SIGKILL)
    lost = 0
    for item, (pcm, outcome) in zip(items, await asyncio.wait_for(asyncio.gather(*running), LIMIT_S), strict=True):
        assert alone[item.seed].startswith(pcm)
        if outcome.reason == "length":
            assert pcm == alone[item.seed]
        else:
            lost += 1
            assert isinstance(outcome.error, EngineFailure)
            assert outcome.num_frames < LONG
    assert lost == 4
    await idle(remote)
    assert (remote.stats()["engines"][0]["starts"], remote.stats()["engines"][1]["starts"]) == (2, 1)
    again = await asyncio.gather(*(collect(remote, replace(item, voice_key="")) for item in items))
    assert [pcm for pcm, _ in again] == [alone[item.seed] for item in items]
    assert min(engine["frames"] for engine in remote.stats()["engines"]) > LONG


async def test_a_folder_that_is_no_model_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        await RemoteSpeaker.start(tmp_path, ENGINE, ProcessConfig(restart_s=20.0))


@pytest.mark.slow
async def test_a_device_that_is_not_here_is_told_at_once(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="cuda:77"):
        await RemoteSpeaker.start(tiny_folder, replace(ENGINE, device="cuda:77"), ProcessConfig(restart_s=20.0))


async def test_engines_have_a_device_or_a_share_of_the_threads_each(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device="auto", cpu_threads=8)
    four, apart = ProcessConfig(engines=4), ProcessConfig(engines=2, codec_device="next")
    assert [place(config, index, four).cpu_threads for index in range(4)] == [2] * 4
    assert place(config, 0, ProcessConfig(engines=20)).cpu_threads == 1
    assert place_codec(place(config, 0, apart), apart) == replace(config, device="cpu", cpu_threads=4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [place(config, index, four).device for index in range(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert place(replace(config, device="cuda:2"), 1, four).device == "cuda:2"
    assert place(replace(config, device="cpu"), 1, four) == replace(config, device="cpu", cpu_threads=2)
    pairs = [(own.device, place_codec(own, apart).device) for own in (place(config, index, apart) for index in range(2))]
    assert pairs == [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")]
    assert place_codec(replace(config, device="cuda:2"), apart).device == "cuda:3"
    assert place_codec(replace(config, device="cuda"), apart).device == "cuda:1"
    assert place_codec(place(config, 1, four), replace(four, codec_device="cuda:7")).device == "cuda:7"


@pytest.mark.slow
async def test_nothing_is_left_after_a_minute_of_chance(remote: RemoteSpeaker, alone: dict[int, bytes]) -> None:
    """Requests, leavings, references, kills and halts at random: every request ends, rightly or visibly; then all is idle."""
    rng = np.random.default_rng(11)
    await idle(remote)
    end = time.monotonic() + 60
    ends: dict[str, int] = {}

    def note(what: str) -> None:
        ends[what] = ends.get(what, 0) + 1

    async def caller(seed: int) -> None:
        own = np.random.default_rng(seed)
        while time.monotonic() < end:
            item = work(8, frames=int(own.integers(2, LONG)))[own.integers(8)]
            pcm, leave_at = b"", own.integers(1, 2 * LONG)
            try:
                if own.random() < 0.1:
                    assert (await remote.encode_reference(WAVE)).tobytes() == alone[-1]
                    note("codes")
                    continue
                async with aclosing(remote.speak(item)) as stream:
                    async for part in stream:
                        if isinstance(part, Outcome):
                            note(part.reason)
                            assert part.reason != "length" or len(pcm) == 4096 * item.max_frames
                            break
                        pcm += part.pcm
                        if len(pcm) > 4096 * leave_at:
                            note("left")
                            break
                assert alone[item.seed].startswith(pcm)
            except (EngineFailure, NotReady, Overloaded) as error:
                note(type(error).__name__)
                await asyncio.sleep(0.1)

    callers = [asyncio.ensure_future(caller(seed)) for seed in range(10)]
    while time.monotonic() < end:
        await asyncio.sleep(float(rng.uniform(2, 8)))
        pid = remote.stats()["engines"][rng.integers(2)]["pid"]
        if pid is not None:
            os.kill(pid, [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP][rng.integers(3)])
            await asyncio.sleep(float(rng.uniform(0.1, 2)))
            for pid in filter(None, pids(remote)):
                os.kill(pid, signal.SIGCONT)
    await asyncio.wait_for(asyncio.gather(*callers), 60)
    print(ends, remote.stats()["restarts"])
    assert ends["length"] > 20
    assert ends["left"] > 5
    await idle(remote)
    pcm, _ = await collect(remote, work(1)[0])
    assert pcm == alone[100][: len(pcm)]
