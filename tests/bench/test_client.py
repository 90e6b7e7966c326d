"""The client at answers of all kinds, over real sockets: what it counts, what it takes for a failure, and that a listener's
pace is kept."""

from __future__ import annotations

import asyncio
import time

import pytest

from duetts.bench.client import AHEAD_S, LEAST_S, WRONG_LENGTH, Target, ask, read_url
from duetts.bench.metrics import Pcm, Player, Record
from duetts.errors import ConfigError
from tests.waiting import until

from .servers import CHUNKED, FRAME, OK, asked, chunk, serving


async def two_chunks(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(CHUNKED + chunk(FRAME))
    await writer.drain()
    writer.write(chunk(FRAME) + b"0\r\n\r\n")


async def test_times_and_bytes_of_a_stream() -> None:
    record, sent_at = Record(0, 0, 2), 0.0

    async def one_by_one(writer: asyncio.StreamWriter, body: bytes) -> None:
        nonlocal sent_at
        writer.write(CHUNKED + chunk(FRAME))
        await until(lambda: record.chunks)
        await asyncio.sleep(0.02)
        sent_at = time.monotonic()
        writer.write(chunk(FRAME) + b"0\r\n\r\n")

    async with serving(one_by_one) as target:
        await ask(target, b"{}", record)
    assert (record.error, record.status, record.audio_bytes) == ("", 200, 8192)
    assert [size for _, size in record.chunks] == [4096, 4096]
    assert sum(size for _, size in record.reads) == 8192
    assert record.due <= record.start <= record.first_byte <= record.first_audio <= record.end
    assert record.chunks[0][0] < sent_at <= record.chunks[1][0]
    assert record.first_audio < sent_at <= record.end


async def test_the_clock_starts_with_the_last_byte_of_a_large_request() -> None:
    read = 0.0

    async def slowly(writer: asyncio.StreamWriter, body: bytes) -> None:
        nonlocal read
        read = time.monotonic()
        assert len(body) == 8 << 20
        writer.write(OK + b"Content-Length: 8192\r\n\r\n" + 2 * FRAME)

    record = await asked(slowly, body=bytes(8 << 20))
    assert record.error == ""
    assert record.due < record.start
    assert record.start < record.first_byte
    assert abs(record.start - read) < 1.0


async def test_other_lengths_and_rates_are_told() -> None:
    record = await asked(two_chunks, frames=3)
    assert record.error == f"{WRONG_LENGTH}: 8192 bytes instead of 12288"

    async def slower(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(OK + b"Content-Length: 8192\r\nX-Sample-Rate: 24000\r\n\r\n" + 2 * FRAME)

    assert (await asked(slower)).error == f"{WRONG_LENGTH}: samples at 24000 Hz instead of 44100"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull", "status 429: full"),
        (CHUNKED + chunk(FRAME), "ended before the answer did"),
        (b"", "ended before the answer did"),
        (b"nonsense\r\n\r\n", "no HTTP answer"),
    ],
)
async def test_failures_are_told(answer: bytes, message: str) -> None:
    async def refuse(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(answer)

    record = await asked(refuse)
    assert message in record.error
    assert record.start <= record.end


async def test_nobody_there_and_nobody_answering() -> None:
    record = Record(0, 0, 2)
    await ask(Target("127.0.0.1", 1), b"{}", record)
    assert "no connection" in record.error

    async def never(writer: asyncio.StreamWriter, body: bytes) -> None:
        await asyncio.sleep(1)

    record = Record(0, 0, 2)
    async with serving(never) as target:
        await ask(Target(target.host, target.port, timeout_s=0.2), b"{}", record)
    assert record.error == "no end within 0.2 s"


async def test_a_paced_reader_never_has_more_than_a_listener_would() -> None:
    """3 s of audio are there at once; they are read in about 2.5, and all the time the server cannot get rid of more."""
    sent = []

    async def flood(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.transport.get_extra_info("socket").setsockopt(1, 7, 16 << 10)  # SO_SNDBUF, so that it is seen what is not read
        writer.transport.set_write_buffer_limits(0)
        writer.write(CHUNKED)
        for _ in range(16):
            writer.write(chunk(4 * FRAME))
            await writer.drain()
            sent.append(time.monotonic())
        writer.write(b"0\r\n\r\n")

    stood_s = 0.0

    async def watch() -> None:
        """For how long the machine had no time for this loop, at most."""
        nonlocal stood_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            stood_s = max(stood_s, time.monotonic() - before)

    watching = asyncio.ensure_future(watch())
    began = time.monotonic()
    record = await asked(flood, frames=64, paced=True)
    watching.cancel()
    took = time.monotonic() - began
    pcm = Pcm()
    length = 64 * pcm.frame_length / pcm.rate
    assert record.error == ""
    assert record.end - record.first_audio >= length - AHEAD_S - 0.05
    assert took >= length - 0.05  # until it would have been played
    player = Player(pcm)
    for now, size in record.reads:
        player.hear(now, size)
        assert player.ahead_s(now) <= AHEAD_S + 0.03
    assert max(player.waits, default=0.0) <= stood_s
    assert stood_s > AHEAD_S - LEAST_S or player.waits == []
    assert len(record.reads) >= (length - AHEAD_S) / (AHEAD_S + LEAST_S)
    # The server's last chunk but some in buffers (4 of 0.19 s) went out late, too.
    assert sent[-1] - sent[0] >= length - AHEAD_S - 1.0


def test_addresses() -> None:
    assert read_url("http://h:81/proxy/") == ("h", 81, "/proxy")
    assert read_url("http://[::1]:9") == ("::1", 9, "")
    assert read_url("http://h") == ("h", 80, "")
    for wrong in ("https://h", "h:80", "http://", "http://h:x"):
        with pytest.raises(ConfigError):
            read_url(wrong)
