"""The web application: routes put together, request ids, and the one place where every error becomes an answer. No torch."""

from __future__ import annotations

import logging
import re
import traceback
import uuid
from importlib.metadata import version

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duetts.config import ServerConfig
from duetts.errors import CallerLeft, DuettsError
from duetts.server.auth import Guard, cors_options
from duetts.server.batch import batch_router
from duetts.server.errors import error_kind, error_response, route_path
from duetts.server.fish import fish_router
from duetts.server.models import models_router
from duetts.server.outcomes import Outcomes, outcomes_router
from duetts.server.speech import speech_router
from duetts.server.voices import consents_router, voices_router
from duetts.service import SpeechService

CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
log = logging.getLogger("duetts.server")


def create_app(service: SpeechService, config: ServerConfig) -> FastAPI:
    """The application in front of a service, which must be ready."""
    app = FastAPI(
        title="duetts",
        version=version("duetts"),
        redirect_slashes=False,  # a redirect loses the body of a POST in many clients; `Entrance` takes both forms
        exception_handlers={HTTPException: _answer_http_error},
    )
    outcomes = app.state.outcomes = Outcomes()
    app.include_router(speech_router(service, config, outcomes))
    app.include_router(batch_router(service, config, outcomes))
    app.include_router(outcomes_router(outcomes))
    app.include_router(fish_router(service, config, outcomes))
    app.include_router(models_router(service, config))
    app.include_router(voices_router(service, config))
    app.include_router(consents_router(service, config))
    # The last is the outermost: answers to errors pass through the headers for scripts, preflights come before keys.
    app.add_middleware(Guard, access=config.access)
    app.add_middleware(Entrance)
    if config.access.cors_origins:
        app.add_middleware(CORSMiddleware, **cors_options(config.access))
    return app


async def _answer_http_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.state.request_id, route_path(request.scope))


class Entrance:
    """Gives every request its ids, takes paths with a slash at the end, and answers whatever is raised further in.

    `speech_id` is made here and unique: the only one used inside. `request_id` is the client's own if it sent a fit one; it
    is only echoed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        speech_id = f"speech-{uuid.uuid4().hex}"
        client_id = Headers(scope=scope).get("x-request-id", "")
        request_id = client_id if CLIENT_ID.fullmatch(client_id) else speech_id
        scope["path"] = scope["path"].rstrip("/") or "/"
        scope["state"] = {**scope.get("state", {}), "speech_id": speech_id, "request_id": request_id}
        started = ended = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, ended
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            else:
                ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except (ClientDisconnect, CallerLeft):
            log.info("%s: the client left", speech_id)
        except Exception as error:
            _log_failure(speech_id, error)
            if ended:  # the body itself has told of it
                return
            if started:
                # The server then closes the connection without the end of the body: nothing cut short looks complete.
                raise RuntimeError(f"{speech_id}: the answer was broken off") from None
            await error_response(error, request_id, route_path(scope))(scope, receive, send_with_id)


def _log_failure(speech_id: str, error: Exception) -> None:
    """Errors by class, and where an unexpected one came from. Not their texts, which may repeat what a user wrote."""
    where = "" if isinstance(error, DuettsError) else "\n" + "".join(traceback.format_tb(error.__traceback__))
    level = logging.ERROR if error_kind(error).status == 500 else logging.INFO
    log.log(level, "%s: %s%s", speech_id, type(error).__name__, where)
