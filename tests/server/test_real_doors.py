"""Every door in front of the real synthesizer and engine on the tiny model: one path behind all of them."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fishaudio
import httpx
import numpy as np
import ormsgpack
import pytest
from fishaudio.types import ReferenceAudio, TTSConfig
from websockets.sync.client import ClientConnection, connect

from duetts.types import Utterance
from tests.audio.listening import hear
from tests.inputs import INPUTS, REF_TEXT, clip
from tests.server.real import NATIVE, Served, serve
from tests.server.test_events import events_of, joined
from tests.server.test_metrics import Numbers
from tests.waiting import LIMIT_S, holding, wait_until

CLIP = clip("control_pcm16.wav")
TEXT = "Hello, how are you?"
COMMON = {"response_format": "pcm", "seed": 5, "max_new_tokens": 20}


class Doors:
    """One text through each door, as PCM."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.ws = served.base.replace("http", "ws", 1)

    def complete(self, text: str, **fields: Any) -> bytes:
        answer = self.served.speak(input=text, **COMMON, **as_json(fields))
        assert answer.status_code == 200, answer.text
        return answer.content

    def chunked(self, text: str, **fields: Any) -> bytes:
        return self.complete(text, stream_format="audio", **fields)

    def events(self, text: str, **fields: Any) -> bytes:
        return joined(events_of(self.complete(text, stream_format="sse", **fields).decode()))

    def msgpack(self, text: str, **fields: Any) -> bytes:
        body = ormsgpack.packb({"input": text, **COMMON, **fields})
        path = "/v1/audio/speech"
        return self.served.http.post(path, content=body, headers={"Content-Type": "application/msgpack"}).content

    def batch(self, text: str, **fields: Any) -> bytes:
        items = [{"input": text}, {"input": ""}]
        answer = self.served.http.post("/v1/audio/speech/batch", json={"items": items, **COMMON, **as_json(fields)})
        return base64.b64decode(answer.json()["results"][0]["audio_data"])

    def fish(self, text: str, **fields: Any) -> bytes:
        answer = self.served.http.post("/v1/tts", json={"text": text, "format": "pcm", **as_json(fish_fields(fields))})
        assert answer.status_code == 200, answer.text
        return answer.content

    def socket(self, text: str, **fields: Any) -> bytes:
        with connect(f"{self.ws}/v1/audio/speech/stream", proxy=None) as talk:
            talk.send(json.dumps({"type": "session.config", **COMMON, **as_json(fields)}))
            talk.send(json.dumps({"type": "input.text", "text": text}))
            talk.send(json.dumps({"type": "input.done"}))
            return heard(talk)

    def live(self, text: str, **fields: Any) -> bytes:
        with connect(f"{self.ws}/v1/tts/live", proxy=None) as talk:
            say(talk, "start", request={"text": "", "format": "pcm", **fish_fields(fields)})
            say(talk, "text", text=text)
            say(talk, "stop")
            return finished(talk)


