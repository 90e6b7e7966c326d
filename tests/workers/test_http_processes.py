"""`duetts serve --workers` as a person runs it: one server to its clients, whichever process answers and whoever dies."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
        while True:
            answer = self.anew("POST", path, **fields)
            if answer.headers["X-Request-Id"].split("-")[1] == worker:
                return answer

    def number(self, name: str, **labels: str) -> dict[str, float]:
        """A number of each HTTP process, or of each engine."""
        told = [sample for family in families(self.http.get("/metrics").text) for sample in family.samples]
        fit = [one for one in told if one.name == f"duetts:{name}" and labels.items() <= one.labels.items()]
        return {one.labels.get("worker") or one.labels["engine"]: one.value for one in fit}


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


@pytest.mark.parametrize("several", [["--engines", "2", "--restart", "0.1"]], indirect=True)
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
    an_http_process_dies(several, whole)
    it_is_asked_to_stop(several, whole)


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
    cancelled = 0
    while cancelled < 4:  # by chance through either; one that has just ended counts for nothing
        with several.http.stream("POST", "/v1/audio/speech", json={**LONG, "max_new_tokens": 900}) as answer:
            body = answer.iter_raw()  # a generator that nobody holds closes the connection
            next(body)
            cancelled += several.anew("DELETE", f"/v1/audio/speech/{answer.headers['X-Speech-Id']}").json()["cancelled"]
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


def an_http_process_dies(several: Several, whole: bytes) -> None:
    """Its streams break off, their places in the engines are free again, and it is started anew at the same port."""
    began = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        while True:
            stream = pool.submit(several.stream, FRAMES, began)
            assert began.wait(LIMIT_S)
            if several.number("num_requests_open"):
                break
        victim = several.workers()[0]
        os.kill(victim, signal.SIGKILL)
        body, _ = stream.result()
        assert whole.startswith(body)
    wait_until(lambda: len(several.workers()) == 2 and victim not in several.workers())
    wait_until(lambda: several.number("ready") == {"w0": 1.0, "w1": 1.0}, every_s=0.1)
    wait_until(lambda: sum(several.number("num_requests_open").values()) == 0, every_s=0.1)
    assert several.by("w0", "/v1/audio/speech", json=SHORT).content == several.by("w1", "/v1/audio/speech", json=SHORT).content
    assert any("ended with code -9; it is started again" in line for line in several.log)


def it_is_asked_to_stop(several: Several, whole: bytes) -> None:
    """What is open is finished, also when all of its processes are asked."""
    children = several.workers() + several.engines()

    def stop() -> None:
        for pid in (several.process.pid, *children):  # as a service manager sends it
            os.kill(pid, signal.SIGTERM)

    assert spoken_meanwhile(several, 4, stop) == [(whole, None)] * 4
    assert several.process.wait(LIMIT_S) == 0
    wait_until(lambda: all(gone(pid) for pid in children))


def spoken_meanwhile(several: Several, count: int, event: Any, frames: int = FRAMES) -> list[tuple[bytes, Exception | None]]:
    """So many streams, and what happens when all have begun."""
    began = [threading.Event() for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        streams = [pool.submit(several.stream, frames, each) for each in began]
        assert all(each.wait(LIMIT_S) for each in began)
        event()
        return [stream.result() for stream in streams]


@pytest.mark.parametrize("ending", ["hurried", "killed"])
def test_the_end_of_the_keeper_is_the_end_of_all(several: Several, ending: str) -> None:
    several.wait("/ready", 200)
    children = several.workers() + several.engines()
    assert len(children) == 3

    def end() -> None:
        several.process.send_signal(signal.SIGKILL if ending == "killed" else signal.SIGTERM)
        if ending == "hurried":
            several.wait("/ready", 503)
            several.process.send_signal(signal.SIGINT)

    ((body, error),) = spoken_meanwhile(several, 1, end, 900)
    assert isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
    assert 0 < len(body) < 900 * 4096
    assert several.process.wait(LIMIT_S) == {"hurried": 1, "killed": -9}[ending]
    wait_until(lambda: all(gone(pid) for pid in children))


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
