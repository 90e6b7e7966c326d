"""A speaker over engine processes: each request to one of them, their failures to typed errors. Imports no torch.

A request that has reached an engine is never given to another one when that engine dies: it may be what killed it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import zmq.asyncio

from duetts.config import EngineConfig, ProcessConfig
from duetts.engine.life import Life
from duetts.engine.link import Link
from duetts.engine.routing import Candidate, choose, reference_weight, utterance_weight
from duetts.engine.supervisor import ENGINE_COMMAND, Supervisor
from duetts.engine.visitor import Visitor
from duetts.errors import DeadlineExceeded, EngineDead, NotReady, Overloaded
from duetts.types import Chunk, Float32, Int32, Outcome, SpeakerInfo, Timings, Utterance


@dataclass(slots=True)
class Search:
    """Work that looks for an engine: what it is, since when, how long it may take, and who has refused it."""

    key: str
    weight: float
    timeout_s: float | None = None
    began: float = field(default_factory=time.monotonic)
    refusals: dict[int, Overloaded | NotReady] = field(default_factory=dict)

    @property
    def remaining_s(self) -> float | None:
        """What is left of the request's own time, which also passes while an engine is waited for."""
        return None if self.timeout_s is None else max(0.0, self.timeout_s - (time.monotonic() - self.began))


class Place(Protocol):
    """An engine's place, whoever keeps it: `Supervisor` where it is started, `Visitor` elsewhere."""

    @property
    def index(self) -> int: ...

    @property
    def link(self) -> Link | None:
        """To the engine's present life."""
        ...

    @property
    def first(self) -> asyncio.Future[SpeakerInfo]:
        """The first time that it is up."""
        ...

    @property
    def pid(self) -> int | None: ...

    @property
    def starts(self) -> int: ...

    @property
    def start_s(self) -> float: ...

    @property
    def takes_work(self) -> bool: ...

    @property
    def state(self) -> str: ...

    @property
    def expected_s(self) -> float: ...

    @property
    def life(self) -> Life: ...

    async def stop(self) -> None: ...


Places = Callable[[zmq.asyncio.Context, Callable[[], None]], Sequence[Place]]  # made with what is to be called on a change


