"""Bytes that no client should send, over both sockets and in msgpack bodies. Seconds in the default run, longer on demand.

What is asked: whatever comes, the server answers or closes with a code of its own and never with a fault (1011, 5xx), nothing
hangs, and afterwards nothing is open and no task is left.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import ormsgpack
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.inputs import REF_TEXT, clip
from tests.server.conftest import Door
from tests.server.real import Served, serve
from tests.server.sine import Knobs
from tests.server.test_real_engine_fuzz import EMPTY, ODD, TEXTS, damaged
from tests.waiting import LIMIT_S

CLIENTS, TRIES = 8, 25  # of each client in each part: the same ones on every machine
LONG_SECONDS = 40.0  # of each part of the long form, in which no client tries less
ANSWER_S = LIMIT_S  # in which something must come
CODES = {1000, 1001, 1002, 1003, 1007, 1008, 1009, 4400, 4408, 4409}
FAULT = 1011
SPEECH = ("/v1/audio/speech", "input")
FISH = ("/v1/tts", "text")
STATUSES = {200, 400, 403, 404, 413, 415, 429}


def plain(value: Any) -> Any:
    """What JSON and msgpack can both hold."""
    try:
        return ormsgpack.unpackb(ormsgpack.packb(value))
    except (TypeError, ValueError, ormsgpack.MsgpackEncodeError):
        return str(value)[:40].encode("utf-8", "replace").decode()


def fields(rng: random.Random, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"max_new_tokens": 3, "seed": rng.randrange(9)}
    for _ in range(rng.choice([0, 0, 1, 3])):
        found[rng.choice(names)] = plain(rng.choice(ODD))
    return found


NAMES = [
    "voice", "speed", "response_format", "format", "stream_audio", "binary", "split_granularity", "sample_rate", "seed", "x",
    "temperature", "ref_audio", "references", "reference_id", "prosody", "latency", "chunk_length", "model",
]  # fmt: skip


def own_message(rng: random.Random) -> str | bytes:
    """One for the server's own socket: mostly fit, then damaged, odd or no message at all."""
    kind = rng.random()
    text = rng.choice([*TEXTS, "One. Two. ", "word " * 30, "[laugh", "<|speaker:1|>Hi. "])
    if kind < 0.35:
        message: Any = {"type": "input.text", "text": text}
    elif kind < 0.55:
        message = {"type": rng.choice(["input.done", "input.flush", "input.cancel", "ping", "session.close"])}
    elif kind < 0.7:
        message = {"type": "session.config", **fields(rng, NAMES)}
    elif kind < 0.8:
        message = {"type": rng.choice(["input.text", "x", "", 5, None]), "text": plain(rng.choice(ODD))}
    else:
        return rng.choice([rng.randbytes(rng.randrange(200)), "", "[" * 5000, "{}", "null", '{"type":', "\x00", "a" * 140_000])
    raw = json.dumps(message)
    return damaged(raw.encode(), rng).decode("utf-8", "replace") if rng.random() < 0.15 else raw


def live_message(rng: random.Random) -> str | bytes:
    """One for Fish Audio's socket."""
    kind = rng.random()
    text = rng.choice([*TEXTS, "One. Two. ", "word " * 30])
    if kind < 0.35:
        message: Any = {"event": "text", "text": text}
    elif kind < 0.6:
        message = {"event": rng.choice(["flush", "stop", "stop", "x"])}
    elif kind < 0.8:
        message = {"event": "start", "request": {"text": rng.choice(["", text]), **fields(rng, NAMES)}}
    elif kind < 0.9:
        odd = {"request": plain(rng.choice(ODD)), "text": plain(rng.choice(ODD))}
        message = {"event": rng.choice(["start", "text", 5, None]), **odd}
    else:
        return rng.choice(
            [rng.randbytes(rng.randrange(200)), b"", b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", b"\xc1", "text", b"\x80"]
        )
    raw = ormsgpack.packb(message)
    return damaged(raw, rng) if rng.random() < 0.15 else raw


async def one_talk(port: int, path: str, message: Callable[[random.Random], str | bytes], rng: random.Random) -> str:
    """One connection from its first odd message to its end. Returns what to count; raises what is wrong with the server."""
    first: dict[str, Any] = {"type": "session.config", "response_format": "pcm", "max_new_tokens": 3}
    start = {"event": "start", "request": {"text": "", "format": "pcm", "max_new_tokens": 3}}
    opening = json.dumps(first) if "stream" in path else ormsgpack.packb(start)
    async with connect(f"ws://127.0.0.1:{port}{path}", proxy=None, max_size=None, close_timeout=5) as socket:
        listening = asyncio.ensure_future(listen(socket))
        with suppress(ConnectionClosed):
            if rng.random() < 0.8:
                await socket.send(opening)
            for _ in range(rng.randrange(12)):
                await send(socket, message(rng), rng)
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.choice([0, 0.002, 0.02]))
        if rng.random() < 0.4:
            socket.transport.abort()
        else:
            await asyncio.wait_for(socket.close(), ANSWER_S)
        await asyncio.wait_for(listening, ANSWER_S)
    code = socket.protocol.close_rcvd.code if socket.protocol.close_rcvd else 0
    assert code != FAULT, socket.close_reason
    return str(code)


