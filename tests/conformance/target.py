"""A server under test: requests to it, what its errors must look like, and what its numbers say."""

from __future__ import annotations

import asyncio
import base64
import io
import time
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import soxr
from prometheus_client.parser import text_string_to_metric_families as families

from tests.audio.listening import hear
from tests.inputs import clip

SPEECH = "/v1/audio/speech"


class NotHere(Exception):
    """The server cannot show what a case is about."""


def voice_clip(seconds: float, rate: int = 16000) -> bytes:
    """A mono 16-bit WAV of speech, repeated when it is long."""
    samples, own_rate = hear(clip("control_pcm16.wav"))
    speech = soxr.resample(samples, own_rate, rate)
    repeated = np.resize(speech, round(seconds * rate))
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.rint(repeated * 32767).clip(-32768, 32767).astype("<i2").tobytes())
    return target.getvalue()


def data_uri(audio: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(audio).decode()


REF = data_uri(voice_clip(3.0))


@dataclass(frozen=True)
class Target:
    """One server. `patience_s` is how long what must happen "within a second" may take."""

    http: httpx.Client
    model: str
    patience_s: float = 1.0

    def post(self, body: Any, path: str = SPEECH) -> httpx.Response:
        """The answer; one that says when to come back is asked again then, and random weights if they came to nothing."""
        for _ in range(100):
            answer = self.http.post(path, json=body)
            if answer.status_code == 429:
                time.sleep(int(answer.headers["Retry-After"]))
            elif answer.status_code != 500 or '"empty_generation"' not in answer.text or self.is_trained:
                return answer
        raise AssertionError("the server was full, or said nothing, a hundred times")

    def speak(self, **fields: Any) -> httpx.Response:
        """An answer with audio."""
        answer = self.post(fields)
        assert answer.status_code == 200, answer.text
        return answer

    def refused(self, fields: Any, status: int, code: str | None, param: str | None) -> str:
        """Asserts the error that a body must get; its message."""
        return refusal(self.post(fields), status, code, param)

    def together(self, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
        """The answers to requests that are all sent at once, whatever they are."""

        async def send() -> list[httpx.Response]:
            options: dict[str, Any] = {
                "base_url": self.http.base_url, "headers": self.http.headers, "timeout": 600, "trust_env": False,
                "limits": httpx.Limits(max_connections=None),
            }  # fmt: skip
            async with httpx.AsyncClient(**options) as http:
                return await asyncio.gather(*(http.post(SPEECH, json=body) for body in bodies))

        return asyncio.run(send())

    def number(self, name: str, **labels: str) -> float:
        """A number of `/metrics`, of all engines together."""
        found = 0.0
        for family in families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == f"duetts:{name}" and labels.items() <= sample.labels.items():
                    found += sample.value
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + self.patience_s
        while not condition():
            assert time.monotonic() < end, f"it did not come to pass within {self.patience_s:g} s"
            time.sleep(0.01)

    @property
    def is_trained(self) -> bool:
        """Whether its weights know when a sentence ends."""
        return bool(self.http.get("/version").json()["weights"] == "trained")

    @contextmanager
    def voice(self, name: str) -> Iterator[None]:
        """A stored voice of this name, with a transcript, for as long as it is needed."""
        self.http.delete(f"/v1/audio/voices/{name}")
        answer = self.upload(name)
        assert answer.status_code in (200, 201), answer.text
        try:
            yield
        finally:
            self.http.delete(f"/v1/audio/voices/{name}")

    def upload(self, name: str, seconds: float = 3.0, rate: int = 16000, **parts: str) -> httpx.Response:
        form = {"name": name, "consent": "conformance", "ref_text": "Transcript.", **parts}
        file = {"audio_sample": ("clip.wav", voice_clip(seconds, rate), "audio/wav")}
        return self.http.post("/v1/audio/voices", data=form, files=file)


def refusal(answer: httpx.Response, status: int, code: str | None, param: str | None) -> str:
    """Asserts an error of OpenAI's shape; its message."""
    assert answer.status_code == status, f"{answer.status_code}, not {status}: {answer.text[:300]}"
    error = answer.json()["error"]
    assert isinstance(error["message"], str)
    assert code is None or error["code"] == code, error
    assert error["param"] == param, error
    assert answer.headers["X-Request-Id"]
    return str(error["message"])


def seconds_of(audio: bytes, answer: httpx.Response) -> float:
    """How long it lasts, by FFmpeg's decoders; PCM by its own count."""
    if answer.headers["Content-Type"].startswith("audio/pcm"):
        return len(audio) / 2 / int(answer.headers["X-Sample-Rate"])
    samples, rate = hear(audio)
    return len(samples) / rate
