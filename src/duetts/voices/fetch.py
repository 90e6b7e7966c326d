"""Clips that a request names by an address: fetched over http or https, or read from the folder that the operator allows.

Nobody may reach through this server what only this server reaches. So a host's addresses are looked up here, all of them are
checked, and one of those is connected to, while TLS and the Host header still have the name: there is no second look-up that
could say something else. Each redirect begins anew. Nothing of the environment counts, no cookies are kept, no connection is
used twice. Knows no audio.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path

import httpx

from duetts.config import Limits, MediaConfig
from duetts.errors import ConfigError, ForbiddenReference, InvalidRequest, UnreachableReference
from duetts.types import Address
from duetts.voices.sharing import Line, Threads

AT_ONCE = 16  # clips that are fetched
NOBODY = "none"  # in the place of domains
MAX_REDIRECTS = 3
MAX_URL_CHARS = 2048
CONNECT_S = 3.0
TRIED_ADDRESSES = 3  # of a host that has several
PORTS, FIRST_FREE_PORT = (80, 443), 1024  # other ports below belong to other protocols
MEDIA_TYPES = re.compile(r"audio/.+|video/(mp4|webm)|application/ogg|(application|binary)/octet-stream")
HEADERS = {
    "User-Agent": "duetts",
    "Accept": "audio/*, video/mp4, video/webm, application/octet-stream",
    "Accept-Encoding": "identity",
}

# What `is_global` of the standard library, which differs between its versions, leaves out or lets in.
SPECIAL = [
    ip_network(block)
    for block in (
        "0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "224.0.0.0/3",
        "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
    )
]  # fmt: skip
GLOBAL_UNICAST = IPv6Network("2000::/3")
TRANSLATED = IPv6Network("64:ff9b::/96")  # how hosts of IPv4 look in networks of IPv6 alone

Resolve = Callable[[str, int], list[str]]


def look_up(host: str, port: int) -> list[str]:
    """A host's addresses. Raises `OSError` or `UnicodeError` if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


def is_public(text: str) -> bool:
    """Whether an address can only be a host of the public internet, however it is wrapped."""
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or (IPv4Address(int(address) & 0xFFFFFFFF) if address in TRANSLATED else None)
        if inner is not None:
            return is_public(str(inner))
        # Its lower half may hold an address of IPv4 in the way of ISATAP.
        if address not in GLOBAL_UNICAST or (int(address) >> 32) & 0xFCFFFFFF == 0x00005EFE:
            return False
    fits = address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
    return fits and not any(address in block for block in SPECIAL)


