"""What an error is over HTTP: one table from exceptions to status, OpenAI error type and code. Knows no routes, but which paths
belong to Fish Audio's clients, who read another shape."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from duetts.errors import (
    Aborted,
    CallerLeft,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EmptyGeneration,
    EngineDead,
    EngineFailure,
    ForbiddenReference,
    ForeignOrigin,
    InvalidRequest,
    NotReady,
    Overloaded,
    ProtectedVoice,
    RateLimited,
    StorageFailure,
    StoreUnreachable,
    UnknownKey,
    UnknownModel,
    UnknownSpeech,
    UnreachableReference,
    VoiceExists,
    VoiceNotFound,
)

RETRY_AFTER_S = 5  # while loading or draining, or while a store does not answer
FISH_PATHS = ("/v1/tts", "/v1/references", "/v1/vqgan", "/v1/asr", "/model", "/wallet")


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One row. `code` None is the error's own; `message` None is the error's own text; `retry` False stops client retries."""

    status: int
    type: str
    code: str | None = None
    message: str | None = None
    retry: bool = True


EXCEPTIONS: dict[type[BaseException], ErrorKind] = {
    UnknownKey: ErrorKind(401, "authentication_error", "invalid_api_key"),
    ForeignOrigin: ErrorKind(403, "permission_error", "origin_not_allowed"),
    InvalidRequest: ErrorKind(400, "invalid_request_error"),
    ForbiddenReference: ErrorKind(403, "permission_error"),
    UnreachableReference: ErrorKind(424, "upstream_error"),
    UnknownModel: ErrorKind(404, "not_found_error"),
    UnknownSpeech: ErrorKind(404, "not_found_error"),
    VoiceNotFound: ErrorKind(404, "not_found_error"),
    VoiceExists: ErrorKind(409, "conflict_error", retry=False),
    ProtectedVoice: ErrorKind(403, "permission_error"),
    StorageFailure: ErrorKind(500, "server_error", "internal_error", retry=False),
    StoreUnreachable: ErrorKind(503, "server_error", "store_unreachable"),
    Overloaded: ErrorKind(429, "rate_limit_error", "queue_full"),
    RateLimited: ErrorKind(429, "rate_limit_error", "rate_limited"),
    NotReady: ErrorKind(503, "server_error", "not_ready"),
    EngineDead: ErrorKind(503, "server_error", "engine_dead"),
    Draining: ErrorKind(503, "server_error", "draining"),
    Aborted: ErrorKind(503, "server_error", "draining", "the server is stopping; the request was ended"),
    CallerLeft: ErrorKind(499, "request_error", "client_disconnect", "the client left"),  # for logs and counts only
    Cancelled: ErrorKind(499, "request_error", "cancelled"),
    DeadlineExceeded: ErrorKind(504, "server_error", "deadline_exceeded", retry=False),
    EmptyGeneration: ErrorKind(500, "server_error", "empty_generation", "the model made no audio for this input", retry=False),
    EngineFailure: ErrorKind(500, "server_error", "internal_error", "the engine failed; this request is lost"),
    Exception: ErrorKind(500, "server_error", "internal_error", "an internal error; the log has it", retry=False),
}

# What the router and the body reader raise as `HTTPException`.
HTTP_STATUSES = {
    404: ErrorKind(404, "not_found_error", "route_not_found", "there is no such path"),
    405: ErrorKind(405, "invalid_request_error", "method_not_allowed", "this path does not take this method"),
    408: ErrorKind(408, "invalid_request_error", "request_timeout"),
    413: ErrorKind(413, "invalid_request_error", "payload_too_large"),
    415: ErrorKind(415, "invalid_request_error", "unsupported_media_type"),
}


def error_kind(error: BaseException) -> ErrorKind:
    """The row of an error: that of its class, or of its nearest parent in the table."""
    if isinstance(error, HTTPException) and error.status_code in HTTP_STATUSES:
        return HTTP_STATUSES[error.status_code]
    return next(EXCEPTIONS[kind] for kind in type(error).__mro__ if kind in EXCEPTIONS)


def error_object(error: BaseException) -> dict[str, Any]:
    """Message, type, param and code, as OpenAI names them."""
    kind = error_kind(error)
    field, code = (error.field, error.code) if isinstance(error, InvalidRequest) else (None, kind.code)
    message = kind.message or (error.detail if isinstance(error, HTTPException) else str(error))
    return {"message": message, "type": kind.type, "param": field, "code": code}


def error_body(error: BaseException, request_id: str) -> dict[str, Any]:
    """The JSON object of an error in OpenAI's shape."""
    return {"error": error_object(error), "request_id": request_id}


def fish_error_body(error: BaseException, request_id: str) -> dict[str, Any]:
    """The JSON object of an error in Fish Audio's shape. One generation of its clients reads `message`, one `detail`."""
    told, status = error_object(error), error_kind(error).status
    return {
        "statusCode": status,
        "message": told["message"],
        "error": HTTPStatus(status).phrase if status in set(HTTPStatus) else "Client Closed Request",
        "detail": told["message"],
        "code": told["code"],
        "request_id": request_id,
    }


def route_path(scope: Scope) -> str:
    """The path without the prefix that a proxy has put before it, and without a slash at its end."""
    return str(scope["path"]).removeprefix(scope.get("root_path", "")).rstrip("/") or "/"


def is_fish(path: str) -> bool:
    """Whether a path, without a root path in front, is one of Fish Audio's API."""
    return any(path == prefix or path.startswith(prefix + "/") for prefix in FISH_PATHS)


def error_response(error: BaseException, request_id: str, path: str = "") -> Response:
    """A complete answer for an error raised before anything was sent, in the shape that clients of that path read."""
    kind = error_kind(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, Overloaded | NotReady) and error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif kind.status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if kind.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if not kind.retry:
        headers["X-Should-Retry"] = "false"
    # ASCII only: an unpaired surrogate in a name that is repeated here cannot be encoded otherwise.
    content = json.dumps((fish_error_body if is_fish(path) else error_body)(error, request_id))
    return Response(content, kind.status, headers, media_type="application/json")
