"""The channel from engine threads to the one task that consumes an utterance."""

from __future__ import annotations

import asyncio

from duetts.types import Chunk, Outcome


class Channel:
    """Chunks and at last an outcome, in order. Bounded by the utterance's own `max_frames`, so it needs no back-pressure."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Chunk | Outcome] = asyncio.Queue()

    def put(self, item: Chunk | Outcome) -> None:
        """From any thread. What comes after the consumer's loop has closed is nobody's loss."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def get(self) -> Chunk | Outcome:
        return await self._items.get()
