"""A local cluster as a test has it: where it answers, what it has said, and whether all of it has ended."""

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families as families

from tests.waiting import wait_until

MARK = "RAY_OF_THE_TEST"  # a variable that all processes of one cluster inherit
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # this keeps nodes on loopback
    "RAY_DEDUP_LOGS": "0",
    "RAY_AUTH_MODE": "disabled",  # else Ray keeps a token in the user's home
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


@dataclass
class Running:
    """A cluster, and the way to it."""

    address: str
    http: httpx.Client
    log: list[str]
    mark: str

    def replicas(self) -> set[str]:
        """The replicas that tell their numbers."""
        told = families(self.http.get("/metrics").text)
        return {sample.labels["replica"] for family in told for sample in family.samples if sample.name == "duetts:num_places"}

    def until(self, count: int, seconds: float) -> float:
        """Waits for so many replicas; how long it took."""
        began = time.monotonic()
        while len(self.replicas()) != count:
            assert time.monotonic() - began < seconds, "".join(self.log[-60:])
            time.sleep(0.2)
        return time.monotonic() - began

    def only_engine(self) -> int:
        """The one engine process that is left when the fleet has come to rest."""
        self.until(1, 90)
        wait_until(lambda: len(self.processes("duetts.engine.process")) == 1, every_s=0.2)
        return self.processes("duetts.engine.process")[0]

    def processes(self, word: str = "") -> list[int]:
        """The cluster's processes whose command line has this word."""
        return [pid for pid, line in marked(self.mark) if word in line]


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """Processes that have inherited a mark, and their command lines."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has just ended
                continue


@contextmanager
def cluster(**arguments: Any) -> Iterator[Running]:
    """A cluster with the application of these arguments. At its end nothing of it may be left."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "tests.cluster.local", json.dumps(arguments)]
    environment = {**os.environ, **VARIABLES, MARK: mark}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None
    log: list[str] = []
    try:
        address = ""
        while not address:
            log.append(process.stdout.readline())
            assert log[-1], "".join(log)
            address = log[-1].strip() if log[-1].startswith("http://") else ""
        reader = threading.Thread(target=lambda: log.extend(process.stdout or []))
        reader.start()
        with httpx.Client(base_url=address, timeout=120, trust_env=False) as http:
            yield Running(address, http, log, mark)
        process.stdin.close()
        assert process.wait(90) == 0, "".join(log[-60:])
        reader.join(30)
        wait_until(lambda: not any(marked(mark)), every_s=0.2)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        for pid, _ in marked(mark):
            os.kill(pid, 9)
