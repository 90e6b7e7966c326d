"""Text in, audio out over a socket: order, sentences, cancelling, faults, limits, and what is left afterwards."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvicorn
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from duetts.audio.formats import FORMATS
from duetts.config import Limits, ServerConfig
from duetts.errors import EngineFailure, Overloaded
from duetts.server import frames
from duetts.server.app import create_app
from duetts.serving import KEEP_ALIVE_S
from tests.audio.listening import hear
from tests.inputs import REF_TEXT, clip
from tests.server.conftest import LIMITS, NATIVE, Door
from tests.server.sine import FRAME, RATE, Knobs, SineService, hum
from tests.server.test_outcomes import outcome_of
from tests.waiting import LIMIT_S, until

SENTENCE = 2 * 3 * FRAME  # bytes of PCM
HURRIED = replace(LIMITS, socket_first_s=1.0, socket_idle_s=1.5, live_idle_s=1.5)


class Talk:
    """A client that keeps what it has received."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def hear(self) -> dict[str, Any] | bytes:
        raw = await asyncio.wait_for(self.socket.recv(), LIMIT_S)
        return raw if isinstance(raw, bytes) else dict(json.loads(raw))

    async def told(self, kind: str) -> dict[str, Any]:
        """The next message, which is of that kind."""
        message = await self.hear()
        assert isinstance(message, dict), f"{len(message)} bytes, not {kind}"
        assert message["type"] == kind, message
        return message

    async def until(self, kind: str) -> list[dict[str, Any] | bytes]:
        """Everything up to the next message of that kind, which is the last of them."""
        heard = [await self.hear()]
        while not (isinstance(heard[-1], dict) and heard[-1]["type"] == kind):
            heard.append(await self.hear())
        return heard

    async def closed(self) -> tuple[int, str]:
        """Code and reason with which the server closes now."""
        with suppress(ConnectionClosed):
            while await self.hear() is not None:
                pass
        return self.socket.close_code or 0, self.socket.close_reason or ""


@asynccontextmanager
async def talk(door: Door, **config: Any) -> AsyncIterator[Talk]:
    """A configured session."""
    async with connect(f"ws://127.0.0.1:{door.port}/v1/audio/speech/stream", proxy=None, max_size=None) as socket:
        client = Talk(socket)
        await client.say("session.config", **{"response_format": "pcm", **config})
        await client.told("session.configured")
        yield client


def kinds(heard: list[dict[str, Any] | bytes]) -> list[str]:
    """The types of messages, audio as one. What is committed is told at any time between, and left out."""
    names = ["audio" if isinstance(message, bytes) else message["type"] for message in heard]
    names = [name for name in names if name != "input.committed"]
    return [name for index, name in enumerate(names) if name != "audio" or names[index - 1] != "audio"]


def sound(heard: list[dict[str, Any] | bytes]) -> bytes:
    return b"".join(message for message in heard if isinstance(message, bytes))


