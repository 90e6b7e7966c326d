"""Whether anybody still wants what is being made. Every door has one for each request; knows no protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Caller:
    """Whoever waits for a speech. After `leave` nothing is waited for any more. Made in the event loop."""

    def __init__(self) -> None:
        self._left: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    @property
    def reason(self) -> Exception | None:
        """Why nobody waits any more."""
        return self._left.result() if self._left.done() else None

    def leave(self, reason: Exception) -> None:
        """Nobody wants the speech any more; only the first reason counts."""
        if not self._left.done():
            self._left.set_result(reason)

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work, which is cancelled if the caller leaves. Then raises the reason."""
        if self._left.done():  # work that never has to wait would win every race below
            work.close()
            raise self._left.result()
        task = asyncio.ensure_future(work)
        try:
            waited: set[asyncio.Future[Any]] = {task, self._left}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._left.result()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
