"""Bounds on bodies that are under way: how much memory all of them take together, and how long one may take to arrive. Knows no
field and no route; what a single body may hold is checked where it is read."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duetts.errors import Overloaded

LARGEST_AT_ONCE = 32  # bodies of the largest size that are held together, in as many pieces as they come in
ARRIVAL_S = 120.0  # 16 MiB at 1.1 Mbit/s


class Bodies:
    """Lets bodies in as long as there is room for their bytes, which are held until the request has ended."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._room = LARGEST_AT_ONCE * max_body_bytes
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        try:
            await self._app(scope, lambda: self._take(body), send)
        finally:
            self._held -= body.held

    async def _take(self, body: _Body) -> Message:
        """The next message. Raises `Overloaded` when there is no room for it, `HTTPException` when it comes too late."""
        message = await body.next()
        size = len(message.get("body", b""))
        body.held += size
        self._held += size
        if self._held > self._room:
            raise Overloaded("the bodies of all open requests take too much memory", retry_after_s=2.0)
        return message


class _Body:
    """One body while it arrives: the bytes that were handed on, and until when it must be there."""

    def __init__(self, receive: Receive) -> None:
        self.held = 0
        self._receive = receive
        self._arrived = False
        self._until = asyncio.get_running_loop().time() + ARRIVAL_S

    async def next(self) -> Message:
        if self._arrived:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body has not arrived within {ARRIVAL_S:g} s") from None
        self._arrived = not message.get("more_body", False)
        return message
