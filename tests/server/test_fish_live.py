"""Fish Audio's live socket: its client's sessions, order, pieces, faults, limits, and what is left afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import fish_audio_sdk
import fishaudio
import ormsgpack
import pytest
from fishaudio.types import FlushEvent, ReferenceAudio, TextEvent, TTSConfig
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from duetts.errors import EngineFailure, Overloaded
from duetts.server import fish_live, frames
from tests.audio.listening import hear
from tests.inputs import REF_TEXT, clip
from tests.server.conftest import LIMITS, Door
from tests.server.sine import FRAME, RATE, Knobs, SineService, hum
from tests.server.test_outcomes import outcome_of
from tests.server.test_websocket import hurried, stopping  # noqa: F401 fixtures
from tests.waiting import LIMIT_S, until

SENTENCE = 2 * 3 * FRAME  # bytes of PCM
SECONDS = 3 * FRAME / RATE


class Live:
    """A client that keeps nothing back."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def say(self, event: str, **fields: Any) -> None:
        await self.socket.send(ormsgpack.packb({"event": event, **fields}))

    async def start(self, **request: Any) -> None:
        await self.say("start", request={"text": "", "format": "pcm", **request})

    async def hear(self) -> dict[str, Any]:
        raw = await asyncio.wait_for(self.socket.recv(), LIMIT_S)
        assert isinstance(raw, bytes)
        return dict(ormsgpack.unpackb(raw))

    async def finished(self) -> tuple[bytes, dict[str, Any]]:
        """The audio up to the end of an utterance, and the message of the end."""
        audio = b""
        while (message := await self.hear())["event"] == "audio":
            assert message["audio"]
            assert message["time"] >= 0
            audio += message["audio"]
        assert message["event"] == "finish"
        return audio, message

    async def closed(self) -> tuple[int, str]:
        """Code and reason with which the server closes now."""
        with suppress(ConnectionClosed):
            while await self.hear():
                pass
        return self.socket.close_code or 0, self.socket.close_reason or ""


@asynccontextmanager
async def live(port: int, **headers: str) -> AsyncIterator[Live]:
    uri = f"ws://127.0.0.1:{port}/v1/tts/live"
    async with connect(uri, proxy=None, max_size=None, additional_headers=headers) as socket:
        yield Live(socket)


async def test_one_container_for_all_pieces(door: Door) -> None:
    async with live(door.port) as client:
        await client.start(format="wav", seed=5)
        await client.say("text", text="Hello there, ")
        await client.say("text", text="my friend.")
        await client.say("flush")
        await client.say("text", text=" How are you?")
        await client.say("stop")
        audio, finish = await client.finished()
    assert finish["reason"] == "stop"
    assert audio[:4] == b"RIFF"
    assert audio.count(b"RIFF") == 1
    assert audio[44:] == b"".join(hum(seed, index) for seed in (5, 6) for index in range(3))
    requests = door.service.requests[1:]
    assert [request.text for request in requests] == ["Hello there, my friend.", "How are you?"]
    assert [request.continues.seed if request.continues else None for request in requests] == [None, 6]
    assert all(request.streaming for request in requests)
    told = outcome_of(door, requests[0].request_id)
    assert (told["finish_reason"], told["usage"]["output_tokens"], told["usage"]["input_tokens"]) == ("stop", 6, 14)
    assert door.outcomes.num_running == 0


async def test_text_is_spoken_when_there_is_enough(door: Door) -> None:
    async with live(door.port) as client:
        await client.start(chunk_length=100)
        for index in range(60):
            await client.say("text", text=f"word{index % 10} ")
        assert (await client.hear())["event"] == "audio"
        await client.say("stop")
        await client.finished()
    texts = [request.text for request in door.service.requests[1:]]
    assert len(texts) > 3
    assert all(len(text) <= 100 for text in texts)
    assert min(len(text) for text in texts[:-1]) > 80
    assert " ".join(texts) == " ".join(f"word{index % 10}" for index in range(60))


