"""Keys on every route, and the web pages whose scripts may ask."""

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from duetts.config import AccessConfig, Limits, ServerConfig
from duetts.server.app import create_app
from duetts.server.auth import CATALOG, PUBLIC
from duetts.server.errors import is_fish
from duetts.serving import KEEP_ALIVE_S
from tests.server.conftest import NATIVE, error_of
from tests.server.sine import SineService
from tests.waiting import LIMIT_S

KEYS = ("first-key", "second-key")
PAGE = "https://page.example"
DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def application(access: AccessConfig) -> FastAPI:
    limits = Limits()
    return create_app(SineService(limits), ServerConfig((NATIVE,), limits=limits, access=access))


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[httpx.Client]:
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, lifespan="off", log_config=None, timeout_keep_alive=KEEP_ALIVE_S, **options)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    base = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=base, timeout=LIMIT_S, trust_env=False) as http:
        yield http
    server.should_exit = True
    thread.join()


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path of every route, paths filled in."""
    found = []

    def walk(several: Any) -> None:
        for route in several:
            if isinstance(route, WebSocketRoute) or type(route).__name__ == "APIWebSocketRoute":
                found.append(("WEBSOCKET", re.sub(r"\{[^}]*\}", "x", route.path)))
            elif hasattr(route, "methods"):
                found.extend((method, re.sub(r"\{[^}]*\}", "x", route.path)) for method in route.methods)
            else:
                walk(route.original_router.routes if hasattr(route, "original_router") else route.routes)

    walk(app.routes)
    return found


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return application(AccessConfig(KEYS))


@pytest.fixture(scope="module")
def guarded(app: FastAPI) -> Iterator[httpx.Client]:
    with serving(app) as http:
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def refused(answer: httpx.Response, path: str) -> None:
    """A 401 in the shape that clients of that path read."""
    assert answer.status_code == 401, (path, answer.text)
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.headers["X-Request-Id"]
    if answer.request.method == "HEAD":
        return
    if is_fish(path):
        assert answer.json()["statusCode"] == 401
        assert answer.json()["message"]
    else:
        error_of(answer, 401, "invalid_api_key", None)


def test_every_route_but_the_documented_few_wants_a_key(app: FastAPI, guarded: httpx.Client) -> None:
    listed = routes(app)
    assert {("POST", "/v1/audio/speech"), ("POST", "/v1/tts"), ("GET", "/v1/audio/voices")} <= set(listed)
    assert len(listed) > 20
    for method, path in listed:
        if method == "WEBSOCKET":
            continue
        answer = guarded.request(method, path)
        if path in PUBLIC:
            assert answer.status_code in (200, 503), path
        else:
            refused(answer, path)
            with_key = guarded.request(method, path, headers=bearer("second-key"))
            assert with_key.status_code != 401, path


def test_the_documented_few_are_those_of_the_code() -> None:
    text = DOCS.read_text(encoding="utf-8").split("## Keys and web pages")[1].split("\n## ")[0]
    sentence = text[text.index("need none:") :]
    named = set(re.findall(r"`(/[a-z0-9./_{}]*)`", sentence))
    assert named == {*PUBLIC, *CATALOG, "/v1/models/{id}"}


@pytest.mark.parametrize("path", ["/v1/nothing", "/", "/v1", "//live", "/live/../v1/models", "/metrics", "/v1/tts/x", "/livex"])
def test_paths_that_are_none_want_a_key_too(guarded: httpx.Client, path: str) -> None:
    refused(guarded.get(path), path)
    assert guarded.get(path, headers=bearer(KEYS[0])).status_code in (200, 404, 405, 503)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer first-key", 200),
        ("bearer second-key", 200),
        ("Bearer   first-key", 200),
        ("Bearer third-key", 401),
        ("Bearer first-ke", 401),
        ("Bearer first-key2", 401),
        ("Bearer FIRST-KEY", 401),
        ("Bearer first-key, second-key", 401),
        ("Bearer", 401),
        ("Basic first-key", 401),
        ("first-key", 401),
        ("", 401),
        (b"Bearer \xff\xfe", 401),
        ("Bearer " + "x" * 10000, 401),
    ],
)  # fmt: skip
def test_headers(guarded: httpx.Client, header: str | bytes, status: int) -> None:
    answer = guarded.get("/v1/models", headers={"Authorization": header})
    assert answer.status_code == status
    assert "x" * 20 not in answer.text
    assert "first" not in answer.text


def test_a_body_is_not_read_before_the_key(guarded: httpx.Client) -> None:
    refused(guarded.post("/v1/audio/speech", content=b"{" * 10), "/v1/audio/speech")
    answer = guarded.post("/v1/audio/speech", json={"input": "Hello."}, headers=bearer(KEYS[1]))
    assert answer.status_code == 200


def test_a_key_in_the_address_is_for_sockets_only(guarded: httpx.Client) -> None:
    refused(guarded.get("/v1/models?api_key=first-key"), "/v1/models")


def test_without_keys_everybody_may() -> None:
    with serving(application(AccessConfig())) as http:
        assert http.get("/v1/models").status_code == 200
        assert http.get("/v1/models", headers=bearer("anything")).status_code == 200


def test_the_catalog_can_be_public() -> None:
    with serving(application(AccessConfig(KEYS, public_catalog=True))) as http:
        for path in (*CATALOG, f"/v1/models/{NATIVE}"):
            assert http.get(path).status_code == 200
        refused(http.post("/v1/audio/voices"), "/v1/audio/voices")
        refused(http.delete("/v1/audio/voices/x"), "/v1/audio/voices/x")
        refused(http.get("/v1/audio/voices/x"), "/v1/audio/voices/x")
        refused(http.post("/v1/audio/speech", json={"input": "Hi."}), "/v1/audio/speech")


def test_behind_a_prefix_the_same_paths_are_public() -> None:
    with serving(application(AccessConfig(KEYS)), root_path="/speech") as http:
        assert http.get("/live").status_code == 200
        refused(http.get("/v1/models"), "/v1/models")
        refused(http.get("/v1/tts"), "/v1/tts")


# -- sockets -------------------------------------------------------------------------------------------------------------


def socket_app(access: AccessConfig) -> FastAPI:
    """Ours with a socket that tells the query it sees."""
    app = application(access)

    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(str(socket.url.query))
        await socket.close()

    app.router.routes.append(WebSocketRoute("/v1/talk", talk))
    app.router.routes.append(WebSocketRoute("/v1/tts/talk", talk))
    return app


def talk(http: httpx.Client, path: str = "/v1/talk", **headers: str) -> str:
    """What the socket says; or the status, type of content and body of its refusal."""
    named = {name.title(): value for name, value in headers.items()}

    async def run() -> str:
        async with connect(str(http.base_url).replace("http", "ws").rstrip("/") + path, additional_headers=named) as socket:
            return str(await socket.recv())

    try:
        return asyncio.run(run())
    except InvalidStatus as error:
        body = json.loads(error.response.body or b"{}")
        code = body["error"]["code"] if "statusCode" not in body else "fish"
        how = error.response.headers.get("WWW-Authenticate")
        return f"{error.response.status_code} {code}" + (f" {how}" if how else "")


def test_sockets_want_a_key_in_the_header_or_the_address(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), serving(socket_app(AccessConfig(KEYS))) as http:
        assert talk(http) == "401 invalid_api_key Bearer"
        assert talk(http, "/v1/tts/talk") == "401 fish Bearer"
        assert talk(http, "/v1/talk?api_key=wrong-key") == "401 invalid_api_key Bearer"
        assert talk(http, authorization="Bearer wrong-key") == "401 invalid_api_key Bearer"
        assert talk(http, authorization="Bearer first-key") == ""
        assert talk(http, "/v1/talk?model=s2&api_key=second-key&b=%26") == "model=s2&b=%26"
        assert talk(http, authorization="Bearer second-key", origin=PAGE) == ""
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("websockets")]
    assert not [line for line in ours if "-key" in line]


def test_a_foreign_page_cannot_open_a_socket_where_no_key_is_needed() -> None:
    with serving(socket_app(AccessConfig())) as http:
        own = str(http.base_url).rstrip("/")
        assert talk(http) == ""
        assert talk(http, origin=own) == ""
        assert talk(http, origin=PAGE) == "403 origin_not_allowed"
        assert talk(http, origin="null") == "403 origin_not_allowed"
    with serving(socket_app(AccessConfig(cors_origins=(PAGE,)))) as http:
        assert talk(http, origin=PAGE) == ""
        assert talk(http, origin="https://other.example") == "403 origin_not_allowed"
    with serving(socket_app(AccessConfig(cors_origins=("*",)))) as http:
        assert talk(http, origin="https://other.example") == ""


# -- pages ---------------------------------------------------------------------------------------------------------------


def preflight(http: httpx.Client, origin: str, path: str = "/v1/audio/speech") -> httpx.Response:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return http.options(path, headers={"Origin": origin, **asked})


def test_pages_are_let_in_by_a_setting_only(guarded: httpx.Client) -> None:
    answer = preflight(guarded, PAGE)
    assert answer.status_code == 401
    assert not [name for name in answer.headers if name.startswith("access-control")]
    asked = guarded.get("/v1/models", headers={"Origin": PAGE, **bearer(KEYS[0])})
    assert "access-control-allow-origin" not in asked.headers


def test_an_allowed_page_may_ask_with_a_key_and_read_answers_and_errors() -> None:
    with serving(application(AccessConfig(KEYS, cors_origins=(PAGE, "http://localhost:3000")))) as http:
        for origin in (PAGE, "http://localhost:3000"):
            answer = preflight(http, origin)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == origin
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert "authorization" in answer.headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in answer.headers
        assert "access-control-allow-origin" not in preflight(http, "https://other.example").headers
        page = {"Origin": PAGE}
        spoken = http.post("/v1/audio/speech", json={"input": "Hi."}, headers=page | bearer(KEYS[0]))
        for answer, status in (
            (spoken, 200),
            (http.post("/v1/audio/speech", json={"input": "Hi."}, headers=page), 401),
            (http.post("/v1/audio/speech", json={}, headers=page | bearer(KEYS[0])), 400),
            (http.get("/v1/nothing", headers=page | bearer(KEYS[0])), 404),
        ):
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        ours = {name.lower() for name in spoken.headers if name.lower().startswith("x-")}
        assert ours <= {name.strip().lower() for name in spoken.headers["access-control-expose-headers"].split(",")}


def test_all_pages_can_be_let_in() -> None:
    with serving(application(AccessConfig(cors_origins=("*",)))) as http:
        assert preflight(http, "https://any.example").headers["access-control-allow-origin"] == "*"
        assert http.get("/v1/models", headers={"Origin": PAGE}).headers["access-control-allow-origin"] == "*"
