"""Who may come in, and how often: keys, the web pages whose scripts may ask, and a bound on requests. Knows no route but those
that need no key."""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from ipaddress import ip_network
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from duetts.config import AccessConfig
from duetts.errors import ForeignOrigin, NotAllowed, RateLimited, UnknownKey
from duetts.server.errors import error_kind, error_response, route_path

# What the documentation promises to answer without a key: nothing of it tells of users.
PUBLIC = frozenset(
    ("/live", "/ready", "/health", "/v1/health", "/version", "/v1/test", "/docs", "/openapi.json")
)  # fmt: skip
CATALOG = ("/v1/models", "/v1/audio/models", "/v1/audio/voices")
MOST_CLIENTS = 16_384  # whose requests are counted
QUERY_KEY = "api_key"  # of WebSockets: scripts in browsers cannot set their headers

# Headers of answers that scripts may read.
EXPOSED = (
    "X-Request-Id", "X-Speech-Id", "X-Sample-Rate", "X-Channels", "X-Bit-Depth", "X-Model", "X-Voice-Resolved", "X-Seed",
    "X-Input-Tokens", "X-Output-Tokens", "X-Finish-Reason", "X-Audio-Duration", "X-RTF", "X-Pieces", "X-Pieces-Retried",
    "X-Pieces-Suspect", "X-Input-Characters", "X-Deterministic", "X-Reference-Cache", "X-Ignored-Fields", "X-Warnings",
    "Server-Timing", "Retry-After", "Content-Disposition",
)  # fmt: skip


class Allowances:
    """What everybody has left of `per_minute` requests, which fill up evenly. None is no bound."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = per_minute
        self._clock = clock
        self._left: OrderedDict[str | int, tuple[float, float]] = OrderedDict()  # how many, and when; least lately asked first

    def take(self, who: str | int, count: int = 1) -> None:
        """Takes so many requests. More than there can ever be are taken when all are there, and are made up for later.

        Raises `RateLimited` with the time until they are there.
        """
        if self._most is None:
            return
        now, rate = self._clock(), self._most / 60
        left, since = self._left.pop(who, (float(self._most), now))
        left = min(self._most, left + (now - since) * rate)
        enough = left >= min(count, self._most)
        self._left[who] = (left - count if enough else left, now)
        while len(self._left) > MOST_CLIENTS:
            self._left.popitem(last=False)
        if not enough:
            wait_s = (min(count, self._most) - left) / rate
            raise RateLimited(f"at most {self._most} requests a minute are allowed (rate_limit)", retry_after_s=wait_s)


def client_of(scope: Scope) -> str:
    """Whose requests are counted together where there are no keys: an address, of IPv6 the network that one site has."""
    host = str((scope.get("client") or ("",))[0])
    return str(ip_network(f"{host.partition('%')[0]}/64", strict=False)) if ":" in host else host


class Guard:
    """Lets in whoever sends a key, if the server has keys, and keeps sockets of foreign pages out, if it has none. What costs
    work is counted: each POST, and each socket. What of them costs more takes it by the state's `take`."""

    def __init__(self, app: ASGIApp, access: AccessConfig) -> None:
        self._app = app
        self._access = access
        self._digests = [sha256(key.encode()).digest() for key in access.keys]
        self._allowances = Allowances(access.rate_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._count(scope, self._check_key(scope, _sent_key(scope)))
        elif scope["type"] == "websocket":
            try:
                self._count(scope, self._check_socket(scope))
            except (NotAllowed, RateLimited) as error:
                # The handshake is answered; a server without that extension closes it with 403.
                await _refuse_socket(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _count(self, scope: Scope, key: int | None) -> None:
        take = scope["state"]["take"] = partial(self._allowances.take, client_of(scope) if key is None else key)
        if scope["type"] == "websocket" or (scope["method"] == "POST" and route_path(scope) not in PUBLIC):
            take()

    def _check_socket(self, scope: Scope) -> int | None:
        """As `_check_key`."""
        key = _sent_key(scope) or _take_query_key(scope)
        if self._digests:
            return self._check_key(scope, key)
        # Browsers ask nobody before they open a socket to another server, and with it comes no key that could be checked.
        headers = Headers(scope=scope)
        origin, allowed = headers.get("origin"), self._access.cors_origins
        if origin is None or "*" in allowed or origin in allowed or urlsplit(origin).netloc == headers.get("host"):
            return None
        raise ForeignOrigin("this server lets no pages of that origin in; its operator can, with --cors-origin")

    def _check_key(self, scope: Scope, key: bytes) -> int | None:
        """The place of the key in the list; None where none is asked for."""
        if not self._digests or is_public(route_path(scope), scope.get("method", ""), self._access):
            return None
        digest = sha256(key).digest()
        # All are compared, whichever fits: the time tells neither which nor how long it is.
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(fits):
            raise UnknownKey("this server needs a key: Authorization: Bearer KEY" if not key else "the key is not known here")
        return fits.index(True)


def is_public(path: str, method: str, access: AccessConfig) -> bool:
    """Whether a path needs no key; of sockets the method is empty."""
    if path in PUBLIC:
        return True
    reads = access.public_catalog and method in ("GET", "HEAD")
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


async def _refuse_socket(error: NotAllowed | RateLimited, scope: Scope, receive: Receive, send: Send) -> None:
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