async def send(socket: ClientConnection, message: str | bytes, rng: random.Random) -> None:
    """Whole, in fragments, or as raw bytes of the wire that are no frame."""
    kind = rng.random()
    if kind < 0.9 or len(message) < 2:
        await socket.send(message)
    elif kind < 0.97:
        middle = rng.randrange(len(message))
        await socket.send([message[:middle], message[middle:]])
    else:
        with suppress(RuntimeError):  # it may be closed
            socket.transport.write(rng.randbytes(rng.randrange(1, 60)))


async def listen(socket: ClientConnection) -> None:
    with suppress(ConnectionClosed):
        while True:
            message = await socket.recv()
            if isinstance(message, str):
                told = json.loads(message)
                assert told.get("code") != "internal_error" or EMPTY in message.replace('":"', '": "'), message


async def one_body(http: httpx.AsyncClient, rng: random.Random) -> str:
    """A msgpack body for one of the routes."""
    path, name = rng.choice([SPEECH, SPEECH, FISH, ("/v1/audio/speech/batch", "items")])
    text: Any = rng.choice(TEXTS) if name != "items" else [{"input": rng.choice(TEXTS)}, plain(rng.choice(ODD))]
    body: Any = {name: text, **fields(rng, NAMES)}
    if rng.random() < 0.2:
        audio = damaged(clip("control_pcm16.wav"), rng)
        body["references"] = [{"audio": audio, "text": rng.choice([REF_TEXT, "", None])}]
    raw = ormsgpack.packb(body)
    if rng.random() < 0.5:
        raw = damaged(raw, rng)
    if rng.random() < 0.1:
        raw = rng.choice([b"", b"\xc1", b"\x91" * 5000, b"\xdd\x00\x0f\xff\xff" + b"\x90" * 100_000, rng.randbytes(300)])
    answer = await http.post(path, content=raw, headers={"Content-Type": "application/msgpack"})
    assert answer.status_code in STATUSES or EMPTY in answer.text, f"{answer.status_code} {answer.text[:300]} for {raw[:300]!r}"
    return str(answer.status_code)


async def hammer(work: Callable[[random.Random], Awaitable[str]], seconds: float) -> Counter[str]:
    """Repeats the work at once in several clients, so often each and for so long; the first failure ends all."""
    end = time.monotonic() + seconds
    counts: Counter[str] = Counter()

    async def repeat(index: int) -> None:
        rng, tries = random.Random(index), 0
        while tries < TRIES or time.monotonic() < end:
            tries += 1
            counts[await asyncio.wait_for(work(rng), 2 * ANSWER_S)] += 1

    async with asyncio.TaskGroup() as group:
        for index in range(CLIENTS):
            group.create_task(repeat(index))
    return counts


def tasks_of(loop: asyncio.AbstractEventLoop) -> set[str]:
    """The code of every task that runs in the server, but for its own loop."""
    found: list[str] = []
    done = threading.Event()

    def look() -> None:
        found.extend(str(task.get_coro()) for task in asyncio.all_tasks())
        done.set()

    loop.call_soon_threadsafe(look)
    assert done.wait(ANSWER_S)
    return {name for name in found if "Server." not in name}


async def no_task_is_left(loop: asyncio.AbstractEventLoop) -> None:
    end = time.monotonic() + LIMIT_S
    while left := tasks_of(loop):
        if time.monotonic() > end:
            break
        await asyncio.sleep(0.1)
    else:
        return
    pytest.fail(f"tasks are left: {left}")


@pytest.mark.parametrize("part", ["own socket", "live socket", "bodies"])
async def test_odd_bytes_do_no_harm(door: Door, part: str) -> None:
    door.service.knobs = Knobs(chunk_wait_s=0.001)
    door.speak()
    loop = door.service.loop
    assert loop is not None
    counts = await fuzz(f"http://127.0.0.1:{door.port}", door.port, part, 0)
    print(part, dict(counts.most_common()))
    assert counts.total() == CLIENTS * TRIES
    await no_task_is_left(loop)
    assert door.outcomes.num_running == 0
    assert door.service.speaking == 0
    assert door.speak().status_code == 200


async def fuzz(base: str, port: int, part: str, seconds: float) -> Counter[str]:
    if part == "bodies":
        async with httpx.AsyncClient(base_url=base, timeout=ANSWER_S, trust_env=False) as http:
            return await hammer(lambda rng: one_body(http, rng), seconds)
    path, message = ("/v1/audio/speech/stream", own_message) if part == "own socket" else ("/v1/tts/live", live_message)
    return await hammer(lambda rng: one_talk(port, path, message, rng), seconds)


@pytest.fixture
def fuzzed(tiny_folder: Path) -> Iterator[Served]:
    yield from serve(tiny_folder, max_num_seqs=4, max_queue=4)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["own socket", "live socket", "bodies"])
async def test_odd_bytes_do_the_engine_no_harm(fuzzed: Served, part: str, caplog: pytest.LogCaptureFixture) -> None:
    control = {"input": "One two three.", "seed": 1, "max_new_tokens": 20}
    before = await asyncio.to_thread(fuzzed.speak, **control)
    counts = await fuzz(fuzzed.base, int(fuzzed.base.rsplit(":", 1)[1]), part, LONG_SECONDS)
    print(part, dict(counts.most_common()), fuzzed.synthesizer.stats()["finished"])
    await asyncio.to_thread(fuzzed.settled)
    assert fuzzed.synthesizer.stats()["alive"]
    assert not [record for record in caplog.records if record.name.startswith("duetts") and record.levelname == "ERROR"]
    after = await asyncio.to_thread(fuzzed.speak, **control)
    assert after.content == before.content