def as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes in base64, also inside references."""
    if isinstance(fields.get("references"), list):
        inner = [{**entry, "audio": base64.b64encode(entry["audio"]).decode()} for entry in fields["references"]]
        return {**fields, "references": inner}
    return fields


def fish_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {"seed": COMMON["seed"], "max_new_tokens": COMMON["max_new_tokens"], **fields}


def heard(talk: ClientConnection) -> bytes:
    """The audio of one utterance."""
    audio = b""
    while True:
        message = talk.recv(timeout=LIMIT_S)
        if isinstance(message, bytes):
            audio += message
            continue
        told = json.loads(message)
        assert told["type"] != "error", told
        if told["type"] == "session.done":
            return audio


def say(talk: ClientConnection, event: str, **fields: Any) -> None:
    talk.send(ormsgpack.packb({"event": event, **fields}))


def finished(talk: ClientConnection) -> bytes:
    audio = b""
    while (message := ormsgpack.unpackb(talk.recv(timeout=LIMIT_S)))["event"] != "finish":
        audio += message["audio"]
    assert message["reason"] == "stop", message
    return audio


DOORS = ["complete", "chunked", "events", "msgpack", "batch", "fish", "socket", "live"]


@pytest.fixture
def served(tiny_served: Served) -> Served:
    return tiny_served


@pytest.fixture
def asked(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[Utterance]:
    """Every utterance that the engine is given."""
    utterances: list[Utterance] = []
    speaker = served.synthesizer._speaker
    speak = speaker.speak
    monkeypatch.setattr(speaker, "speak", lambda utterance: utterances.append(utterance) or speak(utterance))
    return utterances


@pytest.fixture
def endless(endless_folder: Path) -> Iterator[Served]:
    """Steps take a little time, so that what a test does to a speech is done before its end."""
    for served in serve(endless_folder, max_num_seqs=1, max_queue=1):
        device = device_of(served)
        launch = device.launch
        device.launch = lambda rows, launch=launch: (time.sleep(0.004), launch(rows))[1]
        yield served


def device_of(served: Served) -> Any:
    return served.synthesizer._speaker._engine._device  # type: ignore[attr-defined]


@pytest.mark.parametrize("cloned", [False, True])
def test_every_door_asks_the_engine_the_same_and_gives_the_same_bytes(
    served: Served, asked: list[Utterance], cloned: bool
) -> None:
    doors = Doors(served)
    fields = {"references": [{"audio": CLIP, "text": REF_TEXT}]} if cloned else {}
    first = doors.complete(TEXT, **fields)
    assert first
    (expected,) = asked
    assert (expected.prompt[1:] > 0).any() == cloned
    for name in DOORS:
        asked.clear()
        assert getattr(doors, name)(TEXT, **fields) == first, name
        (found,) = asked
        assert np.array_equal(found.prompt, expected.prompt), name
        kept = ("sampling", "seed", "max_frames", "voice_key", "shared_positions", "max_repeats")
        assert [getattr(found, field) for field in kept] == [getattr(expected, field) for field in kept], name
        assert not found.continues
    served.settled()


def test_every_door_takes_names_and_refuses_tokens(served: Served) -> None:
    """A control token is refused by name wherever it comes in."""
    text = (INPUTS / "texts" / "chat_tokens.txt").read_text(encoding="utf-8")
    path = "/v1/audio/speech"
    answers = [
        served.speak(input=text),
        served.speak(input=text, stream=True),
        served.speak(input="Hi.", ref_audio=base64.b64encode(CLIP).decode(), ref_text=text),
    ]
    assert {answer.json()["error"]["code"] for answer in answers} == {"unsupported_control_token"}
    fish = served.http.post("/v1/tts", json={"text": text})
    assert (fish.status_code, fish.json()["code"]) == (400, "unsupported_control_token")
    batch = served.http.post(path + "/batch", json={"items": [{"input": text}, {"input": "Hi.", "max_new_tokens": 2}]})
    assert [result.get("error", {}).get("code") for result in batch.json()["results"]] == ["unsupported_control_token", None]
    doors = Doors(served)
    with connect(f"{doors.ws}/v1/audio/speech/stream", proxy=None) as talk:
        talk.send(json.dumps({"type": "session.config", "split_granularity": "none"}))
        talk.send(json.dumps({"type": "input.text", "text": text}))
        talk.send(json.dumps({"type": "input.done"}))
        told = [json.loads(talk.recv(timeout=LIMIT_S)) for _ in range(4)]
        assert next(message for message in told if message["type"] == "error")["code"] == "unsupported_control_token"
        assert told[-1]["type"] == "session.done"
    with connect(f"{doors.ws}/v1/tts/live", proxy=None) as talk:
        say(talk, "start", request={"text": text})
        say(talk, "stop")
        message = ormsgpack.unpackb(talk.recv(timeout=LIMIT_S))
        assert (message["event"], message["reason"]) == ("finish", "error")
        assert "control token" in message["message"]


def test_an_utterance_keeps_its_voice_over_the_cuts(served: Served, asked: list[Utterance]) -> None:
    """Word by word: the first clause is spoken before the text is complete, each piece's prompt holds the one before."""
    words = re.findall(r"\S+", "After all the long rain, they went home again, and it was late. Nobody had slept.")
    doors = Doors(served)
    with connect(f"{doors.ws}/v1/audio/speech/stream", proxy=None) as talk:
        talk.send(json.dumps({"type": "session.config", **COMMON, "split_granularity": "clause"}))
        talk.recv(timeout=LIMIT_S)
        for word in words[:7]:
            talk.send(json.dumps({"type": "input.text", "text": word + " "}))
            time.sleep(0.02)
        assert json.loads(talk.recv(timeout=LIMIT_S))["sentence_text"] == "After all the long rain,"
        assert isinstance(talk.recv(timeout=LIMIT_S), bytes)
        for word in words[7:]:
            talk.send(json.dumps({"type": "input.text", "text": word + " "}))
        talk.send(json.dumps({"type": "input.done"}))
        heard(talk)
    assert [utterance.continues for utterance in asked] == [False, True, True, True]
    assert len({utterance.seed for utterance in asked}) == 4
    frames = [(utterance.prompt[1:] > 0).any(axis=0).sum() for utterance in asked]
    assert frames[0] == 0
    assert all(count > 0 for count in frames[1:])
    served.settled()