async def test_a_session_from_the_first_message_to_the_last(door: Door) -> None:
    async with connect(f"ws://127.0.0.1:{door.port}/v1/audio/speech/stream", proxy=None) as socket:
        client = Talk(socket)
        await client.say("session.config", model=NATIVE, seed=5, response_format="wav", voice="default", whim=1)
        configured = await client.told("session.configured")
        session_id = configured.pop("session_id")
        assert session_id.startswith("session-")
        assert configured == {
            "type": "session.configured", "response_format": "wav", "sample_rate": RATE, "stream_audio": True, "binary": True,
            "split_granularity": "sentence", "model": NATIVE, "voice": configured["voice"], "ignored_fields": ["whim"],
        }  # fmt: skip
        await client.say("input.text", text="Hello there. How are")
        await client.say("input.text", text=" you?")
        await client.say("input.done")
        heard = await client.until("session.done")
        assert kinds(heard) == [
            "audio.start", "audio", "audio.done", "audio.start", "audio", "audio.done", "session.done",
        ]  # fmt: skip
        committed = next(message for message in heard if isinstance(message, dict) and message["type"] == "input.committed")
        assert committed == {"type": "input.committed", "utterance_index": 0}
        start = next(message for message in heard if isinstance(message, dict) and message["type"] == "audio.start")
        assert start == {
            "type": "audio.start", "utterance_index": 0, "sentence_index": 0, "sentence_text": "Hello there.", "format": "wav",
            "sample_rate": RATE, "speech_id": f"{session_id}-0-0",
        }  # fmt: skip
        done = [message for message in heard if isinstance(message, dict) and message["type"] == "audio.done"]
        duration = pytest.approx(1000 * 3 * FRAME / RATE, abs=0.01)
        assert done[1] == {
            "type": "audio.done", "utterance_index": 0, "sentence_index": 1, "total_bytes": 44 + SENTENCE,
            "duration_ms": duration, "finish_reason": "stop", "error": False,
        }  # fmt: skip
        assert heard[-1] == {
            "type": "session.done", "utterance_index": 0, "total_sentences": 2, "total_bytes": 2 * (44 + SENTENCE),
            "duration_ms": pytest.approx(2 * 1000 * 3 * FRAME / RATE, abs=0.01), "cancelled": False,
        }  # fmt: skip
        await client.say("session.close")
        assert await client.closed() == (1000, "")
    texts = [request.text for request in door.service.requests]
    assert texts == ["Hello.", "Hello there.", "How are you?"]
    assert outcome_of(door, f"{session_id}-0-1")["finish_reason"] == "stop"
    assert door.outcomes.num_running == 0


async def test_each_sentence_is_a_file_in_its_format_and_goes_on_from_the_last(door: Door) -> None:
    async with talk(door, response_format="wav", seed=5) as client:
        await client.say("input.text", text="One. Two. Three.")
        await client.say("input.done")
        heard = await client.until("session.done")
    files = sound(heard).split(b"RIFF")[1:]
    assert [file[40:] for file in files] == [b"".join(hum(seed, index) for index in range(3)) for seed in (5, 6, 7)]
    requests = door.service.requests[1:]
    assert [request.continues.seed if request.continues else None for request in requests] == [None, 6, 7]
    assert all(request.streaming for request in requests)


@pytest.mark.parametrize("name", FORMATS)
async def test_all_formats_streamed_and_whole(door: Door, name: str) -> None:
    for stream_audio in (True, False):
        async with talk(door, response_format=name, stream_audio=stream_audio, sample_rate=24000, speed=2) as client:
            await client.say("input.text", text="Hello.")
            await client.say("input.done")
            heard = await client.until("session.done")
            audio = sound(heard)
            start = next(message for message in heard if isinstance(message, dict) and message["type"] == "audio.start")
            assert (start["format"], start["sample_rate"]) == (name, 24000)
            body, rate = hear(audio) if name != "pcm" else (audio[::2], 24000)
            assert len(body) / rate == pytest.approx(3 * FRAME / RATE / 2, abs=0.06)
            if name == "wav":
                assert (audio[40:44] == b"\xff" * 4) == stream_audio


async def test_audio_in_json(door: Door) -> None:
    async with talk(door, seed=1, binary=False) as client:
        await client.say("input.text", text="Hello.")
        await client.say("input.done")
        heard = await client.until("session.done")
    chunks = [message for message in heard if isinstance(message, dict) and message["type"] == "audio.chunk"]
    assert not sound(heard)
    assert b"".join(base64.b64decode(chunk["audio_b64"]) for chunk in chunks) == b"".join(hum(1, index) for index in range(3))
    frame_ms = 1000 * FRAME / RATE
    assert [chunk["chunk_id"] for chunk in chunks] == [0, 1, 2]
    assert [(chunk["chunk_start_ms"], chunk["chunk_end_ms"]) for chunk in chunks] == [
        (pytest.approx(index * frame_ms, abs=0.01), pytest.approx((index + 1) * frame_ms, abs=0.01)) for index in range(3)
    ]
    assert {(chunk["sample_rate"], chunk["timestamps"], chunk["sentence_index"]) for chunk in chunks} == {(RATE, None, 0)}


