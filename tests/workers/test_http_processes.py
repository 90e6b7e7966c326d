"""`duetts serve --workers` as a person runs it: one server to its clients, whichever process answers and whoever dies."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from tests.engine.test_process_http import FRAMES, LONG, Served, loads_torch
from tests.engine.test_remote import gone
from tests.inputs import REF_TEXT, clip
from tests.waiting import LIMIT_S, wait_until

SHORT = {**LONG, "max_new_tokens": 3}


class Several(Served):
    """A server of several HTTP processes. Its temporary folder is its own, so that what it leaves behind is seen."""

    def __init__(self, folder: Path, temporary: Path, *options: str) -> None:
        self.temporary = temporary
        super().__init__(folder, *options, TMPDIR=str(temporary))

    def workers(self) -> list[int]:
        return self.children("duetts.workers.process")

    def anew(self, method: str, path: str, **fields: Any) -> httpx.Response:
        """By a new connection, which the kernel gives to either process."""
        with httpx.Client(base_url=self.http.base_url, timeout=60, trust_env=False, verify=False) as http:
            return http.request(method, path, **fields)

    def by(self, worker: str, path: str, **fields: Any) -> httpx.Response:
        """A POST that this process has answered."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            answer = self.anew("POST", path, **fields)
            assert answer.status_code == 200, answer.text
            if answer.headers["X-Request-Id"].split("-")[1] == worker:
                return answer
        raise AssertionError(f"{worker} has answered nothing within {LIMIT_S} s")

    def num_listeners(self) -> int:
        """Sockets that listen at its port, whoever has them."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(line[1].endswith(f":{self.http.base_url.port:04X}") and line[3] == "0A" for line in lines)

    def number(self, name: str, **labels: str) -> dict[str, float]:
        """A number of each HTTP process, or of each engine."""
        told = [sample for family in families(self.http.get("/metrics").text) for sample in family.samples]
        fit = [one for one in told if one.name == f"duetts:{name}" and labels.items() <= one.labels.items()]
        return {one.labels.get("worker") or one.labels["engine"]: one.value for one in fit}


class Held:
    """A stream of which the client has read the beginning and does not read on: of its 1.6 MB about a quarter fits on the way,
    so that it is open until the `rest` is read, however fast the server is or late the test."""

    def __init__(self, several: Several) -> None:
        self._http = http.client.HTTPConnection(several.http.base_url.host, several.http.base_url.port or 0, timeout=60)
        self._http.sock = socket.socket()
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1460)  # or the server's end takes megabytes
        self._http.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
        try:
            self._http.sock.settimeout(60)
            self._http.sock.connect((self._http.host, self._http.port))
            fields = json.dumps({**LONG, "max_new_tokens": FRAMES})
            self._http.request("POST", "/v1/audio/speech", fields, {"Content-Type": "application/json"})
            self._answer = self._http.getresponse()
            assert self._answer.status == 200, self._answer.read()
            self.speech_id = self._answer.headers["X-Speech-Id"]
            self.worker = self.speech_id.split("-")[1]
            self._body = self._answer.read1(4096)
            assert self._body
        except BaseException:
            self.close()
            raise

    def rest(self) -> tuple[bytes, Exception | None]:
        """All of the body, and how it broke off if it did."""
        try:
            while part := self._answer.read1(1 << 16):
                self._body += part
        except (http.client.IncompleteRead, ConnectionError) as error:
            return self._body, error
        return self._body, None

    def close(self) -> None:
        self._http.close()


@pytest.fixture
def several(endless_folder: Path, request: pytest.FixtureRequest) -> Iterator[Several]:
    temporary = Path(tempfile.mkdtemp(prefix="w-"))  # short, for paths of sockets
    running = Several(endless_folder, temporary, "--workers", "2", *getattr(request, "param", ()))
    try:
        yield running
    finally:
        running.close()
        wait_until(lambda: list(temporary.glob("duetts-*")) == [])
        shutil.rmtree(temporary)


@pytest.mark.parametrize("several", [["--engines", "2", "--restart", "0.1", "--drain-timeout", str(LIMIT_S)]], indirect=True)
def test_one_server_to_its_clients_whoever_dies(several: Several) -> None:
    """One server for all of it, as its start costs seconds."""
    assert several.status("/live") == 200  # while it loads
    assert several.http.get("/health").json()["status"] == "starting"
    assert several.http.post("/v1/audio/speech", json=LONG).json()["error"]["code"] == "not_ready"
    wait_until(lambda: any("by 2 HTTP processes" in line for line in several.log))
    workers, engines = several.workers(), several.engines()
    assert (len(workers), len(engines)) == (2, 2)
    assert not any(loads_torch(pid) for pid in (several.process.pid, *workers))
    whole, error = several.stream(FRAMES)
    assert (len(whole), error) == (FRAMES * 4096, None)

    what_one_process_says_the_others_know(several)
    an_engine_dies(several, engines[0], whole)
    pids = an_http_process_dies(several, whole)
    it_is_asked_to_stop(several, whole, pids)


def what_one_process_says_the_others_know(several: Several) -> None:
    """Voices, how a speech ended, its cancellation, and numbers: those of the engines once."""
    form = {"name": "anna", "ref_text": REF_TEXT, "consent": "mine"}
    made = several.http.post("/v1/audio/voices", data=form, files={"audio_sample": ("a.wav", clip("control_pcm16.wav"))})
    assert made.status_code == 201, made.text
    answers = {worker: several.by(worker, "/v1/audio/speech", json={**SHORT, "voice": "anna"}) for worker in ("w1", "w0")}
    assert answers["w0"].content == answers["w1"].content  # they are one server, and one voice
    for answer in answers.values():
        for _ in range(8):  # by chance to either
            told = several.anew("GET", f"/v1/audio/speech/{answer.headers['X-Speech-Id']}").json()
            assert (told["finish_reason"], told["usage"]["output_tokens"]) == ("length", 3)
    unknown = several.http.get(f"/v1/audio/speech/speech-w7-{'0' * 32}")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
    for _ in range(4):  # by chance through either
        with closing(Held(several)) as held:
            assert several.anew("DELETE", f"/v1/audio/speech/{held.speech_id}").json()["cancelled"] is True
            assert held.rest()[1] is not None
    wait_until(lambda: sum(several.number("stream_aborted_total", reason="cancelled").values()) == 4)
    spoken = several.number("speeches_total", door="speech", reason="length")
    assert spoken.keys() == {"w0", "w1"}
    assert sum(spoken.values()) >= 3
    assert several.number("engine_up") == several.number("engine_starts_total") == {"0": 1.0, "1": 1.0}
    wait_until(lambda: sum(several.number("num_requests_open").values()) == 0)


def an_engine_dies(several: Several, engine: int, whole: bytes) -> None:
    """Its streams break off, whichever process has them; the other engine's do not."""
    done = spoken_meanwhile(several, 4, lambda: os.kill(engine, signal.SIGKILL))
    assert {error is None for _, error in done} == {False, True}
    for body, error in done:
        assert body == whole if error is None else whole.startswith(body)
    wait_until(lambda: sorted(several.number("engine_starts_total").values()) == [1, 2])
    wait_until(lambda: several.number("engine_up") == {"0": 1.0, "1": 1.0}, every_s=0.1)
    assert several.stream(20) == (whole[: 20 * 4096], None)


