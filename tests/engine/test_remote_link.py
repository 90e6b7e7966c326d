"""Both ends of the socket in one loop: a link against a script of messages, and a host against messages of any kind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio

from duetts.config import ProcessConfig
from duetts.engine import host as host_module
from duetts.engine import wire
from duetts.engine.host import Host, Started
from duetts.engine.link import Link
from duetts.engine.wire import Message
from duetts.errors import (
    Aborted,
    CheckpointError,
    DeadlineExceeded,
    DuettsError,
    EngineFailure,
    InvalidRequest,
    NotReady,
    Overloaded,
    WireError,
)
from duetts.types import Chunk, Outcome, Sampling, Utterance
from tests.waiting import LIMIT_S, until

from .fake_engine import CODEBOOKS, FRAME, INFO, VOCABULARY, FakeSpeaker, hum

LIFE = "0123"
READY = {"state": "ready", "info": wire.to_plain(INFO), "stats": {}, "error": None, "others": {"calls": 0, "owed": 0.0}}
QUICK = ProcessConfig(heartbeat_s=0.02)


def spoken(frames: int = 5, seed: int = 1, **options: Any) -> Utterance:
    return Utterance(options.pop("request_id", "r"), np.ones((1 + CODEBOOKS, 3), np.int32), Sampling(), seed, frames, **options)


async def collect(speaker: Any, utterance: Utterance) -> tuple[bytes, Outcome]:
    pcm = b""
    async for item in speaker.speak(utterance):
        if isinstance(item, Outcome):
            return pcm, item
        pcm += item.pcm
    raise AssertionError("the stream had no outcome")


def whole(seed: int, frames: int) -> bytes:
    return b"".join(hum(seed, index).pcm for index in range(frames))


# -- a link against a script ---------------------------------------------------------------------------------------------


class Script:
    """The engine's end, driven by a test."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._client = b""
        self.place = 0
        self.heard: list[Message] = []

    async def hear(self, kind: str) -> Message:
        """The next message that is no heartbeat."""
        while True:
            self._client, *parts = await self._socket.recv_multipart()
            message = wire.unpack(LIFE, parts)
            self.heard.append(message)
            if message.kind == kind:
                return message
            assert message.kind == "beat", f"{message.kind} came, not {kind}"

    async def say(self, *messages: Message, life: str = LIFE) -> None:
        for message in messages:
            await self._socket.send_multipart([self._client, *wire.pack(life, message, self.place)])
            self.place += 1


@asynccontextmanager
async def scripted(tmp_path: Path) -> AsyncIterator[tuple[Script, Link]]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)  # else it drops what its client is slow to take
    socket.bind(f"ipc://{tmp_path}/s")
    link = Link(context, f"ipc://{tmp_path}/s", LIFE, lambda: None)
    script = Script(socket)
    link.beat()
    await script.hear("beat")
    await script.say(Message("state", READY))
    await until(lambda: link.state == "ready")
    try:
        yield script, link
    finally:
        await link.close()
        context.destroy(linger=0)


def frame(index: int, number: int = 0, frames: int = 1) -> Message:
    pcm = bytes(2 * FRAME * frames)
    return wire.chunk(number, index, Chunk(pcm, np.zeros((CODEBOOKS, frames), np.int32)))


def ended(chunks: int, frames: int, number: int = 0, error: DuettsError | None = None) -> Message:
    return wire.end(number, chunks, Outcome("failed" if error else "stop", frames, 3, error=error))