async def test_word_by_word_audio_comes_before_the_text_is_complete(door: Door) -> None:
    async with talk(door, split_granularity="clause") as client:
        for word in ["After", "all", "the", "long", "rain,", "we", "went"]:
            await client.say("input.text", text=word + " ")
        start = await client.told("audio.start")
        assert start["sentence_text"] == "After all the long rain,"
        assert await client.hear()
        await client.say("input.text", text="home. ")
        await client.say("input.done")
        heard = await client.until("session.done")
        starts = [message for message in heard if isinstance(message, dict) and message["type"] == "audio.start"]
        assert [(start["sentence_index"], start["sentence_text"]) for start in starts] == [(1, "we went home.")]


async def test_nothing_is_cut_unless_asked(door: Door) -> None:
    async with talk(door, split_granularity="none") as client:
        await client.say("input.text", text="One. Two. ")
        await client.say("input.text", text="Three. " * 200)
        await client.say("input.done")
        await client.told("input.committed")
        heard = await client.until("session.done")
    assert door.service.requests[1].text == ("One. Two. " + "Three. " * 200).strip()
    assert heard[-1]["total_sentences"] == 1


async def test_a_flush_speaks_what_waits_and_stays_in_the_utterance(door: Door) -> None:
    async with talk(door) as client:
        await client.say("input.text", text="Wait a")
        await client.say("input.flush")
        first = await client.until("audio.done")
        await client.say("input.text", text="moment. And")
        await client.say("input.flush")
        second = await client.until("audio.done")
        await client.say("input.flush")
        await client.say("input.done")
        await client.until("session.done")
    starts = [message for message in first + second if isinstance(message, dict) and message["type"] == "audio.start"]
    assert [(start["utterance_index"], start["sentence_text"]) for start in starts] == [(0, "Wait a"), (0, "moment.")]
    assert [request.text for request in door.service.requests[1:]] == ["Wait a", "moment.", "And"]


async def test_several_utterances_may_wait_in_line(door: Door) -> None:
    """And each has the settings of its time."""
    async with talk(door, seed=1) as client:
        await client.say("input.text", text="One.")
        await client.say("input.done")
        await client.say("session.config", seed=2, response_format="mp3")
        await client.say("input.text", text="Two.")
        await client.say("input.done")
        await client.say("input.done")
        heard: list[Any] = []
        for _ in range(3):
            heard += await client.until("session.done")
    ends = [message for message in heard if isinstance(message, dict) and message["type"] == "session.done"]
    assert [(end["utterance_index"], end["total_sentences"]) for end in ends] == [(0, 1), (1, 1), (2, 0)]
    starts = [message for message in heard if isinstance(message, dict) and message["type"] == "audio.start"]
    assert [(start["utterance_index"], start["format"]) for start in starts] == [(0, "pcm"), (1, "mp3")]


# -- cancelling ------------------------------------------------------------------------------------------------------------


