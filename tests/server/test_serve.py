"""`duetts serve` as operators run it: keys, numbers and logs of a whole server, and its other ways to be reached."""

import asyncio
import base64
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.inputs import clip
from tests.server.test_metrics import Numbers

# What users write and operators keep to themselves. None of it may be in a log.
TEXT, TRANSCRIPT, NAME, PATH = "The quokka said hello.", "A wombat was here.", "numbat", "bilby"
KEY, FILE_KEY, WRONG_KEY = "dingo-key-1", "dingo-key-2", "dingo-key-3"
SECRETS = ("quokka", "wombat", "numbat", "bilby", "dingo")


@dataclass
class Running:
    """A server process, its log so far, and where it said that it listens."""

    process: "subprocess.Popen[str]"
    log: list[str] = field(default_factory=list)
    address: str = ""

    def until(self, http: httpx.Client, path: str, status: int, seconds: float = 200) -> httpx.Response:
        deadline = time.monotonic() + seconds
        while (answer := http.get(path)).status_code != status:
            assert time.monotonic() < deadline, answer.text + "".join(self.log)
            time.sleep(0.1)
        return answer


@contextmanager
def running(*options: str, **environment: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "duetts", "serve", "--device", "cpu", "--cpu-threads", "1", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stderr is not None
    server = Running(process)
    try:
        while not server.address:
            server.log.append(process.stderr.readline())
            assert server.log[-1], "".join(server.log)
            found = re.search(r"listening (?:on|at) (\S+)", server.log[-1])
            server.address = found[1] if found else ""
        reader = threading.Thread(target=lambda: server.log.extend(process.stderr or []))
        reader.start()
        yield server
        process.terminate()
        assert process.wait(200) == 0, "".join(server.log)
        reader.join()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_keys_numbers_and_logs_of_a_whole_server(tiny_folder: Path, tmp_path: Path) -> None:
    """One server for all of it, as its start costs seconds."""
    (tmp_path / "keys").write_text(f"{FILE_KEY}\n")
    (tmp_path / "duetts.yaml").write_text(
        f"model: {tiny_folder}\nengine: {{max_num_seqs: 2, max_queue: 1}}\naccess: {{api_key_file: {tmp_path / 'keys'}}}\n"
    )
    options = ("--config", str(tmp_path / "duetts.yaml"), "--port", "0", "--log-level", "debug", "--omni")
    # A cache of its own: there other tests have left codes of the same clip.
    folders = {"DUETTS_VOICES_DIR": str(tmp_path / "voices"), "DUETTS_CACHE_DIR": str(tmp_path / "cache")}
    environment = {"DUETTS_API_KEY": KEY, "DUETTS_PROT": "1", **folders}
    with (
        running(*options, **environment) as server,
        httpx.Client(base_url=server.address, timeout=60, trust_env=False) as http,
    ):
        talk_to(http, server)
    log = "".join(server.log)
    for secret in SECRETS:
        assert secret not in log.lower(), [line for line in server.log if secret in line.lower()]
    assert "DUETTS_PROT is unknown and has no effect; did you mean DUETTS_PORT?" in log
    assert "engines: 1, with 2 places and a line of 1 each" in log
    assert "duetts is Apache-2.0. The weights of" in log
    assert re.search(r"the engine has spoken [0-9]+ frames", log)
    assert re.search(r"speech-\w+: POST /v1/audio/speech 200 (stop|length) [0-9.]+ s", log)
    assert re.search(r"speech-\w+: SOCKET \(no route\) 401 invalid_api_key", log)
    assert "without completing handshake" not in log


def talk_to(http: httpx.Client, server: Running) -> None:
    headers = {"Authorization": f"Bearer {FILE_KEY}"}
    assert http.get("/live").status_code == 200
    assert http.get("/metrics").status_code == 401
    assert http.get("/metrics", headers=headers).status_code == 200
    server.until(http, "/ready", 200)
    loud = {"input": TEXT, "voice": "none", "seed": 1, "max_new_tokens": 20}
    assert http.post("/v1/audio/speech", json=loud).status_code == 401
    assert http.post("/v1/audio/speech", json=loud, headers={"Authorization": f"Bearer {WRONG_KEY}"}).status_code == 401
    for extra in ({}, {"stream_format": "sse"}, {"voice": NAME}, {NAME: TEXT}, {"ref_text": TRANSCRIPT}, {"speed": 99}):
        http.post("/v1/audio/speech", json={**loud, **extra}, headers=headers)
    sample = base64.b64encode(clip("control_pcm16.wav")).decode()
    voice = {"name": NAME, "ref_text": TRANSCRIPT, "consent": TEXT, "audio_sample": sample}
    assert http.post("/v1/audio/voices", json=voice, headers=headers).status_code == 201
    assert http.post("/v1/audio/voices", json={**voice, "ref_text": "<|im_end|>" + TRANSCRIPT}, headers=headers).is_error
    assert http.post("/v1/audio/speech", json={**loud, "voice": NAME}, headers=headers).status_code == 200
    assert (
        http.post("/v1/tts", json={"text": TEXT, "reference_id": NAME, "max_new_tokens": 20}, headers=headers).status_code
        == 200
    )
    assert http.get(f"/v1/audio/voices/{NAME}", headers=headers).status_code == 200
    for path in (f"/{PATH}", f"/v1/audio/voices/{PATH}?{NAME}={TEXT}", f"/v1/audio/speech/{PATH}"):
        http.get(path, headers={**headers, "X-Request-Id": PATH, "User-Agent": PATH, "Cookie": PATH})
    asyncio.run(say_on_a_socket(server.address.replace("http", "ws")))
    told = Numbers(http.get("/metrics", headers=headers).text)
    assert told.get("num_places") == 2
    assert told.get("ready") == 1
    assert told.get("engine_up", engine="0") == 1
    assert told.get("engine_starts_total", engine="0") == 1
    assert told.get("engine_memory_bytes", engine="0") > 1e8
    assert told.get("reference_cache_miss_total") >= 1
    assert told.get("requests_total", door="speech", status="401", reason="invalid_api_key") == 2
    shown = http.get("/version").json()
    assert (shown["weights"], shown["device"]) == ("untrained", "cpu")


async def say_on_a_socket(address: str) -> None:
    path = "/v1/audio/speech/stream"
    for query, extra in (("", {}), (f"?api_key={WRONG_KEY}", {}), ("", {"Authorization": f"Bearer {WRONG_KEY}"})):
        with pytest.raises(InvalidStatus) as raised:
            await connect(address + path + query, additional_headers=extra)
        assert raised.value.response.status_code == 401
    async with connect(f"{address}{path}?api_key={KEY}&{NAME}={TEXT[:10].strip()}".replace(" ", "+")) as socket:
        await socket.send(json.dumps({"type": "session.config", "voice": "none", "max_new_tokens": 20, NAME: TEXT}))
        await socket.send(json.dumps({"type": "input.text", "text": TEXT}))
        await socket.send(json.dumps({"type": "input.done"}))
        while "session.done" not in str(await socket.recv()):
            pass


def kept_alive(path: Path) -> None:
    """A connection answers after a rest that is longer than many proxies and clients make."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(60)
        line.connect(str(path))
        for rest_s in (0, 8):
            time.sleep(rest_s)
            line.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while b"alive" not in answer:
                answer += (part := line.recv(4096))
                assert part, "it was closed"


@pytest.mark.slow
def test_a_unix_socket(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "duetts.sock"
    with running(str(tiny_folder), "--uds", str(path)) as server:
        assert server.address == str(path)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://duetts") as http:
            server.until(http, "/ready", 200)
            kept_alive(path)
            second = subprocess.run(
                [sys.executable, "-m", "duetts", "serve", str(tiny_folder), "--uds", str(path)], capture_output=True, text=True
            )
            assert (second.returncode, "a server listens there" in second.stderr) == (2, True)
            assert http.get("/live").status_code == 200
    assert not path.exists()


@pytest.mark.slow
def test_tls(tiny_folder: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    options = (str(tiny_folder), "--port", "0", "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    trusting = ssl.create_default_context(cafile=str(certificate))
    with running(*options) as server, httpx.Client(base_url=server.address, verify=trusting, trust_env=False) as http:
        assert server.address.startswith("https://")
        assert http.get("/live").status_code == 200
    with running(*options, "--ssl-ca-certs", str(certificate)) as server:
        with httpx.Client(base_url=server.address, verify=trusting, trust_env=False) as http, pytest.raises(httpx.HTTPError):
            http.get("/live")
        trusting.load_cert_chain(certificate, key)
        with httpx.Client(base_url=server.address, verify=trusting, trust_env=False) as http:
            assert http.get("/live").status_code == 200
