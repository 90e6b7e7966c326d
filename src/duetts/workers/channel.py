"""Messages both ways between the keeper and one of its HTTP processes: told, or asked and answered. No torch.

Both ends are one program, and there is nobody else on the line: what comes is taken as it is meant.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from itertools import count
from typing import Any, Protocol

import ormsgpack

SIZE_BYTES = 4  # before every message
TOLD = -1  # in the place of a question's number
LAST_WORDS_S = 1.0

log = logging.getLogger("duetts")


class Party(Protocol):
    """Whoever is at one end."""

    def hear(self, kind: str, values: dict[str, Any]) -> None:
        """What was told, in the order in which it was."""
        ...

    async def answer(self, kind: str, values: dict[str, Any]) -> Any:
        """Plain values for the other end. Several questions may be open at once."""
        ...


class Channel:
    """One end of a pair of sockets. `run` it until the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, party: Party) -> None:
        self._reader, self._writer, self._party = reader, writer, party
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Future[Any]] = set()

    @classmethod
    async def open(cls, end: socket.socket, party: Party) -> Channel:
        """The channel at one end of a pair, which it closes."""
        return cls(*await asyncio.open_unix_connection(sock=end), party)

    def tell(self, kind: str, **values: Any) -> None:
        """Goes out at once, to whoever is still there."""
        self._send(kind, TOLD, values)

    async def ask(self, kind: str, limit_s: float, **values: Any) -> Any:
        """The answer. Raises `TimeoutError`, and `ConnectionError` when the other end is gone or cannot answer."""
        number = next(self._numbers)
        answered = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(kind, number, values)
            async with asyncio.timeout(limit_s):
                return await answered
        finally:
            del self._asked[number]

    async def run(self) -> None:
        """Takes messages until the other end is gone; then open questions have no answer."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(SIZE_BYTES), "little")
                self._take(ormsgpack.unpackb(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            for answered in self._asked.values():
                if not answered.done():
                    answered.set_exception(ConnectionError("the other end is gone"))

    async def close(self) -> None:
        """Closes this end when what was said is out."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._writer.drain()
        except (TimeoutError, ConnectionError):
            pass
        for task in [*self._answering]:
            task.cancel()
        self._writer.close()

    def _send(self, kind: str, number: int, values: Any) -> None:
        if not self._writer.is_closing():
            packed = ormsgpack.packb([kind, number, values])
            self._writer.write(len(packed).to_bytes(SIZE_BYTES, "little") + packed)

    def _take(self, message: Any) -> None:
        kind, number, values = message
        if kind in ("answer", "failure"):
            answered = self._asked.get(number)
            if answered is not None and not answered.done() and kind == "answer":
                answered.set_result(values)
            elif answered is not None and not answered.done():
                answered.set_exception(ConnectionError(values))
        elif number == TOLD:
            self._party.hear(kind, values)
        else:
            task = asyncio.ensure_future(self._party.answer(kind, values))
            self._answering.add(task)
            task.add_done_callback(partial(self._on_answer, kind, number))

    def _on_answer(self, kind: str, number: int, task: asyncio.Future[Any]) -> None:
        self._answering.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._send("answer", number, task.result())
        else:
            log.error("%s could not be answered", kind, exc_info=error)
            self._send("failure", number, f"{kind}: {type(error).__name__}")
