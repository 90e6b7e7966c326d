"""The life of an engine or codec process: orders through standard input, ending when their giver does; the exit code. No torch.

SIGTERM and SIGINT are not heard: whoever sends them to all processes of a server, as terminals and service managers do, means
the server, which needs its engines and their codecs to the end of what they speak, and then ends them itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import BinaryIO, Literal

import ormsgpack

from duetts.config import EngineConfig, ProcessConfig
from duetts.engine import wire
from duetts.engine.host import Host, Started
from duetts.errors import WireError
from duetts.types import SpeakerInfo

PR_SET_PDEATHSIG = 1
FAULT = 71  # exit code: an error of our own

log = logging.getLogger("duetts.engine")
Role = Literal["engine", "codec"]


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process is told. Its `listener` is a socket at the address; `parent` the id of the process that it must not
    outlive."""

    index: int
    address: str
    listener: int
    incarnation: str
    parent: int
    folder: str
    engine: EngineConfig
    processes: ProcessConfig
    role: Role = "engine"

    def pack(self) -> bytes:
        """Length in four bytes, then msgpack."""
        packed = ormsgpack.packb(asdict(self))
        return len(packed).to_bytes(4, "little") + packed

    @classmethod
    def read(cls, stream: BinaryIO) -> Orders:
        """The orders as `pack` wrote them. Raises `WireError` for anything else."""
        size = int.from_bytes(stream.read(4), "little")
        try:
            values = ormsgpack.unpackb(stream.read(size))
        except ormsgpack.MsgpackDecodeError as error:
            raise WireError("the orders cannot be read") from error
        if not isinstance(values, dict):
            raise WireError("the orders are no map")
        return wire.build(cls, values)


@dataclass(frozen=True, slots=True)
class Life:
    """What is told of an engine to those who use it and have not started it. Without an `incarnation` there is nobody to reach.

    `state` is one word; `expected_at` when it may take work, by the machine's monotonic clock; `failure` why the life before
    this one ended; `info` what it is, once it has been up.
    """

    index: int
    state: str = "restarting"
    address: str = ""
    incarnation: str = ""
    pid: int | None = None
    starts: int = 0
    start_s: float = 0.0
    expected_at: float = 0.0
    failure: str = ""
    info: SpeakerInfo | None = None


Start = Callable[[Orders, Callable[[], None]], Awaitable[Started]]


def live(start: Start) -> None:
    """Reads the orders, starts what they ask for, serves, and leaves the process. Does not return.

    `start` runs in the event loop, which it must not hold; what it is given besides tells that `is_up` may have changed.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders = Orders.read(sys.stdin.buffer)
    die_with(orders.parent)
    form = f"%(asctime)s %(levelname)s %(name)s: {orders.role} {orders.index}: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    loop = asyncio.new_event_loop()
    serving = loop.create_task(_serve(orders, start))
    loop.run_until_complete(asyncio.wait([serving]))
    fault = serving.exception()
    if fault is not None:
        log.critical("the process has a fault", exc_info=fault)
    logging.shutdown()
    # At once: a thread that never returns (an unfinished load, a call on the device) must not hold the process.
    os._exit(FAULT if fault else serving.result())


def die_with(parent: int) -> None:
    """On Linux the kernel ends this process with the parent's thread that started it, even when nothing runs here any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


async def _serve(orders: Orders, start: Start) -> int:
    """Serves until the end. Returns the exit code."""
    host = Host(orders.address, orders.incarnation, orders.processes, orders.listener)
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno()

    def hear_parent() -> None:
        if not os.read(stdin, 1024):
            loop.remove_reader(stdin)
            host.end()

    loop.add_reader(stdin, hear_parent)
    return await host.run(lambda: start(orders, host.tell))
