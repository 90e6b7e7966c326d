"""The application on a real Ray cluster of two nodes: the conformance suite, doors, growing and shrinking, and deaths."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as families
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from duetts.voices.objects import FRESH_S
from tests.conformance.cases import LONG_TEXT
from tests.conformance.target import Target
from tests.server.test_events import events_of, joined
from tests.voices.buckets import s3
from tests.waiting import wait_until

from .running import MARK, VARIABLES, Running, cluster, marked

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: make setup-ray", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NATIVE = "fishaudio/s2-pro"
PLACES, LINE = 2, 4  # of a replica
SPEECH = "/v1/audio/speech"
LONG = {"input": LONG_TEXT[:3000], "seed": 1, "max_new_tokens": 60, "voice": "none", "stream_format": "audio"}


@pytest.fixture(scope="module")
def fleet(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One cluster for all tests, as its start takes half a minute."""
    folder = tmp_path_factory.mktemp("ray")
    with cluster(
        model=str(tiny_folder), served_model_name=NATIVE, device="cpu", cpu_threads=1, max_num_seqs=PLACES, max_queue=LINE,
        max_replicas=2, scale_up_after=2, scale_down_after=4, voices_dir=str(folder / "voices"), drain_timeout=60,
        socket_idle=300,
    ) as running:  # fmt: skip
        yield running