@pytest.mark.parametrize(
    ("messages", "reason", "frames"),
    [
        ([frame(0), frame(2)], "chunk 2 came in place of chunk 1", 1),
        ([frame(1)], "chunk 1 came in place of chunk 0", 0),
        ([frame(0), frame(0)], "chunk 0 came in place of chunk 1", 1),
        ([frame(0), ended(2, 2)], "1 of 2 chunks came", 1),
        ([frame(0), ended(1, 2)], "1 of 2 frames came", 1),
        ([frame(0, frames=6)], "more frames than the 5", 0),
        ([frame(0), Message("codes", {"id": 0})], "no answer to this request", 1),
        ([frame(0), Message("chunk", {"id": 0, "number": 1, "frames": 1}, (b"", b""))], "not 1 frames", 1),
        ([Message("end", {"id": 0, "number": 0, "outcome": {"reason": "tired"}})], "Outcome", 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_answer_that_is_not_whole_is_a_failure(
    tmp_path: Path, messages: list[Message], reason: str, frames: int
) -> None:
    """Nothing is lost in silence: the request ends as failed, its engine is told, and the link goes on."""
    async with scripted(tmp_path) as (script, link):
        answer = asyncio.ensure_future(collect(link, spoken()))
        await script.hear("speak")
        await script.say(*messages)
        pcm, outcome = await asyncio.wait_for(answer, LIMIT_S)
        assert (outcome.reason, outcome.num_frames, len(pcm)) == ("failed", frames, 2 * FRAME * frames)
        assert isinstance(outcome.error, EngineFailure)
        assert reason in str(outcome.error)
        assert (await script.hear("cancel")).values["id"] == 0
        assert (link.num_calls, link.failed) == (0, False)


@pytest.mark.parametrize("kind", ["lost", "unreadable", "other life", "refused", "odd state"])
async def test_a_line_with_a_hole_ends_every_request(tmp_path: Path, kind: str) -> None:
    async with scripted(tmp_path) as (script, link):
        answers = [asyncio.ensure_future(collect(link, spoken(number))) for number in (2, 3)]
        encoding = asyncio.ensure_future(link.encode(np.ones(8, np.float32)))
        for request in ("speak", "speak", "encode"):
            await script.hear(request)
        await script.say(frame(0))
        if kind == "lost":
            script.place += 1
            await script.say(frame(0, number=1))
        elif kind == "unreadable":
            await script._socket.send_multipart([script._client, b"\xc1"])
        elif kind == "refused":
            await script.say(wire.refused(None, WireError("I speak version 9")))
        elif kind == "odd state":
            await script.say(Message("state", {**READY, "state": "tired"}))
        else:
            await script.say(frame(0), life="other")
        outcomes = [outcome for _, outcome in await asyncio.wait_for(asyncio.gather(*answers), LIMIT_S)]
        assert [(outcome.reason, type(outcome.error)) for outcome in outcomes] == [("failed", EngineFailure)] * 2
        with pytest.raises(EngineFailure):
            await encoding
        assert link.failed
        with pytest.raises(NotReady):
            await collect(link, spoken())


async def test_what_was_on_its_way_when_a_request_was_cancelled_is_nobodys(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (script, link):
        stream = link.speak(spoken())
        first = asyncio.ensure_future(anext(stream))
        await script.hear("speak")
        await script.say(frame(0))
        assert isinstance(await first, Chunk)
        await stream.aclose()
        assert link.num_calls == 0
        await script.say(frame(1), frame(3), ended(9, 9), wire.refused(0, Overloaded("x", retry_after_s=1)))
        answer = asyncio.ensure_future(collect(link, spoken()))
        await script.hear("cancel")
        assert (await script.hear("speak")).values["id"] == 1
        await script.say(ended(0, 0, number=1))
        assert (await asyncio.wait_for(answer, LIMIT_S))[1].reason == "stop"


async def test_an_end_that_crosses_a_cancel_does_no_harm(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (script, link):
        stream = link.speak(spoken())
        first = asyncio.ensure_future(anext(stream))
        await script.hear("speak")
        await script.say(frame(0), ended(1, 1))
        await first
        await until(lambda: link.num_calls == 0)  # the outcome is here, and not yet taken
        await stream.aclose()
        link.beat()
        await script.hear("beat")
        assert "cancel" not in [message.kind for message in script.heard]


async def test_refusals_are_raised_before_audio_and_are_outcomes_after_it(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (script, link):
        answer = asyncio.ensure_future(collect(link, spoken()))
        await script.hear("speak")
        await script.say(wire.refused(0, Overloaded("full", retry_after_s=2.5)))
        with pytest.raises(Overloaded) as refusal:
            await answer
        assert refusal.value.retry_after_s == 2.5
        answer = asyncio.ensure_future(collect(link, spoken()))
        await script.hear("speak")
        await script.say(frame(0, number=1), wire.refused(1, EngineFailure("late")))
        pcm, outcome = await answer
        assert (len(pcm), outcome.reason, str(outcome.error)) == (2 * FRAME, "failed", "late")


async def test_a_consumer_that_is_slow_loses_nothing(tmp_path: Path) -> None:
    """A whole long utterance waits in the process; then it is complete and in order."""
    async with scripted(tmp_path) as (script, link):
        stream = link.speak(spoken(3000))
        first = asyncio.ensure_future(anext(stream))
        await script.hear("speak")
        await script.say(*(frame(index) for index in range(3000)), ended(3000, 3000))
        assert isinstance(await first, Chunk)
        await until(lambda: link.num_calls == 0)
        items = [item async for item in stream]
        assert len(items) == 3000
        assert isinstance(items[-1], Outcome)
        assert items[-1].reason == "stop"


async def test_closing_a_link_ends_open_requests_as_aborted(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (script, link):
        answer = asyncio.ensure_future(collect(link, spoken()))
        encoding = asyncio.ensure_future(link.encode(np.ones(8, np.float32)))
        await script.hear("speak")
        await link.close()
        assert isinstance((await answer)[1].error, Aborted)
        with pytest.raises(Aborted):
            await encoding
        await link.close()


# -- a host against anything ---------------------------------------------------------------------------------------------


class Raw:
    """A client that sends what it likes."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(address)
        self.place = 0

    async def send(self, message: Message) -> None:
        await self._socket.send_multipart(wire.pack(LIFE, message, self.place))
        self.place += 1

    async def send_raw(self, *parts: bytes) -> None:
        await self._socket.send_multipart(parts)

    async def hear(self, *kinds: str) -> Message:
        async with asyncio.timeout(LIMIT_S):
            while True:
                message = wire.unpack(LIFE, await self._socket.recv_multipart())
                if message.kind in kinds:
                    return message

    async def refusal(self) -> DuettsError:
        return wire.error_from_plain((await self.hear("refused")).take("error", dict))


@asynccontextmanager
async def hosted(tmp_path: Path, speaker: FakeSpeaker, config: ProcessConfig = QUICK) -> AsyncIterator[tuple[Host, Link, Raw]]:
    """A running host, a link to it, and a second client."""
    address = f"ipc://{tmp_path}/h"
    host = Host(address, LIFE, config)

    async def start() -> Started:
        return Started(speaker, VOCABULARY)

    running = asyncio.create_task(host.run(start))
    context = zmq.asyncio.Context()
    link, raw = Link(context, address, LIFE, lambda: None), Raw(context, address)
    link.beat()
    await until(lambda: link.state == "ready")
    try:
        yield host, link, raw
        host.end()
        assert await asyncio.wait_for(running, LIMIT_S) in (host_module.ENDED, host_module.DEAD)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await link.close()
        context.destroy(linger=0)


async def test_speech_and_references_through_both_ends(tmp_path: Path) -> None:
    async with hosted(tmp_path, FakeSpeaker()) as (_, link, _):
        answers = await asyncio.gather(*(collect(link, spoken(20 + seed, seed)) for seed in range(30)))
        for seed, (pcm, outcome) in enumerate(answers):
            assert pcm == whole(seed, 20 + seed)
            assert (outcome.reason, outcome.num_frames, outcome.input_tokens) == ("length", 20 + seed, 3)
        assert (await link.encode(np.full(64, 7, np.float32))).tolist() == [[7] * 8] * 4
        await until(lambda: link.stats.get("finished") == {"length": 30})


async def test_nothing_that_is_sent_ends_the_host(tmp_path: Path) -> None:
    async with hosted(tmp_path, FakeSpeaker()) as (_, link, raw):
        for parts in ([b""], [b"", b""], [b"\xc1"], [b"x" * 1000] * 50, [b"\x80"], [b"\x93\x01\x02\x03"]):
            await raw.send_raw(*parts)
            assert isinstance(await raw.refusal(), WireError)
        good = wire.pack(LIFE, Message("beat", {}), 0)[0]
        for old, new, reason in (
            (b"\x01", b"\x07", "version 7; version 1 is spoken here"),
            (LIFE.encode(), b"4567", "another life"),
        ):
            await raw.send_raw(good.replace(old, new, 1))
            assert reason in str(await raw.refusal())
        for message in (
            Message("dance", {"id": 1}), Message("cancel", {}), Message("cancel", {"id": "x"}), Message("speak", {}),
            Message("speak", {"id": 1, "utterance": None}), Message("encode", {"id": 2}),
            Message("encode", {"id": 2}, (b"abc",)), wire.speak(3, spoken(10**6)),
        ):  # fmt: skip
            await raw.send(message)
            assert isinstance(await raw.refusal(), WireError)
        await raw.send(Message("cancel", {"id": 999}))
        await raw.send(wire.speak(4, spoken(2)))
        assert (await raw.hear("end")).values["id"] == 4
        assert (await collect(link, spoken(4, 9)))[0] == whole(9, 4)


async def test_an_oversized_message_only_loses_its_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 100_000)
    async with hosted(tmp_path, FakeSpeaker()) as (_, link, raw):
        await raw.send_raw(bytes(200_000))
        await asyncio.sleep(0.1)
        assert (await collect(link, spoken(4, 9)))[0] == whole(9, 4)


async def test_a_lost_message_to_the_host_is_told(tmp_path: Path) -> None:
    async with hosted(tmp_path, FakeSpeaker()) as (_, _, raw):
        await raw.send(Message("beat", {}))
        raw.place += 1
        await raw.send(Message("beat", {}))
        assert "message 1 was lost" in str(await raw.refusal())


async def test_one_number_is_one_request(tmp_path: Path) -> None:
    async with hosted(tmp_path, FakeSpeaker(frame_s=0.01)) as (_, _, raw):
        await raw.send(wire.speak(1, spoken(5)))
        await raw.send(wire.speak(1, spoken(5)))
        assert "in use" in str(await raw.refusal())
        assert (await raw.hear("end")).values["number"] == 5


async def test_a_failing_request_fails_alone(tmp_path: Path) -> None:
    async with hosted(tmp_path, FakeSpeaker(frame_s=0.01)) as (_, link, _):
        others = [asyncio.ensure_future(collect(link, spoken(10, seed))) for seed in range(3)]
        pcm, outcome = await collect(link, spoken(request_id="poison"))
        assert (outcome.reason, len(pcm)) == ("failed", 3 * 2 * FRAME)
        assert isinstance(outcome.error, EngineFailure)
        assert "poisoned" not in str(outcome.error)
        assert [pcm for pcm, _ in await asyncio.gather(*others)] == [whole(seed, 10) for seed in range(3)]


async def test_a_cancelled_request_is_ended_in_the_engine(tmp_path: Path) -> None:
    speaker = FakeSpeaker(frame_s=0.01)
    async with hosted(tmp_path, speaker) as (_, link, _):
        for _ in range(3):
            async with aclosing(link.speak(spoken(3000))) as stream:
                assert isinstance(await anext(stream), Chunk)
            await until(lambda: speaker.open == 0)
        waiting = asyncio.ensure_future(collect(link, spoken(3000)))
        await until(lambda: speaker.open == 1)
        waiting.cancel()
        await until(lambda: speaker.open == 0)
        assert speaker.finished == {"aborted": 4}


async def test_a_full_engine_says_when_to_come_back(tmp_path: Path) -> None:
    async with hosted(tmp_path, FakeSpeaker(places=0)) as (_, link, _):
        for asking in (collect(link, spoken()), link.encode(np.ones(8, np.float32))):
            with pytest.raises(Overloaded) as refusal:
                await asking
            assert refusal.value.retry_after_s > 2


async def test_the_work_of_a_silent_client_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = FakeSpeaker(frame_s=0.01)
    async with hosted(tmp_path, speaker) as (_, link, raw):
        await raw.send(wire.speak(1, spoken(3000)))
        await until(lambda: speaker.open == 1)
        with monkeypatch.context() as impatient:
            impatient.setattr(host_module, "CLIENT_SILENCE_S", 0.3)
            await until(lambda: link.beat() or speaker.open == 0)  # another one is heard all the time
        await raw.send(Message("beat", {}))  # it had only slept: it is told, and goes on
        assert isinstance(await raw.refusal(), Aborted)
        await raw.send(wire.speak(2, spoken(3)))
        assert (await raw.hear("end")).values["id"] == 2


async def test_the_work_of_a_client_that_is_gone_ends(tmp_path: Path) -> None:
    speaker = FakeSpeaker(frame_s=0.01)
    async with hosted(tmp_path, speaker) as (_, link, raw):
        await raw.send(wire.speak(1, spoken(3000)))
        await until(lambda: speaker.open == 1)
        raw._socket.close(linger=0)
        await until(lambda: speaker.open == 0)
        assert (await collect(link, spoken(4, 9)))[0] == whole(9, 4)


@pytest.mark.parametrize("knob", ["alive", "stalled"])
async def test_a_host_whose_speaker_has_died_or_stands_still_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knob: str
) -> None:
    speaker = FakeSpeaker(frame_s=600.0 if knob == "stalled" else 0.01)
    async with hosted(tmp_path, speaker) as (host, link, _):
        running = asyncio.ensure_future(collect(link, spoken(3000)))
        await until(lambda: speaker.open == 1)
        if knob == "alive":
            speaker.knobs["alive"] = False
        else:
            monkeypatch.setattr(host_module, "NO_PROGRESS_S", 0.2)
        assert await asyncio.wait_for(asyncio.shield(host._end), LIMIT_S) == host_module.DEAD
        running.cancel()


async def test_nobody_heard_for_long_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosted(tmp_path, FakeSpeaker()) as (host, _, _):
        monkeypatch.setattr(host_module, "ABANDONED_S", 0.2)
        assert await asyncio.wait_for(asyncio.shield(host._end), LIMIT_S) == host_module.ENDED


async def test_a_start_that_fails_is_told_with_its_own_error(tmp_path: Path) -> None:
    async def fail() -> Started:
        raise CheckpointError("model.safetensors is cut off")

    address = f"ipc://{tmp_path}/h"
    host = Host(address, LIFE, QUICK)
    running = asyncio.create_task(host.run(fail))
    await until(lambda: host._state == "failed")  # before anybody has asked
    context = zmq.asyncio.Context()
    link = Link(context, address, LIFE, lambda: None)
    link.beat()
    assert await asyncio.wait_for(running, LIMIT_S) == 1
    await until(lambda: link.state in ("failed", "ended"))
    assert type(link.error) is CheckpointError
    assert str(link.error) == "model.safetensors is cut off"
    await link.close()
    context.destroy(linger=0)


async def test_work_before_the_start_is_over_is_refused(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def start() -> Started:
        await gate.wait()
        return Started(FakeSpeaker(), VOCABULARY)

    address = f"ipc://{tmp_path}/h"
    host = Host(address, LIFE, QUICK)
    running = asyncio.create_task(host.run(start))
    context = zmq.asyncio.Context()
    link = Link(context, address, LIFE, lambda: None)
    link.beat()
    await until(lambda: link.state == "loading")
    with pytest.raises(NotReady, match="loading"):
        await collect(link, spoken())
    gate.set()
    await until(lambda: link.state == "ready")
    host.end()
    assert await running == 0
    await link.close()
    context.destroy(linger=0)


def test_the_errors_that_outcomes_carry() -> None:
    """What a caller sees of a refusal is the class that the engine raised."""
    for error in (InvalidRequest("x", field="input"), DeadlineExceeded("y"), Overloaded("z", retry_after_s=1)):
        assert type(wire.error_from_plain(wire.error_to_plain(error))) is type(error)
