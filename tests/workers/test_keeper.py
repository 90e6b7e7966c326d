"""The end of a server of several HTTP processes that do not do as they are told, with real processes that are none."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from duetts.config import EngineConfig, ProcessConfig, ServerConfig
from duetts.serving import HURRIED, Plan, Signals
from duetts.workers import keeper, place
from duetts.workers.keeper import Keeper, listeners
from tests.engine.test_remote import gone
from tests.waiting import LIMIT_S, until

HANGS = (sys.executable, "-c", "import time; time.sleep(1000)")
DIES = (sys.executable, "-c", "")


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Those of two HTTP processes, whose keeper never finds its model and is not patient."""

    async def look_for(plan: Plan) -> Path:
        await asyncio.Event().wait()
        return Path()

    monkeypatch.setattr(keeper, "look_for", look_for)
    for room, name in ((keeper, "END_S"), (place, "END_S"), (place, "LAST_WORDS_S")):
        monkeypatch.setattr(room, name, 0.1)
    with listeners(ServerConfig(("tiny",), port=0, workers=2)) as both:
        yield both


def keeper_of(sockets: list[socket.socket], processes: ProcessConfig, signals: Signals) -> Keeper:
    return Keeper(Plan("tiny", None, EngineConfig(), processes, ServerConfig(("tiny",), workers=2)), sockets, signals)


@pytest.mark.parametrize("hurried", [False, True])
async def test_those_that_hang_are_killed_when_the_time_is_over_or_at_once(
    sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hurried: bool
) -> None:
    monkeypatch.setattr(place, "WORKER_COMMAND", HANGS)
    signals = Signals()
    kept = keeper_of(sockets, ProcessConfig(drain_s=1000.0 if hurried else 0.1), signals)
    running = asyncio.create_task(kept.run())
    await until(lambda: all(worker._process is not None for worker in kept._workers))
    pids = [worker._process.pid for worker in kept._workers if worker._process is not None]
    signals.first.set()
    if hurried:
        await until(lambda: all(worker._ending.is_set() for worker in kept._workers))
        signals.second.set()
    assert await asyncio.wait_for(running, LIMIT_S) == (HURRIED if hurried else 0)
    assert sum("did not end in time and is killed" in message for message in caplog.messages) == 2
    assert all(gone(pid) for pid in pids)


async def test_one_that_waits_for_its_next_start_is_not_waited_for(
    sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the kernel gives it no connections any more, which nobody would answer."""
    monkeypatch.setattr(place, "WORKER_COMMAND", DIES)
    signals = Signals()
    running = asyncio.create_task(
        keeper_of(sockets, ProcessConfig(drain_s=1000.0, restart_s=1000.0, restart_max_s=1000.0), signals).run()
    )
    await until(lambda: sum("it is started again in 1000" in message for message in caplog.messages) == 2)
    assert all(each.fileno() >= 0 for each in sockets)
    signals.first.set()
    assert await asyncio.wait_for(running, LIMIT_S) == 0
    assert all(each.fileno() < 0 for each in sockets)
