"""The line between the keeper and an HTTP process, both ends in this one."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from duetts.workers.channel import Channel
from tests.waiting import until


class Someone:
    """Keeps what it hears, and answers by what it is asked."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.asked = 0
        self.go = asyncio.Event()

    def hear(self, kind: str, values: dict[str, Any]) -> None:
        self.heard.append((kind, values))

    async def answer(self, kind: str, values: dict[str, Any]) -> Any:
        self.asked += 1
        if kind == "wait":
            await self.go.wait()
        if kind == "fail":
            raise LookupError("a secret of a user")
        return {"you said": values}


@asynccontextmanager
async def line() -> AsyncIterator[tuple[Channel, Someone, Channel, Someone]]:
    here, there = Someone(), Someone()
    ends = [await Channel.open(end, someone) for end, someone in zip(socket.socketpair(), (here, there), strict=True)]
    running = [asyncio.create_task(end.run()) for end in ends]
    yield ends[0], here, ends[1], there
    for end in ends:
        await end.close()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_told_in_order_and_asked_both_ways() -> None:
    async with line() as (left, here, right, there):
        for number in range(200):
            left.tell("news", number=number, numbers=b"\x00" * 10_000)
        assert await right.ask("what", 10, a=1) == {"you said": {"a": 1}}
        assert await left.ask("what", 10, b=[b"2"]) == {"you said": {"b": [b"2"]}}
        assert [values["number"] for _, values in there.heard] == list(range(200))
        assert here.heard == []


async def test_a_slow_answer_holds_nothing_up() -> None:
    async with line() as (left, _, _, there):
        slow = asyncio.create_task(left.ask("wait", 10))
        await until(lambda: there.asked == 1)
        assert await left.ask("what", 10) == {"you said": {}}
        assert not slow.done()
        there.go.set()
        assert await slow == {"you said": {}}


async def test_an_answer_that_does_not_come_in_time_is_nobodys() -> None:
    async with line() as (left, _, _, there):
        with pytest.raises(TimeoutError):
            await left.ask("wait", 0.01)
        there.go.set()
        assert await left.ask("what", 10, late=False) == {"you said": {"late": False}}


async def test_what_cannot_be_answered_is_told_by_its_class_only(caplog: pytest.LogCaptureFixture) -> None:
    async with line() as (left, _, _, _):
        with pytest.raises(ConnectionError, match=r"fail: LookupError$"):
            await left.ask("fail", 10)
    assert "fail could not be answered" in caplog.text


async def test_when_the_other_end_is_gone_open_questions_have_no_answer() -> None:
    async with line() as (left, _, right, there):
        waiting = asyncio.create_task(left.ask("wait", 1000))
        await until(lambda: there.asked == 1)
        await right.close()
        with pytest.raises(ConnectionError):
            await waiting
        left.tell("news")  # nobody is there, and nothing is raised
