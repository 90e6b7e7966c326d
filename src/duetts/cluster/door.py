"""What stands between Ray Serve's proxy and the application of a replica, so that it behaves as behind its own port. No Ray.

Ray cancels the handler of a client that leaves; here it becomes the message that servers send, so that leaving is counted as
what it is. Ray's proxy names every answer's request id; here it is left to it. And what only one replica knows, a speech by
its id and its numbers, is asked of all.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duetts.server.errors import route_path

LEAVING_S = 10.0  # that a handler may take to end when its client has left
SPEECH = re.compile(r"/v1/audio/speech/[^/]+")
NUMBERS = "/metrics"
UNKNOWN = "request_not_found"  # the code of a speech that is not known here

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Question:
    """A request without a body that every replica is asked."""

    method: str
    path: str
    headers: Headers


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, and which replica it is from."""

    replica: str
    status: int
    headers: Headers
    body: bytes

    @property
    def is_unknown(self) -> bool:
        """Whether it is about a speech that this replica does not know."""
        if self.status != 404:
            return False
        try:
            return bool(json.loads(self.body)["error"]["code"] == UNKNOWN)
        except (ValueError, KeyError, TypeError):
            return False


class Door:
    """An ASGI application in front of a replica's own. `ask_others` gives the answers of the other replicas that are there."""

    def __init__(self, app: ASGIApp, replica: str, ask_others: Callable[[Question], Awaitable[list[Answer]]]) -> None:
        self._app = app
        self._replica = replica
        self._ask_others = ask_others
        self.draining = asyncio.Event()  # sockets that are idle end when it is set

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "draining": self.draining}
        question = asked_of_all(scope)
        if question is None:
            await self._carry(scope, receive, send if scope["type"] == "websocket" else without_request_id(send))
        else:
            await say(await self._find(question, scope), send)

    async def answer(self, question: Question, scope: Scope | None = None) -> Answer:
        """The application's answer to a question; it is checked for keys and limits like any other request."""
        scope = scope or scope_of(question)
        started: Message = {}
        parts: list[bytes] = []

        async def keep(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.update(message)
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, no_body, without_request_id(keep))
        return Answer(self._replica, started["status"], [tuple(pair) for pair in started["headers"]], b"".join(parts))

    async def _find(self, question: Question, scope: Scope) -> Answer:
        own = await self.answer(question, scope)
        if question.path == NUMBERS and own.status == 200:
            others = [one for one in await self._ask_others(question) if one.status == 200]
            return with_body(own, numbers_of_all([own, *others]))
        if own.is_unknown:
            return next((one for one in await self._ask_others(question) if not one.is_unknown), own)
        return own

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


def asked_of_all(scope: Scope) -> Question | None:
    """The question that a request is, if more than one replica may know the answer."""
    if scope["type"] != "http":
        return None
    path, method = route_path(scope).rstrip("/"), scope["method"]
    if (method == "GET" and path == NUMBERS) or (method in ("GET", "DELETE") and SPEECH.fullmatch(path)):
        return Question(method, path, [(bytes(name), bytes(value)) for name, value in scope["headers"]])
    return None


def scope_of(question: Question) -> Scope:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": question.method, "scheme": "http",
        "path": question.path, "raw_path": question.path.encode(), "query_string": b"", "root_path": "",
        "headers": question.headers, "client": None, "server": None,
    }  # fmt: skip


async def no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def say(answer: Answer, send: Send) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body})


def with_body(answer: Answer, body: bytes) -> Answer:
    headers = [(name, value) for name, value in answer.headers if name.lower() != b"content-length"]
    return Answer(answer.replica, answer.status, [*headers, (b"content-length", str(len(body)).encode())], body)


def numbers_of_all(answers: list[Answer]) -> bytes:
    """The numbers of all replicas in one text: each line gets the label `replica`, families stay together."""
    families: dict[str, list[str]] = {}
    for answer in answers:
        family, is_first = families.setdefault("", []), True
        for line in answer.body.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_first = name not in families
                family = families.setdefault(name, [])
            if not line.startswith("#"):
                family.append(labelled(line, answer.replica))
            elif is_first:
                family.append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines).encode()


def labelled(line: str, replica: str) -> str:
    """A line of Prometheus' text with one label more. Names of numbers have no brace."""
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = line.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'
