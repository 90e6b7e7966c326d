"""The ways from engine threads to tasks: the channel to the one that consumes an utterance, and codes of a reference."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future

from duetts.types import Chunk, Int32, Outcome


class Post:
    """What engine threads send to the consumers on one event loop: gathered, then handed out in one go.

    Waking a loop costs more than all else that is done for a chunk, so whoever sends to many wakes it once.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: deque[tuple[asyncio.Queue[Chunk | Outcome], Chunk | Outcome]] = deque()
        self._woken = False

    def put(self, queue: asyncio.Queue[Chunk | Outcome], item: Chunk | Outcome) -> None:
        """From any thread."""
        self._items.append((queue, item))

    def wake(self) -> None:
        """From any thread. What comes after the consumers' loop has closed is nobody's loss."""
        if self._woken or not self._items:
            return
        self._woken = True
        try:
            self.loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            self._woken = False
            self._items.clear()

    def _hand_out(self) -> None:
        self._woken = False  # before the items are taken: whoever adds one from now on wakes again
        while self._items:
            queue, item = self._items.popleft()
            queue.put_nowait(item)


class Channel:
    """Chunks and at last an outcome, in order. Bounded by the utterance's own `max_frames`, so it needs no back-pressure."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._items: asyncio.Queue[Chunk | Outcome] = asyncio.Queue()

    def put(self, item: Chunk | Outcome) -> None:
        """From any thread. It arrives after the next `wake` of any channel of the same post."""
        self._post.put(self._items, item)

    def wake(self) -> None:
        """From any thread: what was put arrives."""
        self._post.wake()

    async def get(self) -> Chunk | Outcome:
        return await self._items.get()


async def await_codes(future: Future[Int32]) -> Int32:
    """The codes of a reference. A caller that is cancelled takes its clip out of the line. Once begun it is finished and given
    all the same, for those who come back: where encoding is slow, a client that gives up and tries again would never get it.
    """
    codes = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(codes)
    except asyncio.CancelledError:
        if future.cancel():
            raise
        return await codes