def is_own(address: str) -> bool:
    """Whether a public address is one of this machine, behind whose walls its services stand open. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # of datagrams: this only chooses the address to send from
        except OSError:
            return False
        return ip_address(probe.getsockname()[0]) == ip_address(address)


class Fetcher:
    """Fetches clips within the limits on their size and number. Used from one event loop. `resolve`, `transport` and `tls` are
    for tests."""

    def __init__(
        self,
        media: MediaConfig,
        limits: Limits,
        *,
        resolve: Resolve = look_up,
        transport: Callable[[ssl.SSLContext], httpx.AsyncBaseTransport] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if media.folder is not None and not media.folder.is_dir():
            raise ConfigError("allowed_local_media_path is not a folder")
        self._media, self._max_bytes = media, limits.reference_bytes
        self._resolve, self._transport, self._tls = resolve, transport or _direct, tls
        self._listed = {domain.lower() for domain in media.domains}
        self._line = Line(AT_ONCE, limits.reference_queue, "clips wait to be fetched")
        self._threads = Threads("duetts-fetch", AT_ONCE, limits.reference_queue)

    @asynccontextmanager
    async def fetched(self, address: Address, field: str) -> AsyncIterator[bytes]:
        """The file at an address, which keeps its place among those that are fetched while it is in use.

        Raises `ForbiddenReference`, `UnreachableReference`, other `InvalidRequest` for what comes from there, `Overloaded`.
        """
        await self._line.enter()
        began = time.monotonic()
        try:
            if address.local:
                audio = await self._threads.run(self._read, address.text, field)
            else:
                audio = await self._download(address.text, field)
            yield audio
        finally:
            self._line.leave(time.monotonic() - began)

    def close(self) -> None:
        """Begins nothing more. Waits for nothing."""
        self._threads.close()

    # -- over the network

    async def _download(self, text: str, field: str) -> bytes:
        limit_s = self._media.fetch_s
        try:
            async with asyncio.timeout(limit_s), await self._threads.run(self._open) as transport:
                url = _parsed(text, field)
                for _ in range(MAX_REDIRECTS + 1):
                    response = await self._get(transport, url, field)
                    try:
                        if not response.has_redirect_location:
                            return await self._body(response, field)
                        url = _parsed(response.headers["location"], field, url)
                    finally:
                        await response.aclose()
        except TimeoutError:
            raise UnreachableReference(f"{field} did not come within {limit_s:g} s", field=field) from None
        except httpx.HTTPError:
            raise UnreachableReference(f"{field}: its host broke the answer off", field=field) from None
        raise UnreachableReference(f"{field} is redirected more than {MAX_REDIRECTS} times", field=field)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return self._tls or httpx.create_ssl_context(trust_env=False)

    def _open(self) -> httpx.AsyncBaseTransport:
        """On a thread: the first time it reads all authorities, which takes 0.1 s."""
        return self._transport(self._context)

    async def _get(self, transport: httpx.AsyncBaseTransport, url: httpx.URL, field: str) -> httpx.Response:
        """The head of the answer, from the first address that can be connected to."""
        name = url.raw_host.decode("ascii").strip("[]")
        timeout = httpx.Timeout(self._media.fetch_s, connect=CONNECT_S).as_dict()
        for address in (await self._addresses(url, name, field))[:TRIED_ADDRESSES]:
            request = httpx.Request(
                "GET", url.copy_with(host=address, fragment=None), headers={**HEADERS, "Host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": name, "timeout": timeout},
            )  # fmt: skip
            try:
                return await transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        raise UnreachableReference(f"{field}: its host cannot be connected to", field=field)

    async def _addresses(self, url: httpx.URL, name: str, field: str) -> list[str]:
        """Where a host may be connected to. One text for all that is refused: it does not tell which names exist inside."""
        port = url.port or {"http": 80, "https": 443}[url.scheme]
        listed = name.lower().rstrip(".") in self._listed - {NOBODY}
        if self._listed and not listed:
            raise _not_allowed("clips are not fetched from this host here", field)
        if not listed and port not in PORTS and port < FIRST_FREE_PORT:
            raise _not_allowed(
                f"clips are fetched from the ports 80, 443 and those from {FIRST_FREE_PORT} on, not from {port}", field
            )
        try:
            found = await self._threads.run(self._resolve, name, port)
        except (OSError, UnicodeError):
            found = []
        if found and (listed or all(is_public(address) and not is_own(address) for address in found)):
            return found
        raise _not_allowed("its host is unknown, or has addresses that are not public", field)

    async def _body(self, response: httpx.Response, field: str) -> bytes:
        if response.status_code != 200:
            raise UnreachableReference(f"{field}: its host answers with status {response.status_code}", field=field)
        headers = response.headers
        media_type = headers.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()
        if not MEDIA_TYPES.fullmatch(media_type) or headers.get("content-encoding", "identity") != "identity":
            raise InvalidRequest(
                f"{field}: what is at the address is not sent as audio/*, video/mp4, video/webm or application/octet-stream",
                field=field, code="reference_undecodable",
            )  # fmt: skip
        stated = headers.get("content-length", "")
        body = bytearray()
        if not stated.isdigit() or int(stated[:20]) <= self._max_bytes:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > self._max_bytes:
                    break
            else:
                return bytes(body)
        raise _too_large(field, self._max_bytes)

    # -- on disk

    def _read(self, text: str, field: str) -> bytes:
        folder = self._media.folder
        if folder is None:
            raise _no_file("local files are not allowed on this server; send the clip as a data address or base64", field)
        try:
            with open(_open_inside(folder, text), "rb") as file:
                audio = file.read(self._max_bytes + 1)
        except (OSError, ValueError, RuntimeError):  # the latter for links in a circle
            raise _no_file("there is no such file among those that this server takes clips from", field) from None
        if len(audio) > self._max_bytes:
            raise _too_large(field, self._max_bytes)
        return audio


def _direct(context: ssl.SSLContext) -> httpx.AsyncBaseTransport:
    return httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def _parsed(text: str, field: str, base: httpx.URL | None = None) -> httpx.URL:
    """An address that may be looked at, or where the one before is redirected to."""
    if len(text) > MAX_URL_CHARS:
        raise InvalidRequest(f"{field}: an address may have at most {MAX_URL_CHARS} characters", field=field)
    try:
        url = httpx.URL(text) if base is None else base.join(text)
    except (httpx.InvalidURL, ValueError):  # the latter for brackets, and for half a surrogate
        raise InvalidRequest(f"{field} is not a valid address", field=field) from None
    if url.scheme not in ("http", "https") or not url.host or (url.port is not None and not 0 < url.port < 1 << 16):
        raise InvalidRequest(f"{field} leads to an address that is not one of http or https with a host", field=field)
    if url.userinfo:
        raise InvalidRequest(f"{field}: an address must not hold a user's name or password", field=field)
    return url


def _open_inside(folder: Path, text: str) -> int:
    """The descriptor of a plain file in a folder, whose links are followed as long as they lead inside. Nothing outside is
    looked at, and nobody can put a link in the way of what has been checked."""
    path = Path(text)
    if ".." in path.parts:
        raise ValueError("a path that goes up")
    root = folder.resolve(strict=True)
    if path.is_absolute():
        path = path.relative_to(root if path.is_relative_to(root) else folder.absolute())
    parts = (root / path).resolve(strict=True).relative_to(root).parts
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for place, part in enumerate(parts, 1):
        flags = os.O_RDONLY | os.O_NOFOLLOW | (os.O_NONBLOCK if place == len(parts) else os.O_DIRECTORY)
        outer = descriptor
        try:
            descriptor = os.open(part, flags, dir_fd=outer)
        finally:
            os.close(outer)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("no plain file")
    return descriptor


def _not_allowed(message: str, field: str) -> ForbiddenReference:
    return ForbiddenReference(f"{field}: {message}", field=field, code="media_domain_forbidden")


def _no_file(message: str, field: str) -> ForbiddenReference:
    return ForbiddenReference(f"{field}: {message}", field=field, code="local_media_forbidden")


def _too_large(field: str, max_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"{field} has more than {max_bytes} bytes", field=field, code="reference_too_large")