async def test_a_cancel_in_mid_sentence_ends_everything_and_nothing_more(door: Door) -> None:
    door.service.knobs = Knobs(num_chunks=10**6, chunk_wait_s=0.002)
    async with talk(door) as client:
        await client.say("input.text", text="One. Two. Three")
        await client.told("audio.start")
        assert isinstance(await client.hear(), bytes)
        await client.say("input.cancel")
        heard = await client.until("session.done")
        assert await asyncio.to_thread(door.service.aborted.wait, LIMIT_S)
        assert kinds(heard)[-2:] == ["audio.done", "session.done"]
        done, end = heard[-2:]
        assert isinstance(done, dict)
        assert isinstance(end, dict)
        assert (done["finish_reason"], done["error"], done["sentence_index"]) == ("cancelled", False, 0)
        sent = sound(heard)
        assert done["total_bytes"] == 2 * FRAME + len(sent)
        assert done["duration_ms"] == pytest.approx(1000 * done["total_bytes"] / 2 / RATE, abs=0.01)
        assert (end["cancelled"], end["total_sentences"], end["total_bytes"]) == (True, 1, done["total_bytes"])
        assert [request.text for request in door.service.requests[1:]] == ["One."]
        door.service.reset()
        await client.say("input.text", text="Again.")
        await client.say("input.done")
        heard = await client.until("session.done")
        assert heard[-1]["utterance_index"] == 1
        assert len(sound(heard)) == SENTENCE
    assert door.outcomes.num_running == 0


async def test_a_cancel_drops_utterances_in_line_and_each_is_told_of(door: Door) -> None:
    door.service.knobs = Knobs(num_chunks=10**6, chunk_wait_s=0.002)
    async with talk(door) as client:
        for text in ("One.", "Two."):
            await client.say("input.text", text=text)
            await client.say("input.done")
        await client.say("input.text", text="Three")
        await client.until("audio.start")
        await client.say("input.cancel")
        ends = [(await client.until("session.done"))[-1] for _ in range(3)]
        assert [(end["utterance_index"], end["cancelled"]) for end in ends] == [(0, True), (1, True), (2, True)]
        assert [request.text for request in door.service.requests[1:]] == ["One."]


async def test_a_cancel_without_anything_to_cancel_is_harmless(door: Door) -> None:
    async with talk(door) as client:
        await client.say("input.cancel")
        await client.say("ping")
        await client.told("pong")
        await client.say("input.text", text="Hello.")
        await client.say("input.done")
        assert (await client.until("session.done"))[-1]["cancelled"] is False


async def test_a_sentence_may_be_ended_by_its_id(door: Door) -> None:
    door.service.knobs = Knobs(num_chunks=10**6, chunk_wait_s=0.002)
    async with talk(door) as client:
        await client.say("input.text", text="One. Two. ")
        start = await client.told("audio.start")
        door.service.knobs = Knobs()
        await client.say("input.done")
        assert (await asyncio.to_thread(door.http.delete, f"/v1/audio/speech/{start['speech_id']}")).json()["cancelled"]
        heard = await client.until("session.done")
        done = [message for message in heard if isinstance(message, dict) and message["type"] == "audio.done"]
        assert [message["finish_reason"] for message in done] == ["cancelled", "stop"]


# -- leaving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize(
    "knobs",
    [Knobs(start_wait_s=100), Knobs(chunk_wait_s=100), Knobs(num_chunks=10**6, chunk_wait_s=0.002), Knobs(num_chunks=10**6)],
    ids=["while checked", "before the first chunk", "while speaking", "while nobody reads"],
)
async def test_leaving_frees_the_engine(door: Door, knobs: Knobs, how: str) -> None:
    before = door.outcomes.counts["client_disconnect"]
    async with connect(f"ws://127.0.0.1:{door.port}/v1/audio/speech/stream", proxy=None, max_queue=1) as socket:
        client = Talk(socket)
        await client.say("session.config", response_format="pcm")
        await client.told("session.configured")
        door.service.knobs = knobs
        await client.say("input.text", text="One. Two. Three")
        await until(lambda: len(door.service.requests) == 2)
        await asyncio.sleep(0.1)
        assert not door.service.aborted.is_set()
        if how == "abort":
            socket.transport.abort()
        else:
            await asyncio.wait_for(socket.close(), LIMIT_S) if knobs.num_chunks < 10**6 else socket.transport.close()
        assert await asyncio.to_thread(door.service.aborted.wait, LIMIT_S)
    await until(lambda: door.outcomes.num_running == 0)
    assert door.outcomes.counts["client_disconnect"] == before + 1
    assert len(door.service.requests) == 2


