"""Servers for clients to be tested with: `serving` runs a small one, each of whose answers is made by a function."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from duetts.bench.client import Target, ask
from duetts.bench.metrics import Record

Answering = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
FRAME = bytes(4096)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def serving(answer: Answering) -> AsyncIterator[Target]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            assert length is not None
            await answer(writer, await reader.readexactly(int(length[1])))
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Target("127.0.0.1", server.sockets[0].getsockname()[1], timeout_s=20)


async def asked(answer: Answering, *, frames: int = 2, paced: bool = False, body: bytes = b"{}") -> Record:
    """What a client has of one request."""
    record = Record(0, 0, frames, paced=paced)
    async with serving(answer) as target:
        await ask(target, body, record)
    return record
