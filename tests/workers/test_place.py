"""The place of one HTTP process, with real processes: one that hangs, and one that is to end before it has begun."""

import asyncio
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from duetts.config import EngineConfig, ProcessConfig, ServerConfig
from duetts.engine import wire
from duetts.engine.life import Life
from duetts.errors import EngineFailure
from duetts.serving import Plan
from duetts.workers import place
from duetts.workers.place import WorkerPlace
from tests.engine.test_remote import gone
from tests.waiting import LIMIT_S, until

PLAN = Plan("tiny", None, EngineConfig(), ProcessConfig(restart_s=0.1), ServerConfig(("tiny",), workers=2))


class Nobody:
    """A keeper without others, and without a model unless it is given what to say of it."""

    def __init__(self, news: dict[str, Any] | None = None) -> None:
        self._news = news or {}

    def news(self) -> dict[str, Any]:
        return self._news

    async def of_speech(self, owner: str, speech_id: str, cancel: bool) -> dict[str, Any] | None:
        return None

    async def numbers(self, asking: WorkerPlace) -> dict[str, bytes]:
        return {}


async def test_one_that_hangs_is_killed_and_started_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(place, "PING_S", 0.05)
    monkeypatch.setattr(place, "STUCK_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = WorkerPlace(0, PLAN, listener, Nobody())
        await until(lambda: kept._process is not None)
        assert kept._process is not None
        first = kept._process.pid
        for _ in range(2):  # after the first question, whose answer may take as long as a start
            assert await kept.ask("numbers", LIMIT_S) is None
        with suppress(ProcessLookupError):  # where it is so slow that it is held to hang without this
            os.kill(first, signal.SIGSTOP)
        await until(lambda: gone(first) and kept._process is not None)
        assert "HTTP process 0 has not answered for 1 s and is killed" in caplog.text
        await kept.end("hurry")
        assert kept._process is None


async def test_one_that_is_to_end_before_it_has_begun_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = WorkerPlace(0, PLAN, listener, Nobody())
        await asyncio.sleep(0)  # its start is on the way
        assert kept._channel is None
        await kept.end("release")
        assert "killed" not in caplog.text
        assert listener.fileno() < 0  # connections would wait for nobody
        with pytest.raises(EngineFailure, match="was stopped before it was up"):
            kept.first.result()


async def test_one_that_ends_leaves_the_engines_sockets_to_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = tmp_path / "engine" / "socket"
    there.parent.mkdir()
    there.touch()
    news = {"folder": str(tmp_path), "lives": [wire.to_plain(Life(0, "loading", f"ipc://{there}"))]}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = WorkerPlace(0, PLAN, listener, Nobody(news))
        await until(lambda: kept._channel is not None)
        assert await kept.ask("numbers", LIMIT_S) is None  # it has heard the news
        kept.tell_end("drain")
        await asyncio.wait_for(kept.drained.wait(), LIMIT_S)  # it has ended, as it was loading
        assert kept._process is None
    assert there.exists()
    assert "killed" not in caplog.text
