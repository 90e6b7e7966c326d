"""One request on one connection: written at once, its answer timed as it is read, at full speed or at the rate of playing.

httpx takes ten times as long for a chunk; this reads into one buffer that all connections share, and copies nothing.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from duetts.bench.answer import Answer, BadAnswer
from duetts.bench.metrics import Pcm, Player, Record
from duetts.errors import ConfigError

BUFFER = memoryview(bytearray(256 << 10))  # what is read is looked at before anything else is
AHEAD_S = 0.5  # audio that a paced reader has at most
LEAST_S = 0.1  # and for how much more it reads again
PACED_SOCKET_BYTES = 16 << 10  # that the system holds for a paced reader; it takes twice as many
WRONG_LENGTH = "wrong length"  # begins the error that rejects a run


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what its samples are."""

    host: str
    port: int
    path: str = "/v1/audio/speech"
    api_key: str = ""
    wav: bool = False
    pcm: Pcm = field(default_factory=Pcm)
    timeout_s: float = 300.0

    def head(self, length: int) -> bytes:
        """The head of a request whose JSON body has so many bytes."""
        lines = [f"POST {self.path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Content-Type: application/json",
                 f"Content-Length: {length}", "Accept: */*", "Connection: close"]  # fmt: skip
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()


def read_url(url: str) -> tuple[str, int, str]:
    """Host, port and path prefix. Raises `ConfigError` for what is not plain HTTP."""
    parts = urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        raise ConfigError(f"the server's address is {url!r}, not like http://127.0.0.1:8000")
    return parts.hostname, port, parts.path.rstrip("/")


def targets(urls: Sequence[str], api_key: str, wav: bool, pcm: Pcm, timeout_s: float) -> tuple[Target, ...]:
    """Where requests to these servers go. Raises `ConfigError`."""
    places = [read_url(url) for url in urls]
    return tuple(Target(host, port, f"{prefix}/v1/audio/speech", api_key, wav, pcm, timeout_s) for host, port, prefix in places)


async def ask(target: Target, body: bytes, record: Record) -> None:
    """Sends a request and fills its record, whatever happens. Returns when the answer ended; for a paced record, when it
    would have been played."""
    loop = asyncio.get_running_loop()
    exchange = Exchange(target, target.head(len(body)) + body, record)
    record.due = record.due if record.due == record.due else time.monotonic()
    place = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    connection = socket.socket(place[0][0])
    connection.setblocking(False)
    if record.paced:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PACED_SOCKET_BYTES)
    try:
        async with asyncio.timeout(target.timeout_s):
            await loop.sock_connect(connection, place[0][4])
            await loop.create_connection(lambda: exchange, sock=connection)
            await exchange.done
    except TimeoutError:
        record.error = f"no end within {target.timeout_s:g} s"
    except OSError as error:
        record.error = f"no connection: {error.strerror or error}"
    finally:
        exchange.close()
        connection.close()
    record.end = record.end if record.end == record.end else time.monotonic()
    record.start = record.start if record.start == record.start else record.end
    expected = record.frames * target.pcm.frame_bytes
    if not record.error and record.audio_bytes != expected:
        record.error = f"{WRONG_LENGTH}: {record.audio_bytes} bytes instead of {expected}"
    if record.paced and not record.error:
        await asyncio.sleep(exchange.player.ahead_s(time.monotonic()))


class Exchange(asyncio.BufferedProtocol):
    """The connection of one request. `done` is set when nothing more is to come."""

    def __init__(self, target: Target, request: bytes, record: Record) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.player = Player(target.pcm)
        self._request, self._record, self._pcm = request, record, target.pcm
        self._answer = Answer(wav=target.wav)
        self._transport: asyncio.Transport | None = None
        self._waking: asyncio.TimerHandle | None = None
        self._writing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)
        self._transport.write(self._request)
        self._request = b""
        if not self._writing:
            self._record.start = time.monotonic()

    def pause_writing(self) -> None:
        self._writing = True

    def resume_writing(self) -> None:
        """The last byte has been handed to the system."""
        self._record.start = time.monotonic()

    def get_buffer(self, sizehint: int) -> memoryview:
        return BUFFER[: max(1024, self._room())] if self._record.paced else BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        now = time.monotonic()
        try:
            news = self._answer.feed(BUFFER[:nbytes])
        except BadAnswer as error:
            return self._end(now, str(error))
        record = self._record
        if news.body and record.first_byte != record.first_byte:
            record.first_byte = now
        if news.audio:
            if not record.audio_bytes:
                record.first_audio = now
            record.audio_bytes += news.audio
            record.reads.append((now, news.audio))
            self.player.hear(now, news.audio)
        record.chunks.extend((now, size) for size in news.chunks)
        if self._answer.complete:
            return self._end(now)
        if record.paced:
            self._rest(now)
        return None

    def eof_received(self) -> None:
        try:
            self._answer.close()
            self._end(time.monotonic())
        except BadAnswer as error:
            self._end(time.monotonic(), str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(time.monotonic(), f"the connection broke: {exc}" if exc else "the connection ended")

    def close(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _end(self, now: float, error: str = "") -> None:
        if self.done.done():
            return
        record, answer = self._record, self._answer
        record.status, record.end = answer.status, now
        if answer.status not in (0, 200):
            error = f"status {answer.status}: {answer.error.decode('utf-8', 'replace')[:300]}"
        rate = answer.headers.get("x-sample-rate", str(self._pcm.rate))
        if not error and rate != str(self._pcm.rate):
            error = f"{WRONG_LENGTH}: samples at {rate} Hz instead of {self._pcm.rate}"
        record.error = error
        self.done.set_result(None)

    def _room(self) -> int:
        """Bytes until so much audio is in hand as a paced reader may have."""
        return min(len(BUFFER), int((AHEAD_S - self.player.ahead_s(time.monotonic())) * self._pcm.bytes_per_s))

    def _rest(self, now: float) -> None:
        """Stops reading while there is enough in hand."""
        excess_s = self.player.ahead_s(now) - (AHEAD_S - LEAST_S)
        if excess_s > 0 and self._transport is not None:
            self._transport.pause_reading()
            self._waking = asyncio.get_running_loop().call_later(excess_s, self._transport.resume_reading)
