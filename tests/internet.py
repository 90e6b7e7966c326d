"""A small internet for tests: names with addresses, and hosts on loopback ports that note whatever reaches them.

Nothing leaves the machine: names are looked up here only, and an address that is not a host of this internet cannot be
connected to.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address

import httpx

Answering = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
PUBLIC = "93.184.215.14"


@dataclass
class Host:
    """A listener on a loopback port. `asked` has the heads of the requests that came, `connections` counts them from the first
    byte on."""

    port: int = 0
    connections: int = 0
    asked: list[str] = field(default_factory=list)


@dataclass
class Internet:
    """`names` gives each name the addresses of its first, second, ... look-up; the last one stays. `hosts` are where addresses
    and ports really are."""

    names: dict[str, list[list[str]]] = field(default_factory=dict)
    hosts: dict[tuple[str, int], Host] = field(default_factory=dict)
    look_ups: list[str] = field(default_factory=list)
    connected: list[str] = field(default_factory=list)

    def resolve(self, host: str, port: int) -> list[str]:
        """As `fetch.look_up`."""
        self.look_ups.append(host)
        if host in self.names:
            answers = self.names[host]
            return answers.pop(0) if len(answers) > 1 else answers[0]
        try:
            return [str(ip_address(host))]
        except ValueError:
            raise OSError("no such name") from None

    def transport(self, context: ssl.SSLContext) -> httpx.AsyncBaseTransport:
        """As that of `Fetcher`."""
        return _Roads(self, context)


class _Roads(httpx.AsyncBaseTransport):
    """Requests go to where the internet has the address, and nowhere else."""

    def __init__(self, internet: Internet, context: ssl.SSLContext) -> None:
        self._internet = internet
        self._direct = httpx.AsyncHTTPTransport(verify=context, trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        self._internet.connected.append(url.host)
        host = self._internet.hosts.get((url.host, url.port or {"http": 80, "https": 443}[url.scheme]))
        if host is None:
            raise httpx.ConnectError("no road leads there")
        request.url = url.copy_with(host="127.0.0.1", port=host.port)
        return await self._direct.handle_async_request(request)

    async def aclose(self) -> None:
        await self._direct.aclose()


@asynccontextmanager
async def listening(answering: Answering, context: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
    """A host that answers each request, given its head, as it likes."""
    host = Host()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            host.asked.append(head)
            await answering(head, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()


def sending(body: bytes, status: int = 200, **headers: str) -> Answering:
    """An answer that is always the same. Underscores in names of headers are dashes."""
    lines = {"content-length": str(len(body)), "content-type": "audio/wav", "connection": "close"}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = f"HTTP/1.1 {status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"

    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode() + body)
        await writer.drain()

    return answer


def redirecting(location: str, status: int = 302) -> Answering:
    return sending(b"", status, location=location)