def an_http_process_dies(several: Several, whole: bytes) -> dict[str, int]:
    """Its streams break off and no others do, their places in the engines are free again, and it is started anew. The process
    ids by name, afterwards."""
    victim, other = several.workers()
    with ExitStack() as stack:
        streams: dict[str, Held] = {}
        while len(streams) < 2:  # one by each process, which the kernel chooses
            held = stack.enter_context(closing(Held(several)))
            if streams.setdefault(held.worker, held) is not held:
                held.close()
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: gone(victim))
        done = {name: held.rest() for name, held in streams.items()}
    (died,) = [name for name, (_, error) in done.items() if error is not None]
    (lived,) = done.keys() - {died}
    assert done[lived] == (whole, None)
    assert len(done[died][0]) < len(whole)
    assert whole.startswith(done[died][0])
    wait_until(lambda: len(several.workers()) == 2 and victim not in several.workers())
    wait_until(lambda: several.number("ready") == {"w0": 1.0, "w1": 1.0}, every_s=0.1)
    wait_until(lambda: sum(several.number("num_requests_open").values()) == 0, every_s=0.1)
    assert several.by("w0", "/v1/audio/speech", json=SHORT).content == several.by("w1", "/v1/audio/speech", json=SHORT).content
    assert any("ended with code -9; it is started again" in line for line in several.log)
    (anew,) = {*several.workers()} - {other}
    return {died: anew, lived: other}