async def test_closing_by_message_speaks_what_was_ended(door: Door) -> None:
    async with talk(door) as client:
        await client.say("input.text", text="One. Two.")
        await client.say("input.done")
        await client.say("input.text", text="Three")
        await client.say("session.close")
        heard = await client.until("session.done")
        assert len(sound(heard)) == 2 * SENTENCE
        assert await client.closed() == (1000, "")
    assert [request.text for request in door.service.requests[1:]] == ["One.", "Two."]


# -- faults ----------------------------------------------------------------------------------------------------------------


async def test_a_bad_sentence_is_told_of_and_the_session_goes_on(door: Door) -> None:
    door.service.knobs = Knobs(failing="Two.")
    async with talk(door) as client:
        await client.say("input.text", text="One. Two. Three.")
        await client.say("input.done")
        heard = await client.until("session.done")
    error = next(message for message in heard if isinstance(message, dict) and message["type"] == "error")
    assert error == {
        "type": "error", "message": "the engine failed; this request is lost", "error_type": "server_error",
        "code": "internal_error", "partial_audio": True, "utterance_index": 0, "sentence_index": 1,
    }  # fmt: skip
    done = [message for message in heard if isinstance(message, dict) and message["type"] == "audio.done"]
    assert [(message["finish_reason"], message["error"]) for message in done] == [
        ("stop", False), ("failed", True), ("stop", False)
    ]  # fmt: skip
    assert heard[-1]["total_sentences"] == 3


