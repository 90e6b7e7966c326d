"""What an HTTP process does at its end, or at that of its keeper."""

import asyncio
import socket
from typing import Any

import pytest

from duetts import serving
from duetts.config import EngineConfig, ProcessConfig, ServerConfig
from duetts.server.gate import Gate
from duetts.serving import HURRIED, Plan
from duetts.workers.channel import Channel
from duetts.workers.process import Orders, Worker
from tests.waiting import LIMIT_S, turns, until

PLAN = Plan("tiny", None, EngineConfig(), ProcessConfig(), ServerConfig(("tiny",), workers=2))


class Keeping:
    """A keeper that only listens."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def hear(self, kind: str, values: dict[str, Any]) -> None:
        self.heard.append(kind)

    async def answer(self, kind: str, values: dict[str, Any]) -> Any:
        return None


@pytest.mark.parametrize(("end", "code"), [("release", 0), ("hurry", HURRIED), ("the keeper is gone", HURRIED)])
async def test_one_with_nothing_open_stays_at_the_port_until_it_is_told(end: str, code: int) -> None:
    worker, keeping = Worker(Orders(0, PLAN, -1, -1)), Keeping()
    here, there = socket.socketpair()
    keeper, worker.channel = await Channel.open(here, keeping), await Channel.open(there, worker)
    hearing = [asyncio.create_task(keeper.run()), asyncio.create_task(worker.channel.run())]
    hearing[1].add_done_callback(worker.orphaned)
    draining = asyncio.create_task(serving._drain(Gate(_nobody), worker.signals, LIMIT_S))
    await until(lambda: keeping.heard == ["drained"])
    await turns()
    assert not draining.done()
    if end == "the keeper is gone":
        await keeper.close()
    else:
        keeper.tell(end)
    assert await asyncio.wait_for(draining, LIMIT_S) == code
    await keeper.close()
    await worker.channel.close()
    await asyncio.gather(*hearing)


async def _nobody(*_: object) -> None:
    raise AssertionError("nobody asks")