def test_the_same_text_in_other_messages_gives_the_same_bytes(served: Served) -> None:
    doors = Doors(served)
    text = "One by one they came. Then nobody was there, and it was quiet."
    results = []
    for size in (1, 7, len(text)):
        with connect(f"{doors.ws}/v1/audio/speech/stream", proxy=None) as talk:
            talk.send(json.dumps({"type": "session.config", **COMMON}))
            for start in range(0, len(text), size):
                talk.send(json.dumps({"type": "input.text", "text": text[start : start + size]}))
            talk.send(json.dumps({"type": "input.done"}))
            results.append(heard(talk))
    assert results[0] == results[1] == results[2]
    assert results[0]


def test_a_batch_gives_what_each_item_gives_alone(served: Served) -> None:
    items = [{"input": f"Item number {index}.", "seed": index, "max_new_tokens": 5 + index} for index in range(10)]
    before = served.synthesizer.stats()
    common = {"response_format": "pcm", "ref_audio": base64.b64encode(CLIP).decode(), "ref_text": REF_TEXT}
    answer = served.http.post("/v1/audio/speech/batch", json={"items": items, **common})
    after = served.synthesizer.stats()
    assert answer.json()["succeeded"] == 10
    assert after["reference_misses"] - before["reference_misses"] <= 1  # one clip, encoded once at most
    for item, result in zip(items, answer.json()["results"], strict=True):
        assert base64.b64decode(result["audio_data"]) == served.speak(**item, **common).content
    served.settled()


def test_more_items_than_places(endless: Served) -> None:
    """One place and one in line for six items."""
    items = [{"input": f"Item {index}.", "max_new_tokens": 4} for index in range(6)]
    answer = endless.http.post("/v1/audio/speech/batch", json={"items": items, "response_format": "pcm"})
    assert [result["finish_reason"] for result in answer.json()["results"]] == ["length"] * 6
    endless.settled()


# -- leaving ---------------------------------------------------------------------------------------------------------------

LONG = {"max_new_tokens": 900, "response_format": "pcm"}


def leave_http(served: Served, path: str, body: dict[str, Any]) -> None:
    port = int(served.base.rsplit(":", 1)[1])
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + data)
        wait_until(lambda: served.synthesizer.stats()["running"] > 0)


def leave_socket(served: Served) -> None:
    with connect(f"{Doors(served).ws}/v1/audio/speech/stream", proxy=None) as talk:
        talk.send(json.dumps({"type": "session.config", **LONG}))
        talk.send(json.dumps({"type": "input.text", "text": "A long one."}))
        talk.send(json.dumps({"type": "input.done"}))
        wait_until(lambda: served.synthesizer.stats()["running"] > 0)
        talk.socket.shutdown(socket.SHUT_RDWR)


def leave_live(served: Served) -> None:
    with connect(f"{Doors(served).ws}/v1/tts/live", proxy=None) as talk:
        say(talk, "start", request={"text": "A rather long one without an end.", "format": "pcm"})
        say(talk, "stop")
        wait_until(lambda: served.synthesizer.stats()["running"] > 0)
        talk.socket.shutdown(socket.SHUT_RDWR)


PATH = "/v1/audio/speech"
LEAVERS: dict[str, Callable[[Served], None]] = {
    "complete": lambda served: leave_http(served, PATH, {"input": "A long one.", **LONG}),
    "chunked": lambda served: leave_http(served, PATH, {"input": "A long one.", **LONG, "stream_format": "audio"}),
    "events": lambda served: leave_http(served, PATH, {"input": "A long one.", **LONG, "stream": True}),
    "batch": lambda served: leave_http(served, PATH + "/batch", {"items": [{"input": "A long one."}], **LONG}),
    "fish": lambda served: leave_http(served, "/v1/tts", {"text": "A rather long one without an end.", "format": "pcm"}),
    "socket": leave_socket,
    "live": leave_live,
}


