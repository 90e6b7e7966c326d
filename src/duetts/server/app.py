"""The web application: routes put together, request ids, and the one place where every error becomes an answer. No torch."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
import uuid
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duetts.config import LogConfig, ServerConfig
from duetts.errors import CallerLeft, DuettsError, NotReady
from duetts.server.auth import Guard, cors_options
from duetts.server.batch import batch_router
from duetts.server.body import Bodies
from duetts.server.description import describe
from duetts.server.errors import error_kind, error_object, error_response, route_path
from duetts.server.fish import fish_router
from duetts.server.fish_codec import codec_router
from duetts.server.fish_live import fish_live_router
from duetts.server.fish_voices import model_router, references_router
from duetts.server.health import Health, health_router, written
from duetts.server.metrics import Metrics, door, door_of
from duetts.server.models import models_router
from duetts.server.outcomes import Outcomes, outcomes_router
from duetts.server.peers import Peers
from duetts.server.recipes import recipes_router
from duetts.server.speech import speech_router
from duetts.server.voices import consents_router, voices_router
from duetts.server.websocket import socket_router
from duetts.service import SpeechService

VERSION = version("duetts")
CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
CLIENT_LEFT = 499  # counted where nothing could be sent
SWITCHED, CLOSED_EARLY = 101, 403  # of sockets
STALL_S = 60.0  # that a part of an answer may take to leave; whoever reads nothing for so long has left

log = logging.getLogger("duetts.server")
requests_log = logging.getLogger("duetts.requests")


def create_app(
    service: SpeechService, config: ServerConfig, metrics: Metrics | None = None, health: Health | None = None,
    peers: Peers | None = None,
) -> FastAPI:  # fmt: skip
    """The application in front of a service, which must be ready. Several of them are `peers`."""
    metrics, health = metrics or Metrics(), health or Health(config.watchdog_s)
    health.watch(service)
    metrics.watch(service.stats)
    info = service.info
    metrics.build.labels(VERSION, config.served_model_names[0], info.weights, info.device, info.dtype).set(1)
    app = FastAPI(
        title="duetts",
        version=VERSION,
        redirect_slashes=False,  # a redirect loses the body of a POST in many clients; `Entrance` takes both forms
        exception_handlers={HTTPException: _answer_http_error},
    )
    outcomes = app.state.outcomes = Outcomes(metrics)
    app.state.numbers = partial(written, health, metrics)
    app.include_router(speech_router(service, config, outcomes))
    app.include_router(batch_router(service, config, outcomes))
    app.include_router(outcomes_router(outcomes, peers))
    app.include_router(socket_router(service, config, outcomes))
    app.include_router(fish_router(service, config, outcomes))
    app.include_router(fish_live_router(service, config, outcomes))
    app.include_router(references_router(service, config))
    app.include_router(codec_router(service, config))
    app.include_router(model_router(service, config))
    app.include_router(models_router(service, config))
    app.include_router(recipes_router(config))
    app.include_router(voices_router(service, config))
    app.include_router(consents_router(service, config))
    app.include_router(health_router(health, metrics, config, peers))
    describe(app, config)
    _enclose(app, config, outcomes, metrics, "" if peers is None else f"{peers.name}-")
    return app


def create_waiting_app(config: ServerConfig, metrics: Metrics, health: Health) -> FastAPI:
    """The application while there is no service yet: what can be told is told, all else is to come again later."""
    app = FastAPI(openapi_url=None, redirect_slashes=False, exception_handlers={HTTPException: _answer_later})
    app.include_router(health_router(health, metrics, config))
    _enclose(app, config, Outcomes(metrics), metrics)
    return app


def _enclose(app: FastAPI, config: ServerConfig, outcomes: Outcomes, metrics: Metrics, mark: str = "") -> None:
    """What every request passes through. The last is the outermost: answers to errors get the headers for scripts, and
    preflights come before keys. The `mark` is for ids."""
    app.add_middleware(Bodies, max_body_bytes=config.limits.max_body_bytes)
    app.add_middleware(Guard, access=config.access)
    app.add_middleware(Entrance, outcomes=outcomes, metrics=metrics, logs=config.logs, mark=mark)
    if config.access.cors_origins:
        app.add_middleware(CORSMiddleware, **cors_options(config.access))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    request.state.code = error_kind(error).code
    return error_response(error, request.state.request_id, route_path(request.scope))


async def _answer_later(request: Request, _: Exception) -> Response:
    """In the place of 404 and 405."""
    request.state.code = "not_ready"
    answer = error_response(NotReady("the model is loading"), request.state.request_id, route_path(request.scope))
    answer.headers["Connection"] = "close"  # so that the next request may find another server
    return answer


@dataclass(slots=True)
class Sending:
    """The way out of one request: adds its id, and knows what has been sent."""

    request_id: str
    send: Send
    status: int | None = None
    ended: bool = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self.request_id
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
        try:
            async with asyncio.timeout(STALL_S):
                await self.send(message)
        except TimeoutError:
            raise CallerLeft("the client reads nothing") from None


class Entrance:
    """Gives every request its ids, takes paths with a slash at the end, answers whatever is raised further in, and counts.

    `speech_id` is made here and unique: the only one used inside. `request_id` is the client's own if it sent a fit one; it
    is only echoed.
    """

    def __init__(self, app: ASGIApp, outcomes: Outcomes, metrics: Metrics, logs: LogConfig, mark: str) -> None:
        self._app, self._mark = app, mark
        self._outcomes, self._metrics, self._logs = outcomes, metrics, logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        speech_id = f"speech-{self._mark}{uuid.uuid4().hex}"
        client_id = Headers(scope=scope).get("x-request-id", "")
        request_id = client_id if CLIENT_ID.fullmatch(client_id) else speech_id
        scope["path"] = scope["path"].rstrip("/") or "/"
        scope["state"] = {**scope.get("state", {}), "speech_id": speech_id, "request_id": request_id}
        door.set(door_of(route_path(scope)))
        if scope["type"] == "websocket":
            await self._converse(speech_id, request_id, scope, receive, send)
        else:
            await self._answer(speech_id, scope, receive, Sending(request_id, send))

    async def _converse(self, speech_id: str, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """A socket has one line and one count, with the status of its handshake. What is spoken on it is counted by itself."""
        began = time.perf_counter()
        status, reason = CLOSED_EARLY, ""

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] in ("websocket.accept", "websocket.http.response.start"):
                status = message.get("status", SWITCHED)
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
            reason = scope["state"].get("code") or ""
        except Exception as error:  # the socket is closed by now, with a code that tells of it
            reason = error_object(error)["code"]
            _log_failure(speech_id, error)
        finally:
            self._tell(speech_id, scope, status, reason, time.perf_counter() - began)

    async def _answer(self, speech_id: str, scope: Scope, receive: Receive, sending: Sending) -> None:
        began = time.perf_counter()
        reason = "aborted"
        try:
            await self._app(scope, receive, sending)
            reason = scope["state"].get("code") or self._outcomes.reason(speech_id)
        except (ClientDisconnect, CallerLeft) as error:
            reason = error_object(error)["code"] if isinstance(error, CallerLeft) else "client_disconnect"
        except Exception as error:
            reason = error_object(error)["code"]
            _log_failure(speech_id, error)
            if sending.ended:  # the body itself has told of it
                return
            if sending.status is not None:
                # The server then closes the connection without the end of the body: nothing cut short looks complete.
                raise RuntimeError(f"{speech_id}: the answer was broken off") from None
            await error_response(error, sending.request_id, route_path(scope))(scope, receive, sending)
        finally:
            self._tell(speech_id, scope, sending.status or CLIENT_LEFT, reason, time.perf_counter() - began)

    def _tell(self, speech_id: str, scope: Scope, status: int, reason: str, seconds: float) -> None:
        """Counts a request and writes its line: of the path the route only, which holds nothing that a user wrote."""
        self._metrics.answered(door.get(), status, reason)
        if self._logs.requests:
            route = scope["route"].path if "route" in scope else "(no route)"
            level = logging.DEBUG if door.get() == "health" else logging.INFO
            method = scope.get("method", "SOCKET")
            requests_log.log(level, "%s: %s %s %d %s %.3f s", speech_id, method, route, status, reason or "-", seconds)


def _log_failure(speech_id: str, error: Exception) -> None:
    """Errors by class, and where an unexpected one came from. Not their texts, which may repeat what a user wrote."""
    where = "" if isinstance(error, DuettsError) else "\n" + "".join(traceback.format_tb(error.__traceback__))
    level = logging.ERROR if error_kind(error).status == 500 else logging.INFO
    log.log(level, "%s: %s%s", speech_id, type(error).__name__, where)
