"""What voice agents send, replayed to the byte and read as they read it.

Recorded from livekit-plugins-openai 1.8.9 and pipecat-ai 1.14.0 with their defaults, both over openai 3.57.0, except for the
headers that name a machine. They are not installed here: with what they need they are 76 and 52 packages.
"""

from __future__ import annotations

import base64
import io
import json

import av
import httpx
import pytest

from tests.audio.listening import format_without_signature
from tests.server.real import Served

HEADERS = {
    "authorization": "Bearer none", "accept": "application/octet-stream", "content-type": "application/json",
    "accept-encoding": "gzip, deflate", "user-agent": "AsyncOpenAI/Python 3.57.0", "x-stainless-lang": "python",
    "x-stainless-package-version": "3.57.0", "x-stainless-async": "async:asyncio", "x-stainless-raw-response": "stream",
    "x-stainless-retry-count": "0", "x-stainless-read-timeout": "30",
}  # fmt: skip
LIVEKIT = (
    b'{"model":"gpt-4o-mini-tts","input":"Hello, how are you?","voice":"ash","response_format":"mp3","speed":1.0,'
    b'"stream_format":"sse"}'
)
PIPECAT = b'{"model":"gpt-4o-mini-tts","input":"Hello, how are you?","voice":"alloy","response_format":"pcm"}'


def test_livekit(tiny_served: Served) -> None:
    """It reads lines that begin with `data: `, takes `delta` or `audio`, and decodes MP3 to 24,000 Hz."""
    rate = 24000
    audio, usage = b"", {}
    with tiny_served.http.stream("POST", "/v1/audio/speech", content=LIVEKIT, headers=HEADERS) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-request-id"]
        assert answer.headers["content-type"].split(";")[0].strip().lower() == "text/event-stream"
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "speech.audio.delta":
                audio += base64.b64decode(event.get("delta", "") or event.get("audio", ""))
            elif event["type"] == "speech.audio.done":
                usage = event["usage"]
    assert usage["input_tokens"] > 0
    assert usage["output_tokens"] > 0
    seconds = usage["output_tokens"] * 2048 / 44100
    resampler = av.AudioResampler("s16", "mono", rate)
    with av.open(io.BytesIO(audio), format=format_without_signature(audio)) as file:
        frames = [part for frame in file.decode(audio=0) for part in resampler.resample(frame)]
    assert sum(frame.samples for frame in frames) / rate == pytest.approx(seconds, abs=0.06)


def test_pipecat(tiny_served: Served) -> None:
    """It takes the bytes for samples at 24,000 Hz as they come."""
    with tiny_served.http.stream("POST", "/v1/audio/speech", content=PIPECAT, headers=HEADERS) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-sample-rate"] == "24000"
        assert answer.headers["x-voice-resolved"]
        audio = b"".join(answer.iter_bytes(1024))
    seconds = int(answer.headers["x-output-tokens"]) * 2048 / 44100
    assert len(audio) / 2 / 24000 == pytest.approx(seconds, abs=1e-3)


def test_they_are_told_what_is_wrong(tiny_served: Served) -> None:
    """Both show the status and the message of what fails."""
    for sent in (LIVEKIT, PIPECAT):
        body = {**json.loads(sent), "input": "..."}
        answer = httpx.post(f"{tiny_served.base}/v1/audio/speech", json=body, headers=HEADERS, trust_env=False)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