async def test_a_sentence_that_is_refused_has_no_audio(door: Door) -> None:
    async with talk(door) as client:
        door.service.knobs = Knobs(error=Overloaded("full", retry_after_s=2.5), error_at=0)
        await client.say("input.text", text="One.")
        await client.say("input.done")
        heard = await client.until("session.done")
        assert "audio.start" not in kinds(heard)
        error = next(message for message in heard if isinstance(message, dict) and message["type"] == "error")
        assert (error["code"], error["retry_after"], error["partial_audio"]) == ("queue_full", 2.5, False)
        door.service.knobs = Knobs(error=EngineFailure("x"), error_at=-1)
        await client.say("input.text", text="\0.")
        await client.say("input.done")
        heard = await client.until("session.done")
        assert any(isinstance(message, dict) and message.get("param") == "input" for message in heard)
        door.service.reset()
        await client.say("input.text", text="Three.")
        await client.say("input.done")
        assert len(sound(await client.until("session.done"))) == SENTENCE


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ('{"type": "input.text"}', "missing_field", "text"),
        ('{"type": "input.text", "text": 5}', "invalid_type", "text"),
        ('{"type": "input.text", "text": "\\ud800"}', "invalid_value", "text"),
        ('{"type": "input.words", "text": "x"}', "invalid_value", "type"),
        ('{"type": 7}', "invalid_type", "type"),
        ('{"text": "x"}', "invalid_type", "type"),
        ("[]", "invalid_type", None),
        ("{", "invalid_value", None),
        ("[" * 100_000, "invalid_value", None),
        ('{"type": "input.text", "type": "ping"}', "invalid_value", "type"),
        (b"\x00\x01", "invalid_type", None),
        ('{"type": "session.config", "speed": 9}', "out_of_range", "speed"),
        ('{"type": "session.config", "voice": "nobody"}', "unknown_voice", "voice"),
        ('{"type": "session.config", "split_granularity": "word"}', "invalid_value", "split_granularity"),
        ('{"type": "session.config", "stream_audio": 1}', "invalid_type", "stream_audio"),
        ('{"type": "session.config", "input": "x"}', "unsupported_field", "input"),
        ('{"type": "session.config", "model": "no-such"}', "model_not_found", "model"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_bad_message_is_told_of_and_the_session_goes_on(
    door: Door, message: str | bytes, code: str, param: str | None
) -> None:
    async with talk(door) as client:
        await client.socket.send(message)
        error = await client.told("error")
        assert (error["code"], error.get("param")) == (code, param)
        assert error["message"]
        await client.say("input.text", text="Hello.")
        await client.say("input.done")
        assert len(sound(await client.until("session.done"))) == SENTENCE


async def test_settings_change_between_utterances_only(door: Door) -> None:
    async with talk(door) as client:
        await client.say("input.text", text="Hello")
        await client.say("session.config", response_format="mp3")
        assert "between utterances" in (await client.told("error"))["message"]
        await client.say("input.done")
        start = next(
            message for message in await client.until("session.done") if isinstance(message, dict) and "format" in message
        )
        assert start["format"] == "pcm"


async def test_text_that_nobody_speaks_has_a_bound(door: Door) -> None:
    door.service.knobs = Knobs(chunk_wait_s=100)
    async with talk(door) as client:
        text = "Word by word it comes. " * 1000
        await client.say("input.text", text=text)
        await client.say("input.text", text=text)
        error = await client.told("error")
        assert (error["code"], error["param"]) == ("input_too_long", "text")
        assert str(LIMITS.max_input_chars) in error["message"]
        await client.say("input.cancel")
        assert (await client.until("session.done"))[-1]["cancelled"]
        door.service.reset()
        await client.say("input.text", text="Word. ")
        await client.say("input.done")
        assert len(sound(await client.until("session.done"))) == SENTENCE


# -- the handshake and the limits ------------------------------------------------------------------------------------------


@asynccontextmanager
async def opened(port: int, path: str = "/v1/audio/speech/stream") -> AsyncIterator[Talk]:
    async with connect(f"ws://127.0.0.1:{port}{path}", proxy=None, max_size=None) as socket:
        yield Talk(socket)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ('{"type": "input.text", "text": "x"}', "session.config"),
        ('{"type": "ping"}', "session.config"),
        ("hello", "JSON"),
        (b"\x80", "text"),
        ('{"type": "session.config", "speed": 9}', "speed"),
        ('{"type": "session.config", "voice": "nobody"}', "nobody"),
        ('{"type": "session.config", "ref_audio": "AAAA", "ref_text": "x"}', "ref_audio"),
    ],
    ids=str,
)
async def test_a_fault_in_the_handshake_ends_the_session(door: Door, message: str | bytes, words: str) -> None:
    async with opened(door.port) as client:
        await client.socket.send(message)
        error = await client.told("error")
        assert words in error["message"]
        code, reason = await client.closed()
        assert code == 1008
        assert error["message"].startswith(reason[:40])


async def test_a_clip_comes_with_the_settings(door: Door) -> None:
    """More than other messages may have."""
    encoded = base64.b64encode(clip("control_pcm16.wav")).decode()
    assert len(encoded) > frames.LARGE_BYTES
    async with talk(door, ref_audio=encoded, ref_text=REF_TEXT) as client:
        await client.say("input.text", text="One. Two.")
        await client.say("input.done")
        await client.until("session.done")
    assert [len(request.references) for request in door.service.requests] == [1, 1, 1]


@pytest.mark.parametrize("size", [frames.LARGE_BYTES + 1, LIMITS.max_body_bytes + 1, 17 << 20])
async def test_large_messages_end_the_session(door: Door, size: int) -> None:
    async with talk(door) as client:
        await client.socket.send(json.dumps({"type": "input.text", "text": "x" * size}))
        assert (await client.closed())[0] == 1009


