"""Waiting for what must come to pass, however busy the machine is: a test never looks at a moment it has only hoped for."""

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 60.0  # only a fault takes this long


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
