"""The gate before the application: shut while the model loads, open, and shut again while the server drains. No torch.

It stands outside the application so that it can answer before there is one, and knows when the last open request has ended.
"""

from __future__ import annotations

import asyncio
import json
import uuid

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from duetts.errors import Draining, NotReady
from duetts.server.errors import error_response

ALWAYS = ("/live", "/health", "/v1/health", "/metrics", "/version")  # answered by the application also while draining
TRY_AGAIN_LATER = 1013  # WebSocket close code


class Gate:
    """An ASGI application in front of another one that comes later."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._draining = False
        self._open = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self, app: ASGIApp) -> None:
        """From now on requests reach the application."""
        self._app = app

    async def drain(self, limit_s: float) -> bool:
        """Refuses new requests and waits for those that are open, at most so long. Whether all have ended."""
        self._draining = True
        if self._empty.is_set():
            return True
        try:
            await asyncio.wait_for(self._empty.wait(), limit_s)
        except TimeoutError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", "")).rstrip("/")
        if self._app is None or (self._draining and path not in ALWAYS):
            await self._refuse(path, scope, receive, send)
            return
        self._open += 1
        self._empty.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
            if not self._open:
                self._empty.set()

    async def _refuse(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": "the server is not ready"})
            return
        await self._refusal(path)(scope, receive, send)

    def _refusal(self, path: str) -> Response:
        if path == "/live":
            return _json({"status": "alive"}, 200)
        if path == "/health" and not self._draining:
            return _json({"status": "starting", "reason": "the model is loading"}, 503)
        request_id = f"speech-{uuid.uuid4().hex}"
        error = Draining("the server is stopping") if self._draining else NotReady("the model is loading")
        answer = error_response(error, request_id)
        answer.headers["X-Request-Id"] = request_id
        answer.headers["Connection"] = "close"  # so that the next request finds another server
        return answer


def _json(content: dict[str, str], status: int) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")