async def test_the_socket_is_used_again(door: Door) -> None:
    """As LiveKit's pool does. What comes before the next start, and events that are not known, are passed over."""
    async with live(door.port, model="second") as client:
        for index in range(3):
            await client.start(seed=index, reference_id=None)
            await client.say("text", text="Hello.")
            await client.say("whim", text="Hello.")
            await client.say("stop")
            audio, finish = await client.finished()
            assert (len(audio), finish["reason"]) == (SENTENCE, "stop")
            await client.say("text", text="late")
            await client.say("flush")
            await client.say("stop")
        await client.start()
        await client.say("stop")
        assert await client.finished() == (b"", {"event": "finish", "reason": "stop", "time": pytest.approx(0, abs=2000)})
    assert [request.seed for request in door.service.requests] == [0, 0, 1, 1, 2, 2, None]


async def test_a_start_may_hold_text_and_follow_at_once(door: Door) -> None:
    async with live(door.port) as client:
        for text in ("One.", "Two."):
            await client.start(text=text)
            await client.say("stop")
        assert [len((await client.finished())[0]) for _ in range(2)] == [SENTENCE] * 2
    texts = [request.text for request in door.service.requests]
    assert [text for text in texts if text != fish_live.PROBE] == ["One.", "Two."]


async def test_fields_are_those_of_the_http_route(door: Door) -> None:
    voice = [{"audio": clip("control_pcm16.wav"), "text": REF_TEXT}]
    async with live(door.port, model="s2-pro") as client:
        asked = {"text": "Hello.", "references": voice, "prosody": {"speed": 2}, "temperature": 0.7, "seed": 23}
        await client.say("start", request=asked)  # FFmpeg takes the MP3 of this seed for something else if it is not told
        await client.say("stop")
        audio, _ = await client.finished()
    heard, rate = hear(audio)
    assert len(heard) / rate == pytest.approx(SECONDS / 2, abs=0.06)  # mp3, since there is a header `model`
    request = door.service.requests[-1]
    assert (request.references[0].text, request.temperature) == (REF_TEXT, 0.7)


@pytest.mark.parametrize("name", ["wav", "mp3", "opus", "pcm", "flac", "aac"])
async def test_all_formats(door: Door, name: str) -> None:
    async with live(door.port) as client:
        await client.start(format=name, sample_rate=24000)
        await client.say("text", text="Hello.")
        await client.say("flush")
        await client.say("text", text="Hello.")
        await client.say("stop")
        audio, _ = await client.finished()
    heard, rate = hear(audio) if name != "pcm" else (audio[::2], 24000)
    assert len(heard) / rate == pytest.approx(2 * SECONDS, abs=0.09)


# -- faults ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({"format": "m4a"}, "format 'm4a'"),
        ({"reference_id": "nobody"}, "nobody"),
        ({"prosody": {"speed": 9}}, "prosody.speed"),
        ({"references": [{"audio": b"RIFF", "text": "x"}]}, ""),
        ({"temperature": "hot"}, "temperature"),
    ],
    ids=str,
)
async def test_a_start_that_cannot_be_is_told_and_ends_the_socket(
    door: Door, request_fields: dict[str, Any], words: str
) -> None:
    async with live(door.port) as client:
        await client.start(**request_fields)
        _, finish = await client.finished()
        assert finish["reason"] == "error"
        assert words in finish["message"]
        code, reason = await client.closed()
        assert code == 4400
        assert finish["message"].startswith(reason[:40])


