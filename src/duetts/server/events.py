"""Speech as server-sent events: deltas with audio in base64, then one event of the end. Knows no formats."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from duetts.errors import CallerLeft
from duetts.server.errors import error_body
from duetts.server.rendition import Rendition

CONTENT_TYPE = "text/event-stream; charset=utf-8"
SILENCE_S = 10.0
KEEP_ALIVE = b": keep-alive\n\n"


def event(kind: str, **fields: Any) -> bytes:
    """One event: its name, and its JSON on one line. The space after `data:` is there for clients that look for it."""
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


class EventStream(Response):
    """A delta for every piece of audio and a comment for every silence, then `done`, or `error` if the speech failed.
    `closing` is closed at the end."""

    def __init__(self, headers: dict[str, str], rendition: Rendition, closing: AsyncExitStack) -> None:
        super().__init__(None, 200, headers | {"Content-Type": CONTENT_TYPE})
        del self.headers["content-length"]
        self._rendition, self._closing = rendition, closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error that an event has told is raised after the end of the body, for the log."""
        failure: BaseException | None = None
        begun = False
        output = self._rendition.order.output
        shared = {"format": output.format, "sample_rate": output.sample_rate}
        async with self._closing, aclosing(_with_silences(aiter(self._rendition))) as items:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for item in items:
                if isinstance(item, BaseException):
                    failure = item
                    body = event("error", **error_body(item, scope["state"]["request_id"]), partial_audio=begun)
                elif item is None:
                    body = KEEP_ALIVE
                else:
                    begun = True
                    body = event("speech.audio.delta", audio=base64.b64encode(item).decode(), **shared)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            last = event("speech.audio.done", **self._rendition.summary()) if failure is None else b""
            await send({"type": "http.response.body", "body": last, "more_body": False})
            if failure is not None:
                raise failure


async def _with_silences(audio: AsyncIterator[bytes]) -> AsyncGenerator[bytes | BaseException | None, None]:
    """The pieces of audio, None for every `SILENCE_S` without one, and an error of theirs as the last item."""
    while True:
        task = asyncio.ensure_future(_next(audio))
        try:
            while not (await asyncio.wait({task}, timeout=SILENCE_S))[0]:
                yield None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        error = task.exception()
        if isinstance(error, CallerLeft):
            raise error
        if error is not None:
            yield error
            return
        if task.result() is None:
            return
        yield task.result()


async def _next(audio: AsyncIterator[bytes]) -> bytes | None:
    """None at the end: a StopAsyncIteration cannot leave a task."""
    return await anext(audio, None)
