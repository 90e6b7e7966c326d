"""Who may come in: keys, and the web pages whose scripts may ask. Knows no route but those that need no key."""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from duetts.config import AccessConfig
from duetts.errors import ForeignOrigin, NotAllowed, UnknownKey
from duetts.server.errors import error_kind, error_response, route_path

# What the documentation promises to answer without a key: nothing of it tells of users.
PUBLIC = frozenset(
    ("/live", "/ready", "/health", "/v1/health", "/version", "/v1/test", "/docs", "/openapi.json")
)  # fmt: skip
CATALOG = ("/v1/models", "/v1/audio/models", "/v1/audio/voices")
QUERY_KEY = "api_key"  # of WebSockets: scripts in browsers cannot set their headers

# Headers of answers that scripts may read.
EXPOSED = (
    "X-Request-Id", "X-Speech-Id", "X-Sample-Rate", "X-Channels", "X-Bit-Depth", "X-Model", "X-Voice-Resolved", "X-Seed",
    "X-Input-Tokens", "X-Output-Tokens", "X-Finish-Reason", "X-Audio-Duration", "X-RTF", "X-Pieces", "X-Pieces-Retried",
    "X-Pieces-Suspect", "X-Reference-Cache", "X-Ignored-Fields", "Server-Timing", "Retry-After", "Content-Disposition",
)  # fmt: skip


class Guard:
    """Lets in whoever sends a key, if the server has keys; and keeps sockets of foreign pages out, if it has none."""

    def __init__(self, app: ASGIApp, access: AccessConfig) -> None:
        self._app = app
        self._access = access
        self._digests = [sha256(key.encode()).digest() for key in access.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check_key(scope, _sent_key(scope))
        elif scope["type"] == "websocket":
            try:
                self._check_socket(scope)
            except NotAllowed as error:
                # The handshake is answered; a server without that extension closes it with 403.
                await _refuse_socket(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_socket(self, scope: Scope) -> None:
        key = _sent_key(scope) or _take_query_key(scope)
        if self._digests:
            self._check_key(scope, key)
            return
        # Browsers ask nobody before they open a socket to another server, and with it comes no key that could be checked.
        headers = Headers(scope=scope)
        origin, allowed = headers.get("origin"), self._access.cors_origins
        if origin is None or "*" in allowed or origin in allowed or urlsplit(origin).netloc == headers.get("host"):
            return
        raise ForeignOrigin("this server lets no pages of that origin in; its operator can, with --cors-origin")

    def _check_key(self, scope: Scope, key: bytes) -> None:
        if not self._digests or self._is_public(scope):
            return
        digest = sha256(key).digest()
        # All are compared, whichever fits: the time tells neither which nor how long it is.
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(fits):
            raise UnknownKey("this server needs a key: Authorization: Bearer KEY" if not key else "the key is not known here")

    def _is_public(self, scope: Scope) -> bool:
        path = route_path(scope)
        if path in PUBLIC:
            return True
        reads = self._access.public_catalog and scope.get("method") in ("GET", "HEAD")
        return reads and (path in CATALOG or path.startswith("/v1/models/"))


def _sent_key(scope: Scope) -> bytes:
    """The bearer token of the header; empty without one."""
    stated = dict(reversed(scope["headers"])).get(b"authorization", b"")
    scheme, _, token = stated.strip().partition(b" ")
    return bytes(token.strip()) if scheme.lower() == b"bearer" else b""


def _take_query_key(scope: Scope) -> bytes:
    """The key of the query, which is taken out of it: what is left may stand in logs."""
    pairs = parse_qsl(scope.get("query_string", b""), keep_blank_values=True)
    keys = [value for name, value in pairs if name == QUERY_KEY.encode()]
    if not keys:
        return b""
    scope["query_string"] = urlencode([pair for pair in pairs if pair[0] != QUERY_KEY.encode()]).encode()
    return bytes(keys[0])


async def _refuse_socket(error: NotAllowed, scope: Scope, receive: Receive, send: Send) -> None:
    scope["state"]["code"] = error_kind(error).code
    if "websocket.http.response" in scope.get("extensions", {}):
        await error_response(error, scope["state"]["request_id"], route_path(scope))(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": str(error)})


def cors_options(access: AccessConfig) -> dict[str, Any]:
    """What the middleware is told that gives answers the headers for scripts of the allowed pages. Preflights need no key."""
    return {
        "allow_origins": access.cors_origins,
        "allow_methods": ("GET", "POST", "PATCH", "DELETE"),
        "allow_headers": ("*",),
        "expose_headers": EXPOSED,
    }
