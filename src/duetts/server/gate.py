"""The gate before the application: shut while the model loads, open, and shut again while the server drains. No torch.

It stands outside the application so that it can answer before there is one, and knows when the last open request has ended.
"""

from __future__ import annotations

import asyncio
import uuid

from starlette.types import ASGIApp, Receive, Scope, Send

from duetts.errors import Draining, NotReady
from duetts.server.errors import error_response, route_path

ALWAYS = ("/live", "/health", "/v1/health", "/metrics", "/version")  # answered by the application also while draining
TRY_AGAIN_LATER = 1013  # WebSocket close code


class Gate:
    """An ASGI application in front of another one that comes later; until then `waiting` answers, but no sockets."""

    def __init__(self, waiting: ASGIApp) -> None:
        self._app = waiting
        self._is_open = False
        self._draining = asyncio.Event()  # sockets, which may live for ever, watch it to know when to end
        self._open = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self, app: ASGIApp) -> None:
        """From now on requests reach the application."""
        self._app = app
        self._is_open = True

    async def drain(self, limit_s: float) -> bool:
        """Refuses new requests and waits for those that are open, at most so long. Whether all have ended."""
        self._draining.set()
        if self._empty.is_set():
            return True
        try:
            await asyncio.wait_for(self._empty.wait(), limit_s)
        except TimeoutError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._draining.is_set() and route_path(scope) not in ALWAYS:
            await _refuse(Draining("the server is stopping"), scope, receive, send)
            return
        if scope["type"] == "websocket" and not self._is_open:
            await _refuse(NotReady("the model is loading"), scope, receive, send)
            return
        if scope["type"] == "websocket":
            scope["state"] = {**scope.get("state", {}), "draining": self._draining}
        self._open += 1
        self._empty.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
            if not self._open:
                self._empty.set()


async def _refuse(error: NotReady, scope: Scope, receive: Receive, send: Send) -> None:
    """An answer that says when to come again. A socket has it too, or, where the server cannot, a code that means the same."""
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": str(error)})
        return
    request_id = f"speech-{uuid.uuid4().hex}"
    answer = error_response(error, request_id, route_path(scope))
    answer.headers["X-Request-Id"] = request_id
    answer.headers["Connection"] = "close"  # so that the next request finds another server
    await answer(scope, receive, send)
