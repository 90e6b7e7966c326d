"""A server of duetts as a user starts it, and what is asked of it over HTTP."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

READY_S = 600.0  # of a busy machine
ANSWER_S = 600.0  # a long text on a busy machine
LISTENING = re.compile(r"listening on (http\S+)\n")


@contextmanager
def served(model: Path | None, *options: str) -> Iterator[str]:
    """The address of `duetts serve` on a free port, with voices of its own. It ends with the block."""
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        command = [sys.executable, "-m", "duetts", "serve", *([str(model)] if model else []), "--port", "0"]
        with log.open("wb") as file:
            process = subprocess.Popen([*command, "--voices-dir", f"{name}/voices", *options], stderr=file)
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            process.wait(60)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Waits until the server says where it listens."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        said = log.read_text(encoding="utf-8", errors="replace")
        if found := LISTENING.search(said):
            return found[1]
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode}:\n{said[-2000:]}")
        time.sleep(0.1)
    raise SystemExit(f"the server did not listen within {READY_S:.0f} s")


class Server:
    """Requests to a running server. Raises `httpx.HTTPStatusError` for refusals."""

    def __init__(self, address: str) -> None:
        self.http = httpx.Client(base_url=address, timeout=ANSWER_S, trust_env=False)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *left: object) -> None:
        self.http.close()

    def wait(self) -> None:
        """Until it would take a request."""
        deadline = time.monotonic() + READY_S
        while self.http.get("/ready").status_code != 200:
            if time.monotonic() > deadline:
                raise SystemExit(f"the server was not ready within {READY_S:.0f} s")
            time.sleep(0.2)

    def about(self) -> dict[str, Any]:
        found: dict[str, Any] = self._answer("GET", "/version").json()
        return found

    def presets(self) -> list[str]:
        """Names of the voices that came with the model."""
        voices = self._answer("GET", "/v1/audio/voices").json()["data"]
        return [voice["name"] for voice in voices if voice["origin"] == "preset"]

    def speak(self, text: str, seed: int, **fields: Any) -> tuple[bytes, dict[str, Any]]:
        """A complete file, WAV unless other fields say otherwise, and how it came about."""
        answer = self._answer("POST", "/v1/audio/speech", json={"input": text, "seed": seed, **fields})
        headers = answer.headers
        return answer.content, {
            "seed": seed,
            "finish": headers["X-Finish-Reason"],
            "frames": int(headers["X-Output-Tokens"]),
            "duration_s": float(headers["X-Audio-Duration"]),
            "voice": headers.get("X-Voice-Resolved", ""),
            "retried": headers.get("X-Pieces-Retried", ""),
            "suspect": headers.get("X-Pieces-Suspect", ""),
        }

    def stream(self, text: str, seed: int) -> tuple[float, float]:
        """Seconds until the first audio of a streamed answer, and seconds of work for a second of audio."""
        body = {"input": text, "seed": seed, "response_format": "pcm", "stream_format": "audio"}
        started, first_s, size = time.monotonic(), 0.0, 0
        with self.http.stream("POST", "/v1/audio/speech", json=body) as answer:
            answer.raise_for_status()
            rate = int(answer.headers["X-Sample-Rate"])
            for data in answer.iter_raw():
                first_s = first_s or time.monotonic() - started
                size += len(data)
        return first_s, (time.monotonic() - started) / (size / 2 / rate)

    def round_trip(self, clip: bytes) -> bytes:
        """A clip through the codec and back, as a WAV file."""
        encoded = {"audios": [base64.b64encode(clip).decode()]}
        tokens = self._answer("POST", "/v1/vqgan/encode", json=encoded).json()["tokens"]
        found = self._answer("POST", "/v1/vqgan/decode?dtype=wav", json={"tokens": tokens}).json()["audios"][0]
        return base64.b64decode(found)

    def _answer(self, method: str, path: str, **content: Any) -> httpx.Response:
        answer = self.http.request(method, path, headers={"Accept": "application/json"}, **content)
        if answer.is_error:
            raise SystemExit(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer
