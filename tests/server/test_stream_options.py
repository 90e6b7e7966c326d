"""What the operator decides of streams: the sizes in a WAV's header, and whether the status waits for audio."""

from __future__ import annotations

import base64
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from duetts.config import Limits, RequestsConfig, ServerConfig
from duetts.errors import EngineFailure, Overloaded
from duetts.server.app import create_app
from tests.audio.listening import hear
from tests.server.conftest import NATIVE, Door, error_of
from tests.server.sine import FRAME, Knobs, SineService
from tests.server.test_auth import serving
from tests.server.test_events import events_of
from tests.waiting import LIMIT_S


@contextmanager
def told(**options: Any) -> Iterator[Door]:
    service = SineService(Limits())
    app = create_app(service, ServerConfig((NATIVE,), requests=RequestsConfig(**options)))
    with serving(app) as http:
        yield Door(service, http.base_url.port or 0, http, app.state.outcomes)


# -- sizes of a WAV ------------------------------------------------------------------------------------------------------


def sizes(header: bytes) -> tuple[int, int]:
    assert (header[:4], header[36:40]) == (b"RIFF", b"data")
    return struct.unpack_from("<I", header, 4)[0], struct.unpack_from("<I", header, 40)[0]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [("max", (0xFFFFFFFF, 0xFFFFFFFF)), ("2g", (0x7FFFFFFF, 0x7FFFFFFF - 36)), ("zero", (0, 0))],
)
def test_what_a_streams_header_states(stated: str, expected: tuple[int, int]) -> None:
    with told(wav_stream_size=stated) as door:
        stream = door.speak(stream_format="audio", response_format="wav", seed=1).content
        assert sizes(stream) == expected
        fish = door.http.post("/v1/tts", json={"text": "Hello there.", "format": "wav", "seed": 1}).content
        assert fish == stream
        events = events_of(door.speak(stream_format="sse", response_format="wav", seed=1).text)
        assert b"".join(base64.b64decode(one["audio"]) for one in events if "audio" in one) == stream
        address = f"ws://127.0.0.1:{door.port}/v1/audio/speech/stream"
        with connect(address, proxy=None) as talking:
            talking.send(json.dumps({"type": "session.config", "response_format": "wav", "seed": 1}))
            talking.send(json.dumps({"type": "input.text", "text": "Hello there."}))
            talking.send(json.dumps({"type": "input.done"}))
            heard = b""
            while not isinstance(message := talking.recv(LIMIT_S), str) or json.loads(message)["type"] != "session.done":
                heard += message if isinstance(message, bytes) else b""
            assert heard == stream
        complete = door.speak(response_format="wav", seed=1).content
        assert sizes(complete) == (len(complete) - 8, len(complete) - 44)
        assert complete[44:] == stream[44:]
        if stated != "zero":  # which some players, and FFmpeg, take at its word
            assert len(hear(stream)[0]) == 3 * FRAME


# -- the status ----------------------------------------------------------------------------------------------------------


def head_and_rest(door: Door, stream_format: str) -> tuple[bytes, int, bytes]:
    """The head of an answer, how many bytes there were when it came, and all that followed. Audio is made when it is here."""
    door.service.knobs = knobs = Knobs(held_at=0)
    body = json.dumps({"input": "Hello.", "response_format": "pcm", "stream_format": stream_format}).encode()
    with socket.create_connection(("127.0.0.1", door.port), timeout=LIMIT_S) as line:
        line.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
        received = b""
        while b"\r\n\r\n" not in received:
            received += line.recv(65536)
        head, _, rest = received.partition(b"\r\n\r\n")
        early = len(rest)
        knobs.held_at = -1
        while data := line.recv(65536):
            rest += data
    return head, early, rest


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_an_early_status_comes_before_audio(stream_format: str) -> None:
    with told(early_headers=True) as door:
        head, early, rest = head_and_rest(door, stream_format)
        assert head.startswith(b"HTTP/1.1 200")
        for name in (b"x-speech-id", b"x-seed", b"x-voice-resolved", b"x-sample-rate"):
            assert name in head.lower()
        assert b"server-timing" not in head.lower()
        assert early == 0
        assert rest.rstrip().endswith(b"0")  # the chunk of length 0: a clean end


@pytest.mark.parametrize("error", [EngineFailure("lost"), Overloaded("full", retry_after_s=3)])
def test_what_then_fails_before_the_first_audio(error: Exception) -> None:
    with told(early_headers=True) as door:
        door.service.knobs = Knobs(error=error, error_at=0)
        with pytest.raises(httpx.RemoteProtocolError):
            door.speak(stream_format="audio")
        answer = door.speak(stream_format="sse")
        assert answer.status_code == 200
        events = events_of(answer.text)
        assert [event["type"] for event in events] == ["error"]
        assert events[0]["partial_audio"] is False
        assert door.speak().status_code in (429, 500)  # a complete answer has its status


def test_what_can_be_checked_has_a_status_all_the_same() -> None:
    with told(early_headers=True) as door:
        error_of(door.speak("Hi.", voice="nobody", stream_format="audio"), 400, "unknown_voice", "voice")
        door.service.knobs = Knobs(error=Overloaded("full", retry_after_s=3), error_at=-1)
        error_of(door.speak(stream_format="sse"), 429, "queue_full", None)


def test_the_status_waits_for_audio_unless_that_is_said() -> None:
    with told() as door:
        door.service.knobs = Knobs(error=EngineFailure("lost"), error_at=0)
        error_of(door.speak(stream_format="audio"), 500, "internal_error", None)


def test_early_or_late_the_bytes_are_the_same() -> None:
    answers = []
    for early in (False, True):
        with told(early_headers=early) as door:
            answers.append(door.speak(stream_format="audio", response_format="mp3", seed=3).content)
    assert answers[0] == answers[1]
