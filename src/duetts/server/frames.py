"""A WebSocket as messages in two directions, with limits on their sizes and on how long either side may take. No protocol.

Messages are taken from the socket all the time, since only that tells that the other side has left, and wait here until they
are asked for; of large ones never more than one.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from duetts.errors import CallerLeft, DuettsError
from duetts.server.caller import Caller

# Close codes.
NORMAL, GOING_AWAY, REFUSED, TOO_BIG, INTERNAL = 1000, 1001, 1008, 1009, 1011
BAD_MESSAGE, FIRST_LATE, IDLE = 4400, 4408, 4409

LARGE_BYTES = 128 << 10
MAX_WAITING = 16  # messages
STALL_S = 60.0  # that a message may take to leave; whoever reads nothing for so long has left
CLOSING_S = 1.0
MAX_REASON_BYTES = 120  # the protocol allows 123


class Closing(DuettsError):
    """The socket is to be closed with a code and a reason that the other side is told."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Frames:
    """One socket. As a context manager it accepts and closes it: what is raised inside decides on the close code."""

    def __init__(self, socket: WebSocket, max_bytes: int) -> None:
        self.caller = Caller()  # leaves when the other side does
        self.take: Callable[[], None] = socket.state.take  # of what the client may ask for
        self._socket = socket
        self._max_bytes = max_bytes
        self._draining: asyncio.Event | None = socket.scope.get("state", {}).get("draining")
        self._messages: deque[str | bytes] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Frames:
        await self._socket.accept()
        self._tasks = [asyncio.ensure_future(self._take_messages()), asyncio.ensure_future(self._watch_draining())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Errors that are about the socket go no further."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if isinstance(error, Closing):
            await self._close(error.code, str(error))
        elif not isinstance(error, CallerLeft):
            await self._close(NORMAL if error is None else INTERNAL, "" if error is None else "an internal error")
        return isinstance(error, Closing | CallerLeft)

    async def next(self, limit_s: float) -> str | bytes:
        """The next message. Raises `TimeoutError`, `CallerLeft`, and `Closing` when the server stops and no message waits."""
        async with asyncio.timeout(limit_s):
            while not self._messages:
                if self._draining is not None and self._draining.is_set():
                    raise Closing(GOING_AWAY, "the server is stopping")
                self._news.clear()
                await self.caller.unless_gone(self._news.wait())
        if self.caller.reason is not None:
            raise self.caller.reason
        self._room.set()
        return self._messages.popleft()

    async def send(self, message: dict[str, Any] | bytes) -> None:
        """A dictionary as JSON, bytes as they are. Raises `CallerLeft`, also if the message does not leave in time."""
        data: dict[str, Any] = {"bytes": message} if isinstance(message, bytes) else {"text": json.dumps(message)}
        try:
            async with asyncio.timeout(STALL_S):
                await self._socket.send({"type": "websocket.send", **data})
        except TimeoutError:
            self.caller.leave(CallerLeft("the client reads nothing"))
            raise CallerLeft("the client reads nothing") from None
        except (WebSocketDisconnect, RuntimeError):  # the latter after the end of either side
            raise CallerLeft("the client left") from None

    async def _take_messages(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                self.caller.leave(CallerLeft("the client left"))
                return
            data = message.get("bytes")
            self._messages.append(message["text"] if data is None else data)
            if len(self._messages[-1]) > self._max_bytes:
                self.caller.leave(Closing(TOO_BIG, f"a message may have at most {self._max_bytes} bytes"))
                return
            self._news.set()
            while len(self._messages) >= MAX_WAITING or any(len(waiting) > LARGE_BYTES for waiting in self._messages):
                self._room.clear()
                await self._room.wait()

    async def _watch_draining(self) -> None:
        if self._draining is not None:
            await self._draining.wait()
            self._news.set()

    async def _close(self, code: int, reason: str) -> None:
        shown = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
        with suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                await self._socket.close(code, shown)


async def converse(
    frames: Frames,
    reading: Coroutine[Any, Any, None],
    speaking: Coroutine[Any, Any, None],
    finish: Callable[[], None],
    leave: Callable[[Exception], None],
) -> None:
    """Reads and speaks at the same time. When reading has ended, or the server stops, `finish` tells that nothing more comes,
    and what was asked for is spoken to its end. Whatever happens, `leave` tells at last why nobody listens any more.
    """
    speaker = asyncio.ensure_future(speaking)
    speaker.add_done_callback(lambda task: _report(task, frames.caller))
    stopping: Closing | None = None
    try:
        try:
            await reading
        except Closing as error:
            if error.code != GOING_AWAY:
                raise
            stopping = error
        finish()
        await frames.caller.unless_gone(_end_of(speaker))
        if stopping is not None:
            raise stopping
    finally:
        reading.close()
        leave(frames.caller.reason or CallerLeft("the socket was closed"))
        speaker.cancel()
        await asyncio.gather(speaker, return_exceptions=True)


def _report(task: asyncio.Task[None], caller: Caller) -> None:
    """A fault of whoever speaks ends the conversation."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, Exception):
        caller.leave(error)


async def _end_of(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})
