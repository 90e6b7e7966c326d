"""The engine's side of its codec process: that process's life, and a vocoder and an encoder that it stands behind. No torch.

The codec worker stays with the engine, and with it chunks, playout clocks and ends of requests: only calls of the decoder go
over, each with the codes of some streams, and their PCM comes back. Calls and references are sent from the event loop in which
this was made; vocoder and encoder are used from the engine's threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq.asyncio

from duetts.config import EngineConfig, ProcessConfig
from duetts.engine.codec_worker import CodecWorker
from duetts.engine.link import Link
from duetts.engine.parts import DecodeCall, Decoded
from duetts.engine.supervisor import ENGINE_COMMAND, Supervisor
from duetts.errors import EngineFailure, NotReady
from duetts.types import Float32, Int32, SpeakerInfo


class RemoteCodec:
    """One codec process. `engine` says how its half runs; `changed` is called when it may have come or gone."""

    def __init__(
        self, index: int, folder: Path, engine: EngineConfig, config: ProcessConfig, changed: Callable[[], None],
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._changed = changed
        self._context = zmq.asyncio.Context()
        self._supervisor = Supervisor(
            index, folder, engine, replace(config, listen=""), self._context, self._on_change, command, "codec"
        )
        self._link: Link | None = None  # of the life that calls go to
        self._worker: CodecWorker | None = None

    @property
    def first(self) -> asyncio.Future[SpeakerInfo]:
        """The first time that it is up, or why it cannot be."""
        return self._supervisor.first

    @property
    def is_up(self) -> bool:
        """Whether it takes calls and has been heard lately."""
        return self._link is not None and self._supervisor.takes_work

    @property
    def expected_s(self) -> float:
        """Seconds until it may be up."""
        return self._supervisor.expected_s

    def join(self) -> SpeakerInfo:
        """From another thread: waits until it is up for the first time, and gives what it told. Raises why it cannot be."""

        async def wait() -> SpeakerInfo:
            return await asyncio.shield(self.first)

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def attach(self, worker: CodecWorker) -> None:
        """From any thread, once: whose calls come, and who is told what can be taken."""
        self._loop.call_soon_threadsafe(self._begin, worker)

    def decode(self, call: DecodeCall) -> Future[Decoded]:
        """From any thread. Raises `NotReady` when it is away."""
        link, worker = self._link, self._worker
        if link is None or worker is None:
            raise NotReady("the codec process is not up")
        done = asyncio.run_coroutine_threadsafe(link.decode(call), self._loop)
        done.add_done_callback(lambda _: worker.wake())
        return done

    def encode(self, wave: Float32) -> Future[Int32]:
        """From any thread. Raises `NotReady` when it is away."""
        link = self._link
        if link is None:
            raise NotReady("the codec process is not up", retry_after_s=max(1.0, self.expected_s))
        return asyncio.run_coroutine_threadsafe(link.encode(wave), self._loop)

    def stats(self) -> dict[str, Any]:
        """What it last told, and what is known of its process."""
        supervisor = self._supervisor
        told = supervisor.link.stats if supervisor.link is not None else {}
        own = {"state": supervisor.state, "pid": supervisor.pid, "starts": supervisor.starts, "start_s": supervisor.start_s}
        return {"role": "codec", **told, **own, "expected_s": self.expected_s}

    async def close(self) -> None:
        """Ends the process."""
        await self._supervisor.stop()
        self._context.destroy(linger=0)

    # -- its life, in the event loop ---------------------------------------------------------------------------------

    def _begin(self, worker: CodecWorker) -> None:
        self._worker = worker
        self._tell_lost(worker)
        self._on_change()

    def _on_change(self) -> None:
        worker, link, state = self._worker, self._supervisor.link, self._supervisor.state
        if worker is not None:
            serves = link is not None and not link.failed and state in ("ready", "silent")
            if self._link is not None and (link is not self._link or not serves):
                self._link = None
                self._tell_lost(worker)
            if self._link is None and link is not None and serves:
                self._link = link
                worker.allow(int(link.stats.get("credit", 1)))
        self._changed()

    def _tell_lost(self, worker: CodecWorker) -> None:
        worker.lose(EngineFailure("the codec process has ended"), time.monotonic() + self._config.wait_s)


class RemoteDecoding:
    """A call that is under way in the codec process."""

    def __init__(self, done: Future[Decoded]) -> None:
        self._done = done
        self.seconds: float | None = None

    def ready(self) -> bool:
        return self._done.done()

    def result(self) -> list[bytes | None]:
        """PCM of each stream. Raises the `EngineFailure` that the call ended with."""
        found = self._done.result()
        self.seconds = found.seconds
        return found.sounds


class RemoteVocoder:
    """`slots` streams of a codec process that decodes `quantum` frames in each call, or any number."""

    def __init__(self, codec: RemoteCodec, *, slots: int, quantum: int | None) -> None:
        self.slots = slots
        self.quantum = quantum
        self._codec = codec
        self._fresh: set[int] = set()

    def reset(self, slot: int) -> None:
        """The next call for a slot begins a stream."""
        self._fresh.add(slot)

    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> RemoteDecoding:
        """Sends a call. Raises `NotReady` when nobody is there for it."""
        fresh = [slot for slot in slots if slot in self._fresh]
        decoding = RemoteDecoding(self._codec.decode(DecodeCall(slots, fresh, codes, keep)))
        self._fresh.difference_update(fresh)
        return decoding


class RemoteEncoder:
    """References to codes by a codec process, which steps by itself. Its `close` ends what waits."""

    alive = True  # the process is watched by others

    def __init__(self, codec: RemoteCodec) -> None:
        self._codec = codec
        self._open: set[Future[Int32]] = set()

    @property
    def waiting(self) -> int:
        return len(self._open)

    def submit(self, wave: Float32) -> Future[Int32]:
        """From any thread. Raises `NotReady`; that a line is full comes with the future."""
        future = self._codec.encode(wave)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def step(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing runs here."""
