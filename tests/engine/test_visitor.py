"""Engines that another process keeps: they serve as for their keeper, and those who share them know of each other."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duetts.engine.remote import RemoteSpeaker
from duetts.engine.visitor import Visitor
from duetts.errors import EngineFailure, Overloaded
from tests.waiting import LIMIT_S, until

from . import test_remote as kept
from .test_remote import ENGINE, FRAMES, FROM_ELSEWHERE, QUICK, SLOW, temporary, turn, visitors  # noqa: F401 a fixture
from .test_remote_link import collect, spoken, whole

TWO = replace(QUICK, engines=2)
Case = Callable[[Path], Coroutine[Any, Any, None]]


@pytest.mark.parametrize(
    "case",
    [
        kept.test_an_engine_that_is_killed_loses_only_its_own_streams_and_comes_back,
        kept.test_a_request_that_kills_its_engine_is_not_given_to_the_next,
        kept.test_an_engine_that_stands_still_is_passed_by_and_then_killed,
        kept.test_a_short_silence_costs_nothing,
        kept.test_nobody_waits_for_an_engine_that_cannot_be_up_in_time,
        kept.test_a_codec_process_is_counted_as_down_while_its_engine_is_away,
        kept.test_a_waiting_request_is_served_by_the_engine_that_comes_back,
        kept.test_an_overloaded_engine_hands_on_to_another,
    ],
)
async def test_they_serve_as_for_their_keeper(case: Case, tmp_path: Path) -> None:
    FROM_ELSEWHERE.set(True)  # of this test's task only
    await case(tmp_path)


def begin(speaker: RemoteSpeaker, count: int) -> list["asyncio.Task[Any]"]:
    return [asyncio.ensure_future(collect(speaker, spoken(FRAMES, seed))) for seed in range(count)]


def open_of(speaker: RemoteSpeaker) -> list[int]:
    return [engine["open"] for engine in speaker.stats()["engines"]]


async def test_work_is_spread_by_what_all_have_given(tmp_path: Path) -> None:
    turn(tmp_path, frame_s=SLOW)
    async with visitors(tmp_path, TWO, 3) as (first, second, third):
        tasks = begin(first, 1)
        for speaker in (second, third, first):
            calls = len(tasks)
            await until(lambda: sum(one["calls"] for one in speaker.stats()["engines"]) == calls)  # noqa: B023 it is awaited
            tasks += begin(speaker, 1)
        await until(lambda: all(open_of(speaker) == [2, 2] for speaker in (first, second, third)))
        assert min(one["owed_frames"] for one in third.stats()["engines"]) > FRAMES  # others' as well as its own
        turn(tmp_path)
        assert [pcm for pcm, _ in await asyncio.gather(*tasks)] == [whole(0, FRAMES)] * 4
        await until(lambda: all(one["owed_frames"] == 0 for one in third.stats()["engines"]))


async def test_engines_are_full_by_what_all_have_given(tmp_path: Path) -> None:
    room = ENGINE.max_num_seqs + ENGINE.max_queue
    turn(tmp_path, frame_s=SLOW, places=room)
    async with visitors(tmp_path, replace(TWO, engines=1), 2) as (first, second):
        tasks = begin(first, room)
        await until(lambda: second.stats()["full"])
        with pytest.raises(Overloaded):
            await collect(second, spoken())
        turn(tmp_path)
        await asyncio.gather(*tasks)
        await until(lambda: not second.stats()["full"])


async def test_who_leaves_takes_only_its_own_work_along(tmp_path: Path) -> None:
    turn(tmp_path, frame_s=SLOW)
    async with visitors(tmp_path, replace(TWO, engines=1), 2) as (leaving, staying):
        left, stayed = begin(leaving, 3), begin(staying, 2)
        await until(lambda: open_of(staying) == [5])
        await leaving.close()
        assert [outcome.reason for _, outcome in await asyncio.gather(*left)] == ["aborted"] * 3
        await until(lambda: open_of(staying) == [2])
        turn(tmp_path)
        assert [pcm for pcm, _ in await asyncio.gather(*stayed)] == [whole(seed, FRAMES) for seed in range(2)]


async def test_why_an_engine_ended_is_told_to_all(tmp_path: Path) -> None:
    turn(tmp_path, frame_s=SLOW)
    async with visitors(tmp_path, replace(TWO, engines=1), 2) as speakers:
        tasks = [task for speaker in speakers for task in begin(speaker, 1)]
        await until(lambda: open_of(speakers[0]) == [2])
        pid = speakers[0].stats()["engines"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        for _, outcome in await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S):
            assert isinstance(outcome.error, EngineFailure)
            assert "engine 0 ended with code -9" in str(outcome.error)


async def test_who_comes_while_an_engine_is_away_need_not_wait_for_it(tmp_path: Path) -> None:
    """An HTTP process that is started anew knows what the engines are, and serves by those that are up."""
    async with visitors(tmp_path, TWO, 1) as (speaker,):
        lives = speaker.lives
        away = replace(lives[1], address="", incarnation="", pid=None, state="restarting")
        visitor = Visitor(1, TWO, speaker._context, lambda: None)
        visitor.hear(away)
        assert (await visitor.first, visitor.takes_work, visitor.state) == (speaker.info, False, "restarting")
        visitor.hear(lives[1])
        await until(lambda: visitor.takes_work)
        visitor.hear(away)
        assert not visitor.takes_work
        await visitor.stop()


async def test_a_link_that_fails_is_replaced(tmp_path: Path) -> None:
    async with visitors(tmp_path, replace(TWO, engines=1), 1) as (speaker,):
        broken = speaker._engines[0].link
        assert broken is not None
        broken.fail(EngineFailure("misunderstood"))
        await until(lambda: speaker.stats()["engines_up"] == 1)
        assert speaker._engines[0].link is not broken
        assert (await collect(speaker, spoken(3, 9)))[0] == whole(9, 3)
        assert speaker.stats()["engines"][0]["starts"] == 1
