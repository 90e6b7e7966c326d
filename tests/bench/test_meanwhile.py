"""What goes on beside a run: what servers tell of themselves, and a command in the middle."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from duetts.bench import meanwhile
from duetts.bench.load import Point
from duetts.bench.meanwhile import Event, Meanwhile, made, read_event, said
from duetts.bench.metrics import Pcm, Record, Run, figures, rates
from duetts.bench.report import summary
from duetts.bench.workloads import WORKLOADS
from duetts.errors import ConfigError
from tests.waiting import until

PCM, POINT = Pcm(), Point(WORKLOADS["T"], 1)


@asynccontextmanager
async def telling(tell: bool = True, seen: list[int] | None = None, workers: bool = False) -> AsyncIterator[str]:
    """A server whose process takes 0.25 s of processor time between two looks, and whose second engine was started anew."""
    looks = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal looks
        await reader.readuntil(b"\r\n\r\n")
        frames = (100 + 10 * looks, 500 if looks == 0 else 3)
        engines = "".join(
            f'duetts:frames_generated_total{{engine="{index}"}} {count}.0\n' for index, count in enumerate(frames)
        )
        several = "".join(f'process_cpu_seconds_total{{worker="w{number}"}} {5 + looks / 8}\n' for number in range(2))
        one = several if workers else f"process_cpu_seconds_total {5 + looks / 4}\n"
        body = one + engines if tell else "nothing\n"
        looks += 1
        if seen is not None:
            seen.append(looks)
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def running(point: Point) -> Run:
    start = time.monotonic()
    await asyncio.sleep(0.2)
    end = time.monotonic()
    return Run([Record(0, 0, 1, start=start, end=end, audio_bytes=4096, reads=[(end, 4096)])], 1)


async def test_a_servers_processor_time_and_frames_of_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meanwhile, "EVERY_S", 60)
    async with telling() as url, telling(workers=True) as other:
        run = await Meanwhile((url,)).beside(running, POINT)
        assert run.engine_frames == {"0": 10, "1": 3}
        both = await Meanwhile((url, other)).beside(running, POINT)
        assert both.engine_frames == {"0/0": 10, "0/1": 0, "1/0": 10, "1/1": 3}
    (before, used), (after, more) = run.server_processor
    assert more - used == 0.25
    share = rates(run, PCM)["server_processor_share"]
    assert share == pytest.approx(0.25 / (after - before))
    assert both.server_processor[1][1] - both.server_processor[0][1] == 0.5


async def test_looks_go_on_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meanwhile, "EVERY_S", 0.01)
    seen: list[int] = []

    async def watched(point: Point) -> Run:
        await until(lambda: len(seen) > 4)
        return await running(point)

    async with telling(seen=seen) as url:
        run = await Meanwhile((url,)).beside(watched, POINT)
    assert len(run.server_processor) > 4


async def test_a_server_that_tells_nothing_is_measured_all_the_same() -> None:
    async with telling(tell=False) as url:
        run = await Meanwhile((url, "http://127.0.0.1:1")).beside(running, POINT)
    assert (run.server_processor, run.engine_frames) == ([], {})
    assert math.isnan(rates(run, PCM)["server_processor_share"])
    assert math.isnan(figures([run, run], PCM)["server_processor_share"][0])


def test_processor_time_is_that_of_the_steady_window() -> None:
    run = Run([], 1, server_processor=[(10.0, 5.0), (11.0, 5.5), (13.0, 7.5)])
    assert run.server_share(10, 11) == pytest.approx(0.5)
    assert run.server_share(10.5, 12) == pytest.approx((6.5 - 5.25) / 1.5)
    assert run.server_share(0, 99) == pytest.approx(2.5 / 3)
    assert math.isnan(run.server_share(20, 30))


def test_an_engine_that_counts_from_nothing_again_was_started_anew() -> None:
    assert made({"0": 5, "1": 7}, {"0": 9, "1": 2, "2": 4}) == {"0": 4, "1": 2, "2": 4}


async def test_a_command_in_the_middle_and_its_times() -> None:
    command = f'0.05:{sys.executable} -c "print(\'{{\\"killed\\": 3}}\')"'
    run = await Meanwhile(event=read_event(command)).beside(running, POINT)
    (event,) = summary(POINT, [run], PCM)["events"]
    assert (event["code"], event["output"]) == (0, {"killed": 3})
    assert event["began_s"] >= 0.04
    assert event["ended_s"] >= event["began_s"]
    assert event["origin_s"] == run.records[0].start
    assert said(b"no JSON\n") == "no JSON\n"


async def test_a_command_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meanwhile, "OUTLAST_S", 0.3)
    began = time.monotonic()
    run = await Meanwhile(event=Event(0, (sys.executable, "-c", "import time; time.sleep(100)"))).beside(running, POINT)
    assert time.monotonic() - began < 60
    (event,) = summary(POINT, [run], PCM)["events"]
    assert event["output"] == "it did not end in time"


async def test_a_command_that_is_not_there_ends_the_benchmark() -> None:
    with pytest.raises(OSError, match="no-such-command"):
        await Meanwhile(event=Event(0, ("/no-such-command",))).beside(running, POINT)


@pytest.mark.parametrize("text", ["", "kill it", "x:kill", "-1:kill", "5:", "inf:kill", '5:"kill'])
def test_events_are_told_like_times(text: str) -> None:
    with pytest.raises(ConfigError, match="10:COMMAND"):
        read_event(text)
