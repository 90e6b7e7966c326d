"""What goes on beside a run: what servers tell of their processes on /metrics, and a command in the middle of it.

A server that tells nothing is measured all the same. The command is how a benchmark kills a replica, or changes a server.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

from duetts.bench.load import Point
from duetts.bench.metrics import Run
from duetts.errors import ConfigError

EVERY_S = 1.0  # between two looks at /metrics
PROCESSOR = re.compile(rb"^process_cpu_seconds_total(?:{\S+})? (\S+)$", re.MULTILINE)  # of each HTTP process
FRAMES = re.compile(rb'^duetts:frames_generated_total{engine="(\d+)"} (\S+)$', re.MULTILINE)
LATE_S = 0.3  # servers know of their engines as late as this
OUTLAST_S = 300.0  # how long a command may go on after its run
KEPT = 2000  # characters of what it says


def fetch(url: str, api_key: str = "") -> bytes | None:
    """The body of an address; None if there is none."""
    try:
        with urlopen(Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {}), timeout=10) as answer:
            body: bytes = answer.read()
            return body
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Event:
    """A command that is run so many seconds after the beginning of each run."""

    after_s: float
    command: tuple[str, ...]

    async def happen(self) -> dict[str, Any]:
        """When it began and ended, its code and what it said, as JSON if it is. Cancelling it ends the command."""
        await asyncio.sleep(self.after_s)
        began = time.monotonic()
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self.command, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return {"command": self.command, "began": began, "ended": time.monotonic(), "code": process.returncode,
                "output": said(output)}  # fmt: skip


def said(output: bytes) -> Any:
    """What a command wrote: JSON if it is, else its end as text."""
    try:
        return json.loads(output)
    except ValueError:
        return output.decode("utf-8", "replace")[-KEPT:]


def read_event(text: str) -> Event:
    """An event of SECONDS:COMMAND. Raises `ConfigError`."""
    seconds, _, command = text.partition(":")
    try:
        event = Event(float(seconds), tuple(shlex.split(command)))
    except ValueError:
        event = Event(-1, ())
    if not (0 <= event.after_s < math.inf and event.command):
        raise ConfigError(f"--event is {text!r}, not like 10:COMMAND")
    return event


@dataclass(frozen=True, slots=True)
class Look:
    """What all servers together told at one time."""

    when: float
    processor_s: float
    frames: dict[str, int]


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """Runs of a load, with what happens to these servers meanwhile."""

    urls: tuple[str, ...] = ()
    api_key: str = ""
    event: Event | None = None

    async def beside(self, run: Callable[[Point], Awaitable[Run]], point: Point) -> Run:
        """One run. Raises `OSError` if the event's command cannot be started."""
        looks = [await self._look()]
        watching = asyncio.create_task(self._watch(looks))
        happening = asyncio.create_task(self.event.happen()) if self.event else None
        try:
            done = await run(point)
            if happening is not None:
                async with asyncio.timeout(OUTLAST_S):
                    done.event = await happening
        except TimeoutError:
            done.event = {"command": self.event.command if self.event else (), "output": "it did not end in time"}
        finally:
            await _cancelled(watching, happening)
        if looks[0] is not None:
            await asyncio.sleep(LATE_S)
            looks.append(await self._look())
        told = [look for look in looks if look is not None]
        done.server_processor = [(look.when, look.processor_s) for look in told]
        if len(told) > 1:
            done.engine_frames = made(told[0].frames, told[-1].frames)
        return done

    async def _watch(self, looks: list[Look | None]) -> None:
        while looks[0] is not None:
            await asyncio.sleep(EVERY_S)
            looks.append(await self._look())

    async def _look(self) -> Look | None:
        bodies = [await asyncio.to_thread(fetch, f"{url}/metrics", self.api_key) for url in self.urls]
        processor_s = 0.0
        frames: dict[str, int] = {}
        for number, body in enumerate(bodies):
            found = PROCESSOR.findall(body or b"")
            if not found:
                return None
            processor_s += sum(map(float, found))
            name = f"{number}/" if len(bodies) > 1 else ""
            frames |= {name + engine.decode(): round(float(count)) for engine, count in FRAMES.findall(body or b"")}
        return Look(time.monotonic(), processor_s, frames) if bodies else None


def meanwhile(urls: Sequence[str], api_key: str, event: str) -> Meanwhile:
    """What happens beside runs against these servers. Raises `ConfigError` for an event that is none."""
    return Meanwhile(tuple(urls), api_key, read_event(event) if event else None)


def made(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Frames of each engine between two looks. One that counts from 0 again was started anew in between."""
    return {engine: count - (known if (known := before.get(engine, 0)) <= count else 0) for engine, count in after.items()}


async def _cancelled(*tasks: asyncio.Task[Any] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