@contextmanager
def drainable(limits: Limits) -> Iterator[tuple[int, SineService]]:
    """A server that drains from the moment somebody asks for /drain."""
    service = SineService(limits)
    app = create_app(service, ServerConfig((NATIVE,), limits=limits))
    draining: dict[str, asyncio.Event] = {}

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        draining.setdefault("event", asyncio.Event())
        if scope["type"] == "http" and scope["path"] == "/drain":
            draining["event"].set()
        scope["state"] = {"draining": draining["event"]}
        await app(scope, receive, send)

    server = uvicorn.Server(
        uvicorn.Config(outer, port=0, log_level="critical", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], service
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def hurried() -> Iterator[tuple[int, SineService]]:
    """A server of little patience."""
    with drainable(HURRIED) as found:
        yield found


@pytest.fixture
def stopping() -> Iterator[tuple[int, SineService]]:
    """One of ordinary patience."""
    with drainable(LIMITS) as found:
        yield found


async def test_a_silent_client_is_not_waited_for(hurried: tuple[int, SineService]) -> None:
    async with opened(hurried[0]) as client:
        assert (await client.closed())[0] == 4408


async def test_an_idle_session_ends_but_not_while_it_speaks(hurried: tuple[int, SineService]) -> None:
    port, service = hurried
    service.reset()
    async with opened(port) as client:
        await client.say("session.config", response_format="pcm")
        await client.told("session.configured")
        for _ in range(4):
            await asyncio.sleep(0.4)
            await client.say("ping")
            await client.told("pong")
        service.knobs = Knobs(num_chunks=60, chunk_wait_s=0.03)
        await client.say("input.text", text="Hello.")
        await client.say("input.done")
        assert len(sound(await client.until("session.done"))) == 60 * 2 * FRAME
        assert (await client.closed())[0] == 4409


async def test_whoever_reads_nothing_has_left(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "STALL_S", 0.3)
    door.service.knobs = Knobs(num_chunks=10**6, pcm=bytes(2**17))
    uri = f"ws://127.0.0.1:{door.port}/v1/audio/speech/stream"
    async with connect(uri, proxy=None, max_queue=1, compression=None) as socket:
        client = Talk(socket)
        await client.say("session.config", response_format="pcm")
        await client.told("session.configured")
        await client.say("input.text", text="One. Two ")
        assert await asyncio.to_thread(door.service.aborted.wait, LIMIT_S)
        socket.transport.abort()
    assert len(door.service.requests) == 2


async def test_a_fault_of_ours_ends_the_session_without_its_text(door: Door) -> None:
    async with talk(door) as client:
        door.service.knobs = Knobs(error=ValueError("secret"), error_at=1)
        await client.say("input.text", text="Hello.")
        await client.say("input.done")
        code, reason = await client.closed()
        assert code == 1011
        assert "secret" not in reason
    assert door.speak().status_code in (200, 500)
    door.service.reset()
    assert door.outcomes.num_running == 0


async def test_the_path_may_end_with_a_slash_and_others_are_refused(door: Door) -> None:
    async with opened(door.port, "/v1/audio/speech/stream/") as client:
        await client.say("session.config")
        await client.told("session.configured")
    for path in ("/v1/audio/speech", "/v1/audio/speech/streams", "/"):
        with pytest.raises(Exception, match=r"HTTP 40[34]"):
            async with opened(door.port, path):
                pass


async def test_a_server_that_stops_lets_sessions_finish(stopping: tuple[int, SineService]) -> None:
    port, service = stopping
    async with opened(port) as idle, opened(port) as busy:
        for client in (idle, busy):
            await client.say("session.config", response_format="pcm")
            await client.told("session.configured")
        service.knobs = Knobs(num_chunks=20, chunk_wait_s=0.02)
        await busy.say("input.text", text="One. Two ")
        await busy.told("audio.start")
        await asyncio.to_thread(httpx.get, f"http://127.0.0.1:{port}/drain", trust_env=False)
        assert (await idle.closed())[0] == 1001
        heard = await busy.until("audio.done")
        assert heard[-1]["finish_reason"] == "stop"
        assert (await busy.closed())[0] == 1001
