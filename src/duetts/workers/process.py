"""`python -m duetts.workers.process`: one of several HTTP processes in front of the same engines. No torch.

It is a server like that of `duetts.serving`, but that its keeper starts the engines, has the port, and hears the signals.
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from duetts.config import ServerConfig
from duetts.engine import wire
from duetts.engine.life import Life
from duetts.engine.remote import RemoteSpeaker, visiting
from duetts.errors import DuettsError, UnknownSpeech
from duetts.logs import start_log
from duetts.server.app import create_app
from duetts.server.health import Health
from duetts.server.metrics import Metrics
from duetts.server.peers import numbers_of_all
from duetts.service import SpeechService
from duetts.serving import Plan, Signals, serve_at, start_text_side
from duetts.synthesizer import Synthesizer
from duetts.workers.channel import Channel

OTHERS_S = 3.0  # that the other processes may take to answer
IPC = "ipc://"


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process is told through its standard input; `listener` and `channel` are files that it has inherited."""

    index: int
    plan: Plan
    listener: int
    channel: int


class Told(Signals):
    """The end as the keeper tells it. Signals to all processes of a server, as terminals and service managers send them, mean
    the keeper. `drained` tells it that nothing is open here."""

    def __init__(self, drained: Callable[[], None]) -> None:
        super().__init__()
        self._drained = drained
        self.release = asyncio.Event()

    async def released(self) -> None:
        """Until nothing is open in the other processes either: who connects meanwhile is told that the server stops."""
        self._drained()
        await self.release.wait()

    def catch(self) -> None:
        """In the place of uvicorn's handlers, too."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


class Worker:
    """What this process hears from its keeper, and what it tells the other processes; their `Peers`."""

    def __init__(self, orders: Orders) -> None:
        self.name = f"w{orders.index}"
        self.signals = Told(lambda: self.channel.tell("drained"))
        self.channel: Channel  # set by `work`
        self._index = orders.index
        self._folder: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._make, self._tell_visitors = visiting(orders.plan.processes)
        self._lives: Sequence[Life] = ()
        self._app: FastAPI | None = None

    async def start(self, plan: Plan, health: Health) -> Synthesizer:
        """The text side over the keeper's engines."""
        health.phase = "the model is looked for"
        folder = await self._folder
        health.phase = "the model is loading"
        first = self._index * plan.processes.engines // plan.server.workers
        speaker = RemoteSpeaker(self._make, plan.engine, plan.processes, first=first)
        self._tell_visitors(self._lives)
        return await start_text_side(plan, health, folder, speaker)

    def make_app(self, service: SpeechService, config: ServerConfig, metrics: Metrics, health: Health) -> FastAPI:
        """The application; requests reach it from now on."""
        self._app = create_app(service, config, metrics, health, self)
        self.channel.tell("ready")
        return self._app

    def orphaned(self, _: object) -> None:
        """The keeper is gone, and the engines with it: nothing can be spoken any more, and what it has left is removed."""
        self.signals.first.set()
        self.signals.second.set()
        for life in self._lives:
            if life.address.startswith(IPC):
                shutil.rmtree(Path(life.address.removeprefix(IPC)).parent, ignore_errors=True)

    # -- what the keeper says and asks

    def hear(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "news":
            self._lives = [wire.build(Life, life) for life in values["lives"]] or self._lives
            self._tell_visitors(self._lives)
            if not self._folder.done():
                self._folder.set_result(Path(values["folder"]))
        elif kind == "drain":
            self.signals.first.set()
        elif kind == "release":
            self.signals.release.set()
        elif kind == "hurry":
            self.signals.first.set()
            self.signals.second.set()
        else:
            raise ValueError(f"{kind} is unknown")

    async def answer(self, kind: str, values: dict[str, Any]) -> Any:
        if kind == "numbers":
            return None if self._app is None else self._app.state.numbers()[0]  # the engines are the same for all
        if kind == "speech" and self._app is not None:
            outcomes = self._app.state.outcomes
            with suppress(UnknownSpeech):
                return (outcomes.cancel if values["cancel"] else outcomes.ended)(values["speech_id"])
        return None  # to "ping", too: it is the answer that counts

    # -- the other processes

    async def ask(self, owner: str, speech_id: str, cancel: bool) -> dict[str, Any] | None:
        with suppress(TimeoutError, ConnectionError):
            asked = self.channel.ask("speech", OTHERS_S, owner=owner, speech_id=speech_id, cancel=cancel)
            return await asked  # type: ignore[no-any-return]
        return None

    async def numbers(self, own: bytes, engines: bytes) -> bytes:
        """Those of the processes that answer. The engines are the same for all."""
        told: dict[str, bytes] = {}
        with suppress(TimeoutError, ConnectionError):
            told = await self.channel.ask("numbers", OTHERS_S)
        return numbers_of_all(dict(sorted({**told, self.name: own}.items())), "worker") + engines


async def work(orders: Orders) -> int:
    """Serves until the keeper says that it is the end, or is gone. Returns the exit code."""
    worker = Worker(orders)
    channel = worker.channel = await Channel.open(socket.socket(fileno=orders.channel), worker)
    hearing = asyncio.create_task(channel.run())
    hearing.add_done_callback(worker.orphaned)
    try:
        with socket.socket(fileno=orders.listener) as listener:
            return await serve_at(listener, orders.plan, worker.signals, worker.start, worker.make_app)
    except DuettsError as error:
        channel.tell("failed", error=wire.error_to_plain(error))
        return 1
    finally:
        hearing.remove_done_callback(worker.orphaned)  # it is this process that goes: the others still need what is there
        await channel.close()


def main() -> None:
    """Reads the orders and does what they say. Does not return."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    orders: Orders = pickle.load(sys.stdin.buffer)
    start_log(orders.plan.server.logs, f"worker {orders.index}")
    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        code = runner.run(work(orders))
    sys.exit(code)


if __name__ == "__main__":
    main()
