"""Work that several callers need at once: done once, in few threads, and dropped when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from duetts.errors import NotReady, Overloaded

T = TypeVar("T")
P = ParamSpec("P")


class Line:
    """Places, and a line before them that is bounded. Used from one event loop."""

    def __init__(self, num_places: int, max_waiting: int, what: str) -> None:
        self.waiting = 0
        self.seconds = 0.1  # that a place is taken, lately
        self._places = asyncio.Semaphore(num_places)
        self._num_places, self._max_waiting = num_places, max_waiting
        self._what = what

    async def enter(self) -> None:
        """Waits for a place. Raises `Overloaded` when the line is full."""
        if self.waiting >= self._max_waiting:
            wait = self.seconds * (1 + self.waiting / self._num_places)
            raise Overloaded(f"{self.waiting} {self._what}", retry_after_s=max(1.0, wait))
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1

    def leave(self, seconds: float | None = None) -> None:
        """Gives the place back; it was taken for so long, if that is known."""
        if seconds is not None:
            self.seconds += 0.1 * (seconds - self.seconds)
        self._places.release()


class Threads:
    """A few threads and a line before them that is bounded, unlike asyncio's own. Used from one event loop."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self.line = Line(num_threads, max_waiting, "references wait to be read")
        self._closed = False

    async def run(self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """The result of `work` on one of the threads. Raises `Overloaded` when the line is full, `NotReady` once closed.

        A caller that is cancelled leaves the line; work that has begun keeps its thread to the end.
        """
        await self.line.enter()
        if self._closed:
            self.line.leave()
            raise NotReady("no references are read any more")
        future = self._pool.submit(partial(work, *arguments, **options))
        future.add_done_callback(partial(self._release, asyncio.get_running_loop(), time.monotonic()))
        return await asyncio.wrap_future(future)

    def _release(self, loop: asyncio.AbstractEventLoop, began: float, _: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop has closed meanwhile, and nobody waits there
            loop.call_soon_threadsafe(self.line.leave, time.monotonic() - began)

    def start(self, work: Callable[P, object], *arguments: P.args, **options: P.kwargs) -> None:
        """Runs `work`, which raises nothing, when a thread is free; nobody waits for it. Once closed it is dropped."""
        if not self._closed:
            self._pool.submit(work, *arguments, **options)

    def close(self) -> None:
        """Takes no more. Waits for nothing; what has begun, and what `start` was given, still comes to its end."""
        self._closed = True
        self._pool.shutdown(wait=False)


@dataclass(eq=False, slots=True)
class _Work(Generic[T]):
    task: asyncio.Task[T]
    callers: int = 0


class SharedWork(Generic[T]):
    """Work by key. Whoever asks for a key whose work is under way waits for that."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Work[T]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._open

    async def run(self, key: Hashable, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a key's work, begun here if nobody has. It is cancelled when its last caller has left."""
        while True:
            work = self._open.get(key)
            if work is None or work.task.cancelled():  # what is over may stand here until its callback runs
                work = self._begin(key, begin)
            work.callers += 1
            try:
                return await asyncio.shield(work.task)
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if work.task.cancelled() and current is not None and not current.cancelling():
                    continue  # earlier callers gave it up just before this one came
                raise
            finally:
                work.callers -= 1
                if work.callers == 0:
                    work.task.cancel()

    def _begin(self, key: Hashable, begin: Callable[[], Coroutine[Any, Any, T]]) -> _Work[T]:
        work = self._open[key] = _Work(asyncio.ensure_future(begin()))
        work.task.add_done_callback(partial(self._end, key, work))
        return work

    def _end(self, key: Hashable, work: _Work[T], task: asyncio.Task[T]) -> None:
        if self._open.get(key) is work:
            del self._open[key]
        if not task.cancelled():
            task.exception()  # else asyncio complains that nobody asked