def it_is_asked_to_stop(several: Several, whole: bytes, pids: dict[str, int]) -> None:
    """What is open is finished, also when all of its processes are asked; whoever comes meanwhile is told, by either process,
    and also when one of them dies."""
    children = several.workers() + several.engines()
    with closing(Held(several)) as held:
        for pid in (several.process.pid, *children):  # as a service manager sends it
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: several.number("ready") == {"w0": 0.0, "w1": 0.0}, every_s=0.05)
        who_comes_is_told(several)  # by chance by the one that has the stream and by the one that has nothing open
        (idle,) = [pid for name, pid in pids.items() if name != held.worker]
        assert several.num_listeners() == 2
        os.kill(idle, signal.SIGKILL)
        wait_until(lambda: several.num_listeners() == 1)  # or a connection could wait for nobody
        who_comes_is_told(several)
        assert held.rest() == (whole, None)
    assert several.process.wait(LIMIT_S) == 0
    wait_until(lambda: all(gone(pid) for pid in children))


def who_comes_is_told(several: Several) -> None:
    for _ in range(8):
        refused = several.anew("POST", "/v1/audio/speech", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert several.anew("GET", "/live").status_code == 200


def spoken_meanwhile(several: Several, count: int, event: Callable[[], None]) -> list[tuple[bytes, Exception | None]]:
    """So many streams, and what happens when all have begun. Raises what keeps one from beginning."""
    began = [threading.Event() for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        streams = [pool.submit(several.stream, FRAMES, each) for each in began]
        wait_until(lambda: all(each.is_set() or stream.done() for each, stream in zip(began, streams, strict=True)))
        for each, stream in zip(began, streams, strict=True):
            assert each.is_set(), stream.result()
        event()
        return [stream.result() for stream in streams]


@pytest.mark.parametrize(
    ("ending", "several", "code"),
    [
        ("limit", ["--drain-timeout", "0.5"], 0),
        ("hurried", ["--drain-timeout", str(LIMIT_S)], 1),
        ("killed", [], -9),
        ("killed while it drains", ["--drain-timeout", str(LIMIT_S)], -9),
    ],
    indirect=["several"],
)
def test_the_end_of_the_keeper_is_the_end_of_all(several: Several, ending: str, code: int) -> None:
    several.wait("/ready", 200)
    children = several.workers() + several.engines()
    assert len(children) == 3
    with closing(Held(several)) as held:
        if ending != "killed":
            several.process.send_signal(signal.SIGTERM)
        if ending in ("hurried", "killed while it drains"):
            wait_until(lambda: several.number("ready") == {"w0": 0.0, "w1": 0.0}, every_s=0.05)
        if ending != "limit":
            several.process.send_signal(signal.SIGINT if ending == "hurried" else signal.SIGKILL)
        assert several.process.wait(LIMIT_S) == code
        wait_until(lambda: all(gone(pid) for pid in children))
        body, error = held.rest()
    assert error is not None
    assert 0 < len(body) < FRAMES * 4096


@pytest.mark.parametrize("options", [["--default-voice", "nobody"], ["--uds", "/nowhere/at.sock"]])
def test_what_keeps_a_server_from_starting_ends_it(tiny_folder: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "duetts", "serve", str(tiny_folder), "--device", "cpu", "--port", "0", "--workers", "2"]
    run = subprocess.run([*command, *options], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert run.returncode == 2, run.stderr
    assert re.search("voice 'nobody' is not stored|cannot listen at /nowhere", run.stderr)
    assert "Traceback" not in run.stderr


def test_a_unix_socket_is_shared(endless_folder: Path, tmp_path: Path) -> None:
    path, log = tmp_path / "s", tmp_path / "log"
    log.touch()
    command = [sys.executable, "-m", "duetts", "serve", str(endless_folder), "--device", "cpu", "--workers", "2"]
    process = subprocess.Popen([*command, "--uds", str(path), "--log-file", str(log)])
    try:
        wait_until(lambda: "listening at" in log.read_text())
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(base_url="http://duetts", transport=transport, timeout=60) as http:
            wait_until(lambda: http.get("/ready").status_code == 200, every_s=0.1)
            assert len(http.post("/v1/audio/speech", json=SHORT).content) == 3 * 4096
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
    assert re.search("worker [01]: speech-w[01]-.*POST /v1/audio/speech 200", log.read_text())  # all write to one file
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("several", [["--max-queue", "100"]], indirect=True)
def test_the_conformance_suite(several: Several) -> None:
    several.wait("/ready", 200)
    command = [sys.executable, "-m", "tests.conformance", str(several.http.base_url)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