def test_the_conformance_suite(fleet: Running) -> None:
    command = [sys.executable, "-m", "tests.conformance", fleet.address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count(" ok ") == 25
    assert "not tried" not in result.stdout


def test_the_first_audio_does_not_wait_for_the_last(fleet: Running) -> None:
    shares: list[float] = []
    while not shares or (min(shares) >= 0.5 and len(shares) < 10):  # a busy machine may be late, not ten times
        began = time.monotonic()
        with fleet.http.stream("POST", SPEECH, json=LONG) as answer:
            assert answer.status_code == 200
            assert answer.headers.get_list("x-request-id") == [answer.headers["x-request-id"]]
            chunks = [time.monotonic() - began for _ in answer.iter_raw()]
        assert len(chunks) > 1
        shares.append(chunks[0] / chunks[-1])
    assert min(shares) < 0.5


def test_events_arrive(fleet: Running) -> None:
    body = {**LONG, "input": "One two three.", "stream_format": "sse", "response_format": "pcm"}
    answer = fleet.http.post(SPEECH, json=body)
    *deltas, done = events_of(answer.text)
    assert done["type"] == "speech.audio.done"
    complete = fleet.http.post(SPEECH, json={**body, "stream_format": "none"} | {"stream_format": "audio"})
    assert joined(deltas) == complete.content


async def converse(socket: ClientConnection) -> bytes:
    """A sentence over a socket."""
    await socket.send(json.dumps({"type": "session.config", "response_format": "pcm", "voice": "none", "seed": 1}))
    await socket.send(json.dumps({"type": "input.text", "text": "One two three."}))
    await socket.send(json.dumps({"type": "input.done"}))
    audio = b""
    while True:
        message = await asyncio.wait_for(socket.recv(), 60)
        if isinstance(message, bytes):
            audio += message
        elif json.loads(message)["type"] == "session.done":
            return audio


def socket_at(fleet: Running, **options: Any) -> connect:
    return connect(fleet.address.replace("http", "ws") + SPEECH + "/stream", proxy=None, **options)


async def test_a_socket_speaks(fleet: Running) -> None:
    async with socket_at(fleet) as socket:
        assert await converse(socket)
        assert await converse(socket)


async def test_a_socket_is_refused_in_its_handshake_with_a_reason(fleet: Running) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with socket_at(fleet, origin="https://elsewhere.example"):
            pass
    assert refused.value.response.status_code == 403
    assert json.loads(refused.value.response.body or b"")["error"]["code"]


def test_a_body_that_is_too_large_is_refused(fleet: Running) -> None:
    def body() -> Iterator[bytes]:
        yield b'{"input": "'
        for _ in range(20):
            yield b"x" * (1 << 20)

    answer = fleet.http.post(SPEECH, content=body(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"]


# -- growing and shrinking -----------------------------------------------------------------------------------------------


class Load:
    """Clients that speak one after another until they are told to end. What was refused in words is not a failure."""

    def __init__(self, address: str, clients: int, expected: bytes) -> None:
        self._address, self._expected = address, expected
        self.spoken = self.refused = 0
        self.failures: list[str] = []
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._speak) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _speak(self) -> None:
        with httpx.Client(base_url=self._address, timeout=120, trust_env=False) as http:
            while not self._end.is_set():
                try:
                    self._take(http.post(SPEECH, json=LONG))
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))

    def _take(self, answer: httpx.Response) -> None:
        if answer.status_code == 200:
            self.spoken += 1
            if answer.content != self._expected:
                self.failures.append(f"{len(answer.content)} bytes, not {len(self._expected)}")
        elif answer.status_code in (429, 503) and "retry-after" in answer.headers:
            self.refused += 1
            self._end.wait(0.5)
        else:
            self.failures.append(f"{answer.status_code}: {answer.text[:200]}")

    def end(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


def frames_of(fleet: Running) -> dict[str, float]:
    """What each replica has spoken."""
    told = [sample for family in families(fleet.http.get("/metrics").text) for sample in family.samples]
    return {one.labels["replica"]: one.value for one in told if one.name == "duetts:frames_generated_total"}


def test_it_grows_under_load_and_shrinks_after_it(fleet: Running) -> None:
    """Every stream, before, while and after replicas come and go, has the bytes that it should have."""
    fleet.until(1, 60)
    expected = fleet.http.post(SPEECH, json=LONG).content
    crowd = Load(fleet.address, 10, expected)
    try:
        grown = fleet.until(2, 90)
        wait_until(lambda: sum(count > 60 for count in frames_of(fleet).values()) == 2)  # both speak, wherever the proxy is
    finally:
        crowd.end()
    few = Load(fleet.address, 1, expected)
    try:
        shrunk = fleet.until(1, 90)
        time.sleep(3)
    finally:
        few.end()
    assert crowd.failures == few.failures == []
    assert crowd.spoken > 4
    assert few.spoken > 0
    print(f"to 2 in {grown:.1f} s, to 1 in {shrunk:.1f} s; {crowd.spoken} and {few.spoken} spoken, {crowd.refused} refused")


def test_what_is_known_at_one_replica_is_known_at_both(fleet: Running) -> None:
    """Two replicas: numbers, a speech by its id, and a voice."""
    expected = fleet.http.post(SPEECH, json=LONG).content
    crowd = Load(fleet.address, 8, expected)
    few = Load(fleet.address, 3, expected)  # enough for two replicas, and a place is left
    try:
        fleet.until(2, 90)
        crowd.end()
        ask_all_around(fleet)
        assert len(fleet.replicas()) == 2
    finally:
        crowd.end()
        few.end()
    assert crowd.failures == few.failures == []


def ask_all_around(fleet: Running) -> None:
    target = Target(fleet.http, NATIVE)
    spoken = target.speak(input="One two three.", max_new_tokens=20)
    for _ in range(8):  # whichever replica is asked
        outcome = fleet.http.get(f"{SPEECH}/{spoken.headers['x-speech-id']}")
        assert outcome.status_code == 200, outcome.text
        assert outcome.json()["finish_reason"] == spoken.headers["x-finish-reason"]
    known, number = spoken.headers["x-speech-id"], "0" * 32
    assert {known.split("-")[1]} < fleet.replicas()  # the id names the replica
    for unknown in (f"speech-{number}", f"{known[:-32]}{number}", f"speech-elsewhere-{number}"):
        assert {fleet.http.get(f"{SPEECH}/{unknown}").status_code for _ in range(4)} == {404}
    with target.voice("carol"):
        for _ in range(6):
            target.speak(input="Hi.", voice="carol", max_new_tokens=20)
    for _ in range(6):
        assert target.post({"input": "Hi.", "voice": "carol"}).status_code == 400


async def test_idle_sockets_do_not_hold_up_a_replica_that_goes(fleet: Running) -> None:
    """Sockets that speak nothing at both replicas: those of the one that goes are closed long before it must go."""
    await asyncio.to_thread(fleet.only_engine)
    expected = (await asyncio.to_thread(fleet.http.post, SPEECH, json=LONG)).content
    crowd, few = Load(fleet.address, 8, expected), Load(fleet.address, 3, expected)
    async with AsyncExitStack() as stack:
        try:
            await asyncio.to_thread(fleet.until, 2, 90)
            await asyncio.to_thread(crowd.end)
            sockets = [await stack.enter_async_context(socket_at(fleet)) for _ in range(8)]
            for socket in sockets:
                await converse(socket)
        finally:
            await asyncio.to_thread(crowd.end)
            await asyncio.to_thread(few.end)
        await asyncio.to_thread(fleet.until, 1, 90)
        began = time.monotonic()
        await asyncio.to_thread(fleet.only_engine)
        gone_s = time.monotonic() - began
        closed = [socket for socket in sockets if socket.close_code is not None]
        assert {socket.close_code for socket in closed} == {1001}
        left = [socket for socket in sockets if socket.close_code is None]
        assert left
        for socket in left:
            assert await converse(socket)
    print(f"{len(closed)} sockets closed, {len(left)} went on; the replica was gone after {gone_s:.0f} s")
    assert gone_s < 40  # of the 60 that it has
    assert crowd.failures == few.failures == []


def test_an_engine_that_dies_is_back(fleet: Running) -> None:
    engine = fleet.only_engine()
    os.kill(engine, signal.SIGKILL)
    _speaks_again(fleet)
    assert fleet.processes("duetts.engine.process") != [engine]


def test_a_replica_that_dies_is_replaced_and_its_stream_is_visibly_cut(fleet: Running) -> None:
    engine = fleet.only_engine()
    with fleet.http.stream("POST", SPEECH, json={**LONG, "input": LONG_TEXT}) as answer:
        parts = answer.iter_raw()
        next(parts)
        for replica in fleet.processes("ray::ServeReplica"):
            os.kill(replica, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(parts)
    _speaks_again(fleet)
    assert engine not in fleet.processes("duetts.engine.process")


def _speaks_again(fleet: Running) -> None:
    """Until then only answers that say when to come back, or the proxy's own for a replica that is gone."""
    body: dict[str, Any] = {"input": "Hi.", "seed": 1, "max_new_tokens": 20}
    deadline = time.monotonic() + 90
    while (answer := fleet.http.post(SPEECH, json=body)).status_code != 200:
        assert answer.status_code in (500, 503), answer.text
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.5)


def test_voices_in_an_object_store_are_those_of_all_replicas(tiny_folder: Path) -> None:
    """Two replicas from the start, and S3 as moto answers it."""
    with (
        s3() as url,
        cluster(
            model=str(tiny_folder), served_model_name=NATIVE, device="cpu", cpu_threads=1, max_num_seqs=PLACES, max_queue=LINE,
            min_replicas=2, voices_dir=url,
        ) as fleet,
    ):  # fmt: skip
        assert len(fleet.replicas()) == 2
        command = [sys.executable, "-m", "tests.conformance", fleet.address, "--case", "21", "--case", "22"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert result.returncode == 0, result.stdout
        target = Target(fleet.http, NATIVE)
        with target.voice("carol"):
            for _ in range(6):
                target.speak(input="Hi.", voice="carol", max_new_tokens=20)
        time.sleep(FRESH_S)
        for _ in range(6):
            assert target.post({"input": "Hi.", "voice": "carol"}).status_code == 400


# -- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_starts_and_ends_it(tiny_folder: Path, tmp_path: Path) -> None:
    """`duetts serve --ray` on this machine alone: flags and variables, and an orderly end in the middle of a stream."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    mark = uuid.uuid4().hex
    variables = {**os.environ, **VARIABLES, MARK: mark, "DUETTS_MAX_NUM_SEQS": "3", "DUETTS_VOICES_DIR": str(tmp_path)}
    flags = ["--ray", "--port", port, "--device", "cpu", "--cpu-threads", "1", "--served-model-name", NATIVE]
    command = [sys.executable, "-m", "duetts", "serve", str(tiny_folder), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables)
    assert process.stderr is not None
    try:
        log = [next(line for line in process.stderr if "by Ray Serve" in line)]
        reader = threading.Thread(target=lambda: log.extend(process.stderr or []))
        reader.start()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            assert "duetts:num_places" in (numbers := http.get("/metrics").text)
            assert next(line for line in numbers.splitlines() if line.startswith("duetts:num_places")).endswith(" 3.0")
            expected = http.post(SPEECH, json=LONG).content
            with http.stream("POST", SPEECH, json=LONG) as answer:
                parts = answer.iter_raw()
                audio = next(parts)
                process.send_signal(signal.SIGTERM)
                assert audio + b"".join(parts) == expected
        assert process.wait(90) == 0, "".join(log[-40:])
        reader.join(30)
        wait_until(lambda: not any(marked(mark)), every_s=0.2)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        for pid, _ in marked(mark):
            os.kill(pid, signal.SIGKILL)