@pytest.mark.parametrize(
    "message",
    [
        ormsgpack.packb({"event": "text", "text": "x"}),
        ormsgpack.packb({"event": "stop"}),
        ormsgpack.packb({"event": "start"}),
        ormsgpack.packb({"event": "start", "request": []}),
        ormsgpack.packb({"event": 5}),
        ormsgpack.packb({}),
        ormsgpack.packb([]),
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xdd\x00\x0f\xff\xff" + b"\x90" * 100_000,
        '{"event": "start"}',
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_what_is_no_start_ends_the_socket(door: Door, message: bytes | str) -> None:
    async with live(door.port) as client:
        await client.socket.send(message)
        assert (await client.closed())[0] == 4400
    assert door.speak().status_code == 200


async def test_rubbish_after_a_start_ends_the_socket_and_the_work(door: Door) -> None:
    door.service.knobs = Knobs(num_chunks=10**6, chunk_wait_s=0.002)
    for rubbish in (b"\xc1", ormsgpack.packb({"event": "start", "request": {}})):
        async with live(door.port) as client:
            await client.start(text="Hello.")
            await client.say("flush")
            await client.hear()
            await client.socket.send(rubbish)
            assert (await client.closed())[0] == 4400
        await until(lambda: door.outcomes.num_running == 0)


async def test_a_failure_is_told_and_the_socket_goes_on(door: Door) -> None:
    door.service.knobs = Knobs(failing="Two.")
    async with live(door.port) as client:
        await client.start()
        for text in ("One.", "Two.", "Three."):
            await client.say("text", text=text)
            await client.say("flush")
        audio, finish = await client.finished()
        assert (finish["reason"], finish["message"]) == ("error", "the engine failed; this request is lost")
        assert len(audio) == SENTENCE + 2 * FRAME
        await client.say("text", text="Four.")  # passed over
        await client.start(text="Five.")  # without a stop: the client has seen the end
        await client.say("stop")
        assert len((await client.finished())[0]) == SENTENCE
        door.service.knobs = Knobs(error=Overloaded("full", retry_after_s=1), error_at=0)
        await client.start(text="Six.")
        await client.say("stop")
        audio, finish = await client.finished()
        assert (audio, finish["reason"]) == (b"", "error")
    assert "Three." not in [request.text for request in door.service.requests]
    assert door.outcomes.num_running == 0


@pytest.mark.parametrize("text", [5, None, b"x", "x\0y"])
async def test_text_that_is_none_ends_the_utterance(door: Door, text: Any) -> None:
    async with live(door.port) as client:
        await client.start()
        await client.say("text", text=text)
        await client.say("stop")
        _, finish = await client.finished()
        assert finish["reason"] == "error"
        await client.start(text="Again.")
        await client.say("stop")
        assert len((await client.finished())[0]) == SENTENCE


async def test_text_that_nobody_speaks_has_a_bound(door: Door) -> None:
    door.service.knobs = Knobs(chunk_wait_s=0.5)
    async with live(door.port) as client:
        await client.start()
        for _ in range(2):
            await client.say("text", text="Word by word it comes. " * 1000)
        _, finish = await client.finished()
        assert finish["reason"] == "error"
        assert str(LIMITS.max_input_chars) in finish["message"]


@pytest.mark.parametrize("size", [frames.LARGE_BYTES + 1, LIMITS.max_body_bytes + 1, 17 << 20])
async def test_large_messages_end_the_socket(door: Door, size: int) -> None:
    async with live(door.port) as client:
        await client.start()
        await client.say("text", text="x" * size)
        assert (await client.closed())[0] == 1009


async def test_a_fault_of_ours_ends_the_socket_without_its_text(door: Door) -> None:
    door.service.knobs = Knobs(error=ValueError("secret"), error_at=1)
    async with live(door.port) as client:
        await client.start(text="Hello.")
        await client.say("stop")
        code, reason = await client.closed()
        assert code == 1011
        assert "secret" not in reason
    await until(lambda: door.outcomes.num_running == 0)


# -- leaving and waiting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize(
    "knobs",
    [Knobs(chunk_wait_s=100), Knobs(num_chunks=10**6, chunk_wait_s=0.002), Knobs(num_chunks=10**6)],
    ids=["before the first chunk", "while speaking", "while nobody reads"],
)
async def test_leaving_frees_the_engine(door: Door, knobs: Knobs, how: str) -> None:
    before = door.outcomes.counts["client_disconnect"]
    uri = f"ws://127.0.0.1:{door.port}/v1/tts/live"
    async with connect(uri, proxy=None, max_queue=1) as socket:
        client = Live(socket)
        door.service.knobs = knobs
        await client.start(text="Hello. ")
        await client.say("flush")
        await until(lambda: len(door.service.requests) == 2)
        await asyncio.sleep(0.1)
        assert not door.service.aborted.is_set()
        if how == "abort":
            socket.transport.abort()
        else:
            socket.transport.close()
        assert await asyncio.to_thread(door.service.aborted.wait, LIMIT_S)
    await until(lambda: door.outcomes.num_running == 0)
    assert door.outcomes.counts["client_disconnect"] == before + 1


async def test_leaving_between_pieces_is_counted_too(door: Door) -> None:
    before = door.outcomes.counts["client_disconnect"]
    async with live(door.port) as client:
        await client.start(text="Hello.")
        await client.say("flush")
        await client.hear()
        await until(lambda: not door.service.speaking)
        client.socket.transport.abort()
    await until(lambda: door.outcomes.counts["client_disconnect"] == before + 1)
    assert door.outcomes.num_running == 0


async def test_idle_sockets_end_also_in_the_midst_of_an_utterance(hurried: tuple[int, SineService]) -> None:  # noqa: F811
    port, service = hurried
    service.reset()
    async with live(port) as silent, live(port) as waiting:
        await waiting.start(text="Hello.")
        await waiting.say("flush")
        assert (await silent.closed())[0] == 4409
        assert (await waiting.closed())[0] == 4409


async def test_a_server_that_stops_finishes_utterances(stopping: tuple[int, SineService]) -> None:  # noqa: F811
    port, service = stopping
    service.knobs = Knobs(num_chunks=20, chunk_wait_s=0.02)
    async with live(port) as idle, live(port) as busy:
        await busy.start(text="One.")
        await busy.say("flush")
        await busy.hear()
        async with connect(f"ws://127.0.0.1:{port}/v1/tts/live", proxy=None):
            await asyncio.to_thread(fishaudio.client.httpx.get, f"http://127.0.0.1:{port}/drain", trust_env=False)
        assert (await idle.closed())[0] == 1001
        _, finish = await busy.finished()
        assert finish["reason"] == "stop"
        assert (await busy.closed())[0] == 1001


# -- the client ------------------------------------------------------------------------------------------------------------


def words() -> Any:
    yield "Hello, "
    yield TextEvent(text="this is ")
    yield FlushEvent()
    yield "streaming."


def test_the_client_speaks_live(door: Door) -> None:
    with fishaudio.FishAudio(api_key="none", base_url=f"http://127.0.0.1:{door.port}") as fish:
        voice = ReferenceAudio(audio=clip("control_pcm16.wav"), text=REF_TEXT)
        audio = b"".join(fish.tts.stream_websocket(words(), references=[voice], latency="balanced", speed=2.0))
        again = b"".join(fish.tts.stream_websocket(iter(["Once more."]), format="wav", config=TTSConfig(chunk_length=100)))
    heard, rate = hear(audio)
    assert len(heard) / rate == pytest.approx(2 * SECONDS / 2, abs=0.09)
    assert len(hear(again)[0]) / RATE == pytest.approx(SECONDS, abs=0.01)
    texts = [request.text for request in door.service.requests]
    assert texts == ["Hello.", "Hello, this is", "streaming.", "Hello.", "Once more."]
    assert {len(request.references) for request in door.service.requests[:3]} == {1}


def test_the_client_is_told_of_errors(door: Door) -> None:
    door.service.knobs = Knobs(error=EngineFailure("lost"), error_at=1)
    with (
        fishaudio.FishAudio(api_key="none", base_url=f"http://127.0.0.1:{door.port}") as fish,
        pytest.raises(fishaudio.exceptions.WebSocketError),
    ):
        list(fish.tts.stream_websocket(iter(["Hello."])))


async def test_the_asynchronous_client_speaks_live(door: Door) -> None:
    async def texts() -> AsyncIterator[str]:
        yield "Hello."

    async with fishaudio.AsyncFishAudio(api_key="none", base_url=f"http://127.0.0.1:{door.port}") as fish:
        audio = b"".join([piece async for piece in fish.tts.stream_websocket(texts(), format="wav")])
    assert len(hear(audio)[0]) / RATE == pytest.approx(SECONDS, abs=0.01)


def test_the_older_client_speaks_live(door: Door) -> None:
    with fish_audio_sdk.WebSocketSession("none", base_url=f"http://127.0.0.1:{door.port}") as session:
        audio = b"".join(session.tts(fish_audio_sdk.TTSRequest(text="", format="wav"), iter(["Hello, ", "you."])))
    assert len(hear(audio)[0]) / RATE == pytest.approx(SECONDS, abs=0.01)