def aborted(served: Served) -> float:
    """What /metrics says of clients that left."""
    text = served.http.get("/metrics").text
    lines = [line for line in text.splitlines() if "stream_aborted_total{" in line and "client_disconnect" in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def held(served: Served) -> float:
    """Requests that are open and pages that they hold, as /metrics says."""
    told = Numbers(served.http.get("/metrics").text)
    return sum(told.get(name, engine="0") for name in ("num_requests_open", "num_requests_running", "kv_pages_used"))


def test_leaving_by_any_door_frees_the_engine_and_is_counted(endless: Served) -> None:
    wait_until(lambda: endless.http.get("/ready").status_code == 200)  # it speaks once to find that out
    for name, leave in LEAVERS.items():
        took: list[float] = []
        while not took or (min(took) > 0.25 and len(took) < 20):  # a busy machine may be late, not twenty times
            began = time.monotonic()
            held(endless)
            look_s = time.monotonic() - began  # which is next to nothing on an idle machine
            before, count = aborted(endless), endless.synthesizer.stats()["finished"].get("aborted", 0)
            leave(endless)
            began = time.monotonic()
            wait_until(lambda: held(endless) == 0)
            took.append(time.monotonic() - began - 5 * look_s)
            wait_until(lambda before=before: aborted(endless) == before + 1)
            assert endless.synthesizer.stats()["finished"].get("aborted", 0) == count + 1, name
            assert endless.synthesizer.stats()["running"] == 0
        assert min(took) <= 0.25, (name, took)
    endless.settled()
    assert endless.speak(input="Hi.", max_new_tokens=2).status_code == 200


def test_a_client_that_drops_and_tries_again_has_one_request_at_most(endless: Served) -> None:
    for _ in range(10):
        LEAVERS["chunked"](endless)
        assert endless.synthesizer.stats()["open"] <= 1
        wait_until(lambda: endless.synthesizer.stats()["open"] == 0)
    endless.settled()


def test_a_cancel_frees_the_engine_and_the_session_speaks_again(endless: Served) -> None:
    with connect(f"{Doors(endless).ws}/v1/audio/speech/stream", proxy=None) as talk:
        talk.send(json.dumps({"type": "session.config", **LONG}))
        talk.send(json.dumps({"type": "input.text", "text": "A long one. And another one. "}))
        while not isinstance(talk.recv(timeout=LIMIT_S), bytes):
            pass
        talk.send(json.dumps({"type": "input.cancel"}))
        wait_until(lambda: endless.synthesizer.stats()["open"] == 0)
        assert heard(talk) is not None
        talk.send(json.dumps({"type": "session.config", **LONG, "max_new_tokens": 3}))
        talk.send(json.dumps({"type": "input.text", "text": "Short."}))
        talk.send(json.dumps({"type": "input.done"}))
        assert len(heard(talk)) == 3 * 2 * 2048
    endless.settled()


def test_a_continued_utterance_needs_no_place_in_line(endless: Served) -> None:
    """One place and one in line: while both are taken by others, a session goes on with its next sentence."""
    with ThreadPoolExecutor(2) as pool, connect(f"{Doors(endless).ws}/v1/audio/speech/stream", proxy=None) as talk:
        talk.send(json.dumps({"type": "session.config", "max_new_tokens": 30, "response_format": "pcm"}))
        talk.send(json.dumps({"type": "input.text", "text": "A first one. A second one. A third"}))
        talk.recv(timeout=LIMIT_S)
        with holding(device_of(endless), "launch"):
            wait_until(lambda: endless.synthesizer.stats()["open"] == 1)
            other = pool.submit(endless.speak, input="Hi.", max_new_tokens=60)
            wait_until(lambda: endless.synthesizer.stats()["open"] == 2)
        talk.send(json.dumps({"type": "input.done"}))
        assert len(heard(talk)) == 3 * 30 * 2 * 2048
        assert other.result().status_code == 200


# -- their clients -----------------------------------------------------------------------------------------------------------


def test_fish_audios_client_speaks_and_clones(served: Served) -> None:
    voice = ReferenceAudio(audio=CLIP, text=REF_TEXT)
    with fishaudio.FishAudio(api_key="none", base_url=served.base) as fish:
        config = TTSConfig(max_new_tokens=20)
        plain = fish.tts.convert(text=TEXT, config=config)
        cloned = b"".join(fish.tts.stream(text=TEXT, references=[voice], format="wav", config=config, model="s2-pro"))
        live = b"".join(fish.tts.stream_websocket(iter([TEXT, " Fine."]), references=[voice], format="wav", config=config))
    for audio in (plain, cloned, live):
        samples, rate = hear(audio)
        assert rate == 44100
        assert len(samples) > 1000  # one frame may be all that random weights say
    served.settled()


async def test_many_sockets_at_once_give_each_its_own_words(served: Served) -> None:
    doors = Doors(served)
    texts = [f"Line {index} says what nobody else says." for index in range(12)]
    alone = [await asyncio.to_thread(doors.socket, text) for text in texts[:4]]
    together = await asyncio.gather(*(asyncio.to_thread(doors.socket, text) for text in texts))
    assert together[:4] == alone
    assert len(set(together)) == len(texts)
    lives = await asyncio.gather(*(asyncio.to_thread(doors.live, text) for text in texts[:4]))
    assert lives == alone
    served.settled()


def test_the_models_object_still_speaks_openai(served: Served) -> None:
    assert httpx.get(f"{served.base}/v1/models/{NATIVE}", trust_env=False).json()["id"] == NATIVE
