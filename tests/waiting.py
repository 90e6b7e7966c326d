"""Waiting for what must come to pass, however busy the machine is: a test never looks at a moment it has only hoped for."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LIMIT_S = 120.0  # only a fault takes this long


async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Returns when the condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"it did not come to pass within {limit_s} s"
        await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S, every_s: float = 0.002) -> None:
    """The same without an event loop."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"it did not come to pass within {limit_s} s"
        time.sleep(every_s)


async def turns(count: int = 20) -> None:
    """The event loop goes round so often: what follows by itself from what has happened has followed."""
    for _ in range(count):
        await asyncio.sleep(0)


@contextmanager
def holding(owner: Any, name: str) -> Iterator[None]:
    """Calls of this method by other threads stand still inside: nothing gets done before a test has looked."""
    go, method = threading.Event(), getattr(owner, name)
    setattr(owner, name, lambda *values, **options: (go.wait(LIMIT_S), method(*values, **options))[1])
    try:
        yield
    finally:
        setattr(owner, name, method)
        go.set()
