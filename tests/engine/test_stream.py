"""Channels: order, one wake-up for many, and consumers whose loop has gone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from duetts.engine.stream import Channel, Post
from duetts.types import Chunk, Outcome


def chunk(number: int) -> Chunk:
    return Chunk(b"", np.full((1, 1), number, np.int32))


async def numbers(channel: Channel) -> list[int]:
    """Of the chunks until the outcome."""
    found = []
    while not isinstance(item := await channel.get(), Outcome):
        found.append(int(item.codes[0, 0]))
    return found


async def test_many_threads_to_many_consumers_in_order() -> None:
    post = Post()
    channels = [Channel(post) for _ in range(20)]

    def send(mine: list[Channel]) -> None:
        for number in range(100):
            for channel in mine:
                channel.put(chunk(number))
            mine[0].wake()
        for channel in mine:
            channel.put(Outcome("stop", 100, 1))
            channel.wake()

    threads = [threading.Thread(target=send, args=(channels[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    found = await asyncio.wait_for(asyncio.gather(*(numbers(channel) for channel in channels)), 30)
    assert found == [list(range(100))] * 20
    for thread in threads:
        thread.join()


async def test_a_loop_is_woken_once_for_all_that_waits_and_again_for_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    post = Post()
    first, second = Channel(post), Channel(post)
    woken = 0
    call = post.loop.call_soon_threadsafe

    def counted(*arguments: Any) -> Any:
        nonlocal woken
        woken += 1
        return call(*arguments)

    monkeypatch.setattr(post.loop, "call_soon_threadsafe", counted)
    first.wake()
    assert woken == 0  # there is nothing
    for channel in (first, second):
        channel.put(chunk(1))
    for channel in (first, second):
        channel.wake()
    assert woken == 1
    assert [int((await channel.get()).codes[0, 0]) for channel in (first, second)] == [1, 1]  # type: ignore[union-attr]
    second.put(chunk(2))
    first.wake()
    assert woken == 2
    assert int((await second.get()).codes[0, 0]) == 2  # type: ignore[union-attr]


def test_what_comes_after_the_consumers_loop_has_closed_is_nobodys_loss() -> None:
    async def open_one() -> Channel:
        return Channel(Post())

    channel = asyncio.run(open_one())
    for _ in range(3):
        channel.put(chunk(1))
        channel.wake()
        assert not channel._post._items