class RemoteSpeaker:
    """Engine processes behind the `Speaker` protocol. Use it in the event loop that started it, and `close` it there.

    `changed` is called whenever an engine's life may have. Of engines that are equally busy it takes the next from `first` on.
    """

    def __init__(
        self, make: Places, engine: EngineConfig, config: ProcessConfig, changed: Callable[[], None] = lambda: None, *,
        first: int = 0,
    ) -> None:  # fmt: skip
        self.info: SpeakerInfo  # set by `up`
        self._changed, self._first = changed, first
        self._config = config
        self._room = engine.max_num_seqs + engine.max_queue
        self._context = zmq.asyncio.Context()
        self._news = asyncio.Event()  # replaced each time that it is set
        self._waiting = 0
        self._closed = False
        self._engines = make(self._context, self._on_change)

    @classmethod
    async def start(
        cls, folder: Path, engine: EngineConfig, config: ProcessConfig, command: Sequence[str] = ENGINE_COMMAND
    ) -> RemoteSpeaker:
        """Starts all engines and waits until each has been up once. Raises as `up` does."""
        return await cls(keeping(folder, engine, config, command), engine, config).up()

    async def up(self) -> Self:
        """Waits until each engine has been up once; if one cannot, it is closed.

        Raises what an engine raised when it could not start: `ConfigError`, `CheckpointError`, `NotEnoughMemory`, or
        `EngineFailure` when it ended several times before it was up.
        """
        started = False
        try:
            done, _ = await asyncio.wait([engine.first for engine in self._engines], return_when=asyncio.FIRST_EXCEPTION)
            for first in done:
                self.info = first.result()
            started = True
        finally:
            if not started:
                await self.close()
        return self

    @property
    def lives(self) -> list[Life]:
        """What others need to know to reach the engines."""
        return [engine.life for engine in self._engines]

    async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        """Chunks, then one outcome. Closing it early cancels in the engine.

        Raises `Overloaded` when every engine refuses, `NotReady` when none is up in time.
        """
        search = Search(utterance.voice_key, utterance_weight(utterance), utterance.timeout_s)
        while True:
            try:
                engine, link = await self._find(search)
            except DeadlineExceeded as error:
                waited_s = time.monotonic() - search.began
                yield Outcome("timeout", 0, utterance.prompt.shape[1], Timings(waited_s, total_s=waited_s), error)
                return
            try:
                async with aclosing(link.speak(replace(utterance, timeout_s=search.remaining_s))) as items:
                    async for item in items:
                        yield item
                return
            except (Overloaded, NotReady) as error:  # only before any audio
                search.refusals[engine.index] = error

    async def encode_reference(self, wave: Float32) -> Int32:
        """Mono float32 [samples] at the codec rate -> codes int32 [codebooks, frames]. Raises as `speak` does."""
        search = Search("", reference_weight(len(wave), self.info.frame_length))
        while True:
            engine, link = await self._find(search)
            try:
                return await link.encode(wave)
            except (Overloaded, NotReady) as error:
                search.refusals[engine.index] = error

    def stats(self) -> dict[str, Any]:
        """The engines' last figures, added up, and those of each under `engines`. Nothing is waited for. `full`: every engine
        that is up has all the calls that it takes, one of which may end in `retry_after_s`."""
        each = [self._figures(engine) for engine in self._engines]
        up = [engine.link for engine in self._engines if engine.takes_work and engine.link is not None]
        links = [engine.link for engine in self._engines if engine.link is not None]
        return {
            **add_up([{name: value for name, value in link.stats.items() if name != "codec"} for link in links]),
            "alive": bool(up),
            "full": all(link.num_calls >= self._room for link in up),
            "retry_after_s": min((_call_s(link) for link in up), default=0.0),
            "engines_up": len(up),
            "waiting_for_engine": self._waiting,
            "restarts": sum(max(0, engine.starts - 1) for engine in self._engines),
            "engines": each,
        }

    async def close(self) -> None:
        """Ends running utterances as aborted and all engine processes. A second call does nothing more."""
        self._closed = True
        self._on_change()
        await asyncio.gather(*(engine.stop() for engine in self._engines))
        self._context.destroy(linger=0)

    # -- choice ------------------------------------------------------------------------------------------------------

    async def _find(self, search: Search) -> tuple[Place, Link]:
        """The engine that gets this work, of those that have not refused it, and its link. Waits while none is up."""
        while True:
            if self._closed:
                raise NotReady("the speaker is closed")
            up = {engine.index: (engine, engine.link) for engine in self._engines if engine.takes_work and engine.link}
            candidates = [Candidate(index, link.load) for index, (_, link) in up.items() if index not in search.refusals]
            if candidates:
                return up[choose(candidates, search.key, search.weight, self._first).index]
            full = [error for error in search.refusals.values() if isinstance(error, Overloaded)]
            if full:
                raise min(full, key=lambda error: error.retry_after_s)
            search.refusals.clear()  # those that were about to end may have come back
            await self._wait(search)

    async def _wait(self, search: Search) -> None:
        """Until there is news of an engine. Raises `NotReady` when too many wait or too long, or at once when none can be up
        in time, and `DeadlineExceeded` when the request's own time is over."""
        expected_s = min(engine.expected_s for engine in self._engines)
        retry_after_s = max(1.0, expected_s)
        if self._waiting >= self._config.max_waiting:
            raise EngineDead("no engine is up and enough requests wait for one", retry_after_s=retry_after_s)
        left_s = search.began + self._config.wait_s - time.monotonic()
        if expected_s > left_s:
            raise EngineDead("no engine is up, nor will be soon", retry_after_s=retry_after_s)
        own_s = search.remaining_s
        limit_s = max(0.0, left_s if own_s is None else min(left_s, own_s))
        # News may have come together with a refusal, before anybody waited for it: whoever is up is asked again soon.
        look_s = self._config.heartbeat_s if any(engine.takes_work for engine in self._engines) else limit_s
        self._waiting += 1
        try:
            async with asyncio.timeout(min(look_s, limit_s)):
                await self._news.wait()
        except TimeoutError:
            if look_s < limit_s:
                return
            if own_s is not None and own_s <= left_s:
                raise DeadlineExceeded(f"the request's limit of {search.timeout_s} s has passed") from None
            raise EngineDead("no engine is up", retry_after_s=retry_after_s) from None
        finally:
            self._waiting -= 1

    def _on_change(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
        self._changed()

    def _figures(self, engine: Place) -> dict[str, Any]:
        link = engine.link
        apart = {"codec": {"role": "codec", "state": "away", "pid": None, "starts": 0}}  # it comes and goes with its engine
        return {
            **(apart if self._config.codec_device != "same" else {}),
            **(link.stats if link else {}),
            "index": engine.index,
            "state": engine.state,
            "pid": engine.pid,
            "starts": engine.starts,
            "start_s": engine.start_s,
            "calls": link.num_calls if link else 0,
            "owed_frames": link.load if link else 0.0,
        }


def keeping(
    folder: Path, engine: EngineConfig, config: ProcessConfig, command: Sequence[str] = ENGINE_COMMAND, *,
    are_visited: bool = False,
) -> Places:  # fmt: skip
    """Engines that this process starts and keeps; other processes of this server may visit them."""
    return lambda context, changed: [
        Supervisor(index, folder, engine, config, context, changed, command, is_visited=are_visited)
        for index in range(config.engines)
    ]


def visiting(config: ProcessConfig) -> tuple[Places, Callable[[Sequence[Life]], None]]:
    """Engines that another process keeps, and where to tell what it says of them."""
    visitors: list[Visitor] = []

    def make(context: zmq.asyncio.Context, changed: Callable[[], None]) -> Sequence[Place]:
        visitors.extend(Visitor(index, config, context, changed) for index in range(config.engines))
        return tuple(visitors)

    def tell(lives: Sequence[Life]) -> None:
        for visitor, life in zip(visitors, lives, strict=False):  # either may not be there yet
            visitor.hear(life)

    return make, tell


def _call_s(link: Link) -> float:
    """How long a call of this engine still takes on average, if each gets a frame in every step."""
    return link.load / max(1, link.num_calls) * float(link.stats.get("step_s", 0.0))


def add_up(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One set of figures for several engines: counts are added, also inside maps; of measures (with a fraction) the worst is
    taken, which is the largest unless it is called `smallest_`; of anything else the last."""
    total: dict[str, Any] = {}
    for name, value in ((name, value) for each in figures for name, value in each.items()):
        known = total.get(name)
        if isinstance(value, dict):
            total[name] = add_up([known or {}, value])
        elif isinstance(value, bool) or not isinstance(value, int | float) or known is None:
            total[name] = value
        elif isinstance(value, int):
            total[name] = known + value
        else:
            total[name] = min(known, value) if name.startswith("smallest_") else max(known, value)
    return total
