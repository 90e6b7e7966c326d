"""The gate: shut while loading, open, shut for what is new while draining; and how long it waits for what is open."""

import asyncio
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute

from duetts.server.gate import Gate
from tests.waiting import LIMIT_S, until


def application(hold: asyncio.Event) -> Starlette:
    async def slow(_: Any) -> PlainTextResponse:
        await hold.wait()
        return PlainTextResponse("done")

    async def any_path(_: Any) -> PlainTextResponse:
        return PlainTextResponse("inside")

    return Starlette(routes=[Route("/slow", slow), WebSocketRoute("/socket", any_path), Route("/{path:path}", any_path)])


async def waiting(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("waiting", 503)(scope, receive, send)


def client(gate: Gate, root_path: str = "") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(gate, root_path=root_path), base_url="http://x")


async def test_draining_waits_for_what_is_open_and_refuses_the_rest() -> None:
    gate, hold = Gate(waiting), asyncio.Event()
    gate.open(application(hold))
    async with client(gate) as http, client(gate, "/speech") as behind_a_proxy:
        assert (await http.get("/v1/models")).text == "inside"
        open_request = asyncio.create_task(http.get("/slow"))
        await until(lambda: gate._open)
        draining = asyncio.create_task(gate.drain(300))
        await asyncio.sleep(0.05)
        assert not draining.done()
        assert (await http.get("/v1/models")).json()["error"]["code"] == "draining"
        assert (await http.get("/ready")).status_code == 503
        for path in ("/live", "/health", "/health/", "/metrics"):
            assert (await http.get(path)).text == "inside"
        assert (await behind_a_proxy.get("/speech/live")).text == "inside"
        hold.set()
        assert await asyncio.wait_for(draining, LIMIT_S)
        assert (await open_request).text == "done"


async def test_draining_has_a_limit() -> None:
    gate, hold = Gate(waiting), asyncio.Event()
    assert await gate.drain(0)  # nothing is open
    gate = Gate(waiting)
    gate.open(application(hold))
    async with client(gate) as http:
        open_request = asyncio.create_task(http.get("/slow"))
        await until(lambda: gate._open)
        assert not await gate.drain(0.05)
        hold.set()
        await open_request


async def test_a_web_socket_is_told_to_try_again() -> None:
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await Gate(waiting)({"type": "websocket", "path": "/socket"}, receive, send)
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1013)]
