"""What stands between Ray Serve's proxy and the application of a replica, so that it behaves as behind its own port. No Ray.

Ray cancels the handler of a client that leaves; here it becomes the message that servers send, so that leaving is counted as
what it is. Ray's proxy names every answer's request id; here it is left to it.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEAVING_S = 10.0  # that a handler may take to end when its client has left


class Door:
    """An ASGI application in front of a replica's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.draining = asyncio.Event()  # sockets that are idle end when it is set

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "draining": self.draining}
        await self._carry(scope, receive, send if scope["type"] == "websocket" else without_request_id(send))

    async def _carry(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application. When Ray cancels this, the application is told that the client has left, and may end."""
        left = asyncio.Event()
        task = asyncio.ensure_future(self._app(scope, receive_until(left, scope, receive), send))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            left.set()
            await asyncio.wait([task], timeout=LEAVING_S)
            task.cancel()
            raise
        finally:
            if task.done() and not task.cancelled():
                task.exception()  # seen, also where the cancellation is what is told


def receive_until(left: asyncio.Event, scope: Scope, receive: Receive) -> Receive:
    """`receive`, and the message of a client that has gone as soon as `left` is set."""
    gone: Message = {"type": "http.disconnect"}
    if scope["type"] == "websocket":
        gone = {"type": "websocket.disconnect", "code": 1005}

    async def next_message() -> Message:
        message = asyncio.ensure_future(receive())
        leaving = asyncio.ensure_future(left.wait())
        try:
            await asyncio.wait([message, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                return gone
            if message.cancelled() or message.exception() is not None:  # so Ray tells it when it cancels the request first
                return gone
            return message.result()
        finally:
            message.cancel()
            leaving.cancel()

    return next_message


def without_request_id(send: Send) -> Send:
    """`send` without the header X-Request-Id: Ray's proxy adds the same one to every answer."""

    async def send_rest(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [pair for pair in message["headers"] if pair[0].lower() != b"x-request-id"]
            message = {**message, "headers": kept}
        await send(message)

    return send_rest
