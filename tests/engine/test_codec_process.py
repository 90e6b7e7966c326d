"""The codec in a process of its own, real processes on the tiny model: the same bytes, and what each death costs."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from duetts.config import ProcessConfig
from duetts.engine.remote import RemoteSpeaker
from duetts.errors import EngineFailure
from duetts.types import Outcome, Utterance
from tests.waiting import LIMIT_S, until

from .test_process import ENGINE, LONG, WAVE, alone, work
from .test_remote_link import collect

__all__ = ["alone"]  # the fixture
pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = ProcessConfig(codec_device="cpu", silence_s=3.0, stuck_s=20.0, restart_s=0.1, wait_s=60.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart(endless_folder: Path) -> AsyncIterator[RemoteSpeaker]:
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


async def test_the_same_bytes_as_on_one_device(apart: RemoteSpeaker, alone: dict[int, bytes]) -> None:
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
    assert apart.info.codec_id
    assert (apart.info.codec_device, apart.info.repeats) == ("cpu", True)
    await idle(apart)
    assert codec(apart)["role"] == "codec"
    assert codec(apart)["pid"] != engine(apart)["pid"]
    assert codec(apart)["calls"] >= 8


async def killed_codec(speaker: RemoteSpeaker, number: int = signal.SIGKILL) -> None:
    os.kill(codec(speaker)["pid"], number)


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
            assert "codec" in str(outcome.error)
            assert whole.startswith(pcm)
            assert len(pcm) < len(whole)
    return failed


async def test_a_killed_codec_costs_the_streams_that_it_held(apart: RemoteSpeaker, alone: dict[int, bytes]) -> None:
    """They fail visibly. Those in line, the engine and its next requests lose nothing."""
    await idle(apart)
    pid, starts = engine(apart)["pid"], codec(apart)["starts"]
    items = work(8, frames=LONG)
    running = [asyncio.ensure_future(collect(apart, item)) for item in items]
    calls = codec(apart)["calls"]
    await until(lambda: engine(apart)["running"] == engine(apart)["waiting"] == 4 and codec(apart)["calls"] > calls + 4)
    os.kill(codec(apart)["pid"], signal.SIGKILL)
    done = await asyncio.wait_for(asyncio.gather(*running), LIMIT_S)
    assert 1 <= len(lost(items, done, alone)) <= 4
    await idle(apart)
    assert (engine(apart)["pid"], codec(apart)["starts"]) == (pid, starts + 1)
    again = await asyncio.gather(*(collect(apart, item) for item in items))
    assert [pcm for pcm, _ in again] == [alone[item.seed] for item in items]
