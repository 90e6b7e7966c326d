"""`duetts serve` as a person runs it: what HTTP clients see when an engine dies and when the server is asked to stop."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from duetts import TTS
from tests.waiting import LIMIT_S, wait_until

from .test_remote import gone

LONG = {"input": "A long one.", "response_format": "pcm", "stream_format": "audio", "seed": 1, "temperature": 0.9}

FRAMES = 400  # long enough to be killed in the middle, also by a test that is late


class Served:
    """A server process and a client."""

    def __init__(self, folder: Path, *options: str, **variables: str) -> None:
        command = [sys.executable, "-m", "duetts", "serve", str(folder), "--port", "0", "--device", "cpu", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | variables)
        assert self.process.stderr is not None
        self.log: list[str] = []
        port = None
        while port is None:
            self.log.append(self.process.stderr.readline())
            port = re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.log[-1])
            assert self.log[-1], "".join(self.log)
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr or []))
        self._reader.start()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port[1]}", timeout=60, trust_env=False)

    def status(self, path: str) -> int:
        return self.http.get(path).status_code

    def wait(self, path: str, status: int) -> None:
        wait_until(lambda: self.status(path) == status, every_s=0.05)

    def engines(self, parent: int | None = None) -> list[int]:
        """The ids of the engine processes, or of the codec processes of one."""
        return self.children("duetts.engine.process", parent)

    def children(self, module: str, parent: int | None = None) -> list[int]:
        """The ids of the processes of a module that the server, or another process, has started."""
        found, owner = [], parent or self.process.pid
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                above = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if above == owner and module in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def stream(self, frames: int, began: threading.Event | None = None, **fields: Any) -> tuple[bytes, Exception | None]:
        """The body, and how it broke off if it did. `began` is set with the first audio."""
        body = b""
        try:
            with self.http.stream("POST", "/v1/audio/speech", json={**LONG, "max_new_tokens": frames} | fields) as answer:
                assert answer.status_code == 200, answer.read()
                for part in answer.iter_raw():
                    body += part
                    if began:
                        began.set()
        except httpx.HTTPError as error:
            return body, error
        return body, None

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def served(endless_folder: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    running = Served(endless_folder, *request.param)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def tiny_bytes(endless_folder: Path) -> bytes:
    """The beginning of what an engine in this process speaks."""
    with TTS(endless_folder, device="cpu", cpu_threads=1) as tts:
        return tts.say("A long one.", seed=1, temperature=0.9, max_new_tokens=20).pcm


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("served", [["--data-parallel-size", "2"]], indirect=True)
def test_an_engine_dies_and_later_the_server_is_stopped(served: Served) -> None:
    """One server for both, as its start costs seconds."""
    assert served.status("/live") == 200  # while it loads
    assert served.http.get("/health").json()["status"] == "starting"
    assert served.http.post("/v1/audio/speech", json=LONG).json()["error"]["code"] == "not_ready"
    served.wait("/ready", 200)
    engines = served.engines()
    assert len(engines) == 2
    assert not loads_torch(served.process.pid)
    assert all(loads_torch(pid) for pid in engines)

    whole, error = served.stream(FRAMES)
    assert (len(whole), error) == (FRAMES * 4096, None)
    with ThreadPoolExecutor(4) as pool:
        began = [threading.Event() for _ in range(4)]
        streams = [pool.submit(served.stream, FRAMES, event) for event in began]
        assert all(event.wait(LIMIT_S) for event in began)
        os.kill(engines[0], signal.SIGKILL)
        done = [stream.result() for stream in streams]
    broken = [(body, error) for body, error in done if error is not None]
    assert len(broken) == 2
    for body, error in broken:
        assert isinstance(error, httpx.RemoteProtocolError)  # no terminating chunk: nothing looks complete
        assert whole.startswith(body)
        assert len(body) < len(whole)
    assert [body for body, error in done if error is None] == [whole] * 2
    assert served.status("/health") == 200  # the other one is up
    assert served.stream(20) == (whole[: 20 * 4096], None)

    pieces = {"input": "A long one. " * 9, "chunk_length": 100, "max_new_tokens": None}
    whole, error = served.stream(0, **pieces)
    assert error is None
    with ThreadPoolExecutor(1) as pool:
        event = threading.Event()
        last = pool.submit(served.stream, 0, event, **pieces)
        assert event.wait(LIMIT_S)
        for pid in (served.process.pid, *served.engines()):  # as a service manager sends it
            os.kill(pid, signal.SIGTERM)
        served.wait("/ready", 503)
        refused = served.http.post("/v1/audio/speech", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["Retry-After"] == "5"
        assert served.status("/live") == 200
        assert last.result() == (whole, None)  # it was finished, with all pieces
    assert served.process.wait(LIMIT_S) == 0
    wait_until(lambda: all(gone(pid) for pid in served.engines() + engines))


@pytest.mark.slow
@pytest.mark.parametrize("served", [["--drain-timeout", "0.5"]], indirect=True)
@pytest.mark.parametrize("ending", ["limit", "hurried", "killed"])
def test_what_is_open_at_the_end_is_broken_off(served: Served, ending: str) -> None:
    served.wait("/health", 200)
    engines = served.engines()
    with ThreadPoolExecutor(1) as pool:
        event = threading.Event()
        open_stream = pool.submit(served.stream, 900, event)
        assert event.wait(LIMIT_S)
        served.process.send_signal(signal.SIGKILL if ending == "killed" else signal.SIGTERM)
        if ending == "hurried":
            time.sleep(0.1)
            served.process.send_signal(signal.SIGINT)
        body, error = open_stream.result()
        assert isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
        assert 0 < len(body) < 900 * 4096
    assert served.process.wait(LIMIT_S) == {"limit": 0, "hurried": 1, "killed": -9}[ending]
    wait_until(lambda: all(gone(pid) for pid in engines))


@pytest.mark.slow
@pytest.mark.parametrize("served", [[]], indirect=True)
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_while_it_loads_ends_in_order(served: Served, ending: int) -> None:
    assert served.http.get("/health").json()["status"] == "starting"
    served.process.send_signal(ending)
    assert served.process.wait(LIMIT_S) == 0
    assert served.engines() == []


@pytest.mark.slow
@pytest.mark.parametrize("served", [[]], indirect=True)
def test_the_only_engine_dies_and_requests_wait_for_the_next(served: Served) -> None:
    served.wait("/health", 200)
    whole, _ = served.stream(20)
    os.kill(served.engines()[0], signal.SIGKILL)
    served.wait("/health", 503)
    told = served.http.get("/health").json()
    assert told["status"] == "unhealthy"
    assert told["reason"].startswith("no engine is up: engine 0 is ")
    fields = {**LONG, "max_new_tokens": 20}
    while (answer := served.http.post("/v1/audio/speech", json=fields)).status_code != 200:  # it waits, if not for long
        assert answer.json()["error"]["code"] == "not_ready"
        assert int(answer.headers["Retry-After"]) >= 1
        time.sleep(0.5)
    assert answer.content == whole
    assert served.status("/health") == 200


@pytest.mark.parametrize("served", [["--codec-device", "next", "--restart", "0.1", "--engine-wait", "60"]], indirect=True)
def test_a_codec_process_dies_and_later_its_server(served: Served, tiny_bytes: bytes) -> None:
    """What HTTP clients see, and what the server tells of both roles."""
    served.wait("/ready", 200)
    (engine,) = served.engines()
    (codec,) = served.engines(engine)
    assert loads_torch(codec)
    assert served.http.get("/version").json()["codec_device"] == "cpu"
    whole, error = served.stream(FRAMES)
    assert (whole[: len(tiny_bytes)], len(whole), error) == (tiny_bytes, FRAMES * 4096, None)
    fields = {name: value for name, value in LONG.items() if name != "stream_format"}
    assert served.http.post("/v1/audio/speech", json={**fields, "max_new_tokens": FRAMES}).content == whole  # complete
    with ThreadPoolExecutor(1) as pool:
        event = threading.Event()
        broken = pool.submit(served.stream, FRAMES, event)
        assert event.wait(LIMIT_S)
        os.kill(codec, signal.SIGKILL)
        body, error = broken.result()
        assert isinstance(error, httpx.RemoteProtocolError)
        assert whole.startswith(body)
        assert len(body) < len(whole)
    served.wait("/health", 503)
    assert re.match("no engine is up: engine 0 is loading, its codec is [a-z]+$", served.http.get("/health").json()["reason"])
    assert 'duetts:codec_up{engine="0"} 0.0' in served.http.get("/metrics").text
    assert served.stream(20) == (whole[: 20 * 4096], None)  # it has waited for the next one
    assert served.engines() == [engine]
    served.wait("/ready", 200)
    numbers = served.http.get("/metrics").text
    assert 'duetts:codec_up{engine="0"} 1.0' in numbers
    assert 'duetts:codec_starts_total{engine="0"} 2.0' in numbers
    (codec,) = served.engines(engine)
    served.process.kill()
    wait_until(lambda: gone(engine) and gone(codec))
