"""Every field and every trial request over every door that it exists on: one validator, whatever the door."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ormsgpack
import pytest
from websockets.sync.client import ClientConnection, connect

from duetts.audio.encode import with_exact_sizes
from duetts.server.fish import NAMES, SAME
from duetts.server.schemas import FIELDS
from duetts.types import SpeechRequest
from tests.inputs import REF_TEXT, clip
from tests.server.conftest import Door
from tests.server.sine import RATE
from tests.server.test_trial_requests import ROWS, filled
from tests.waiting import LIMIT_S

CLIP = clip("control_pcm16.wav")
REF = base64.b64encode(CLIP).decode()
TEXT = "Hello there."
# A value for each field that has an effect, with what it needs beside it.
SENT: dict[str, dict[str, Any]] = {
    "model": {"model": "second"}, "voice": {"voice": "anna"}, "speaker": {"speaker": "Anna"},
    "reference_id": {"reference_id": "ANNA"}, "response_format": {"response_format": "flac"},
    "sample_rate": {"sample_rate": 16000}, "bitrate": {"bitrate": 64, "response_format": "mp3"}, "speed": {"speed": 1.5},
    "volume": {"volume": -6}, "volume_multiplier": {"volume_multiplier": 2}, "normalize_loudness": {"normalize_loudness": True},
    "ref_audio": {"ref_audio": REF, "ref_text": REF_TEXT}, "ref_text": {"ref_audio": [REF, REF], "ref_text": ["one", "two"]},
    "references": {"references": [{"audio": REF, "text": REF_TEXT}]}, "max_new_tokens": {"max_new_tokens": 17},
    "chunk_length": {"chunk_length": 150}, "temperature": {"temperature": 0.5}, "top_p": {"top_p": 0.4}, "top_k": {"top_k": 7},
    "repetition_penalty": {"repetition_penalty": 1.1}, "seed": {"seed": 77}, "timeout": {"timeout": 12.5},
    "extra_params": {"extra_params": {"top_k": 3}}, "initial_codec_chunk_frames": {"initial_codec_chunk_frames": 3},
    "instructions": {"instructions": "calm and low"}, "normalize": {"normalize": True}, "language": {"language": "en"},
    "pronunciation": {"pronunciation": {"hello": "hallo"}},
}  # fmt: skip
DELIVERY = {"input", "stream", "stream_format"}
FISH = {NAMES.get(name, name): name for name in (*NAMES, *SAME) if NAMES.get(name, name) != "input"}


def body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"input": TEXT, "seed": 5, **fields}


def complete(door: Door, fields: dict[str, Any]) -> tuple[bytes, str]:
    answer = door.http.post("/v1/audio/speech", json=body(fields))
    assert answer.status_code == 200, answer.text
    return answer.content, answer.headers["x-model"]


def msgpack(door: Door, fields: dict[str, Any]) -> tuple[bytes, str]:
    packed = ormsgpack.packb(body(fields))
    answer = door.http.post("/v1/audio/speech", content=packed, headers={"Content-Type": "application/msgpack"})
    assert answer.status_code == 200, answer.text
    return answer.content, answer.headers["x-model"]


def form(door: Door, fields: dict[str, Any]) -> tuple[bytes, str]:
    """Texts as they are, several texts as parts of one name, and anything else as JSON."""
    data = {}
    for name, value in body(fields).items():
        texts = [value] if isinstance(value, str) else value
        plain = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
        data[name] = texts if plain else json.dumps(value)
    answer = door.http.post("/v1/audio/speech", data=data, files={"unused": b""})
    assert answer.status_code == 200, answer.text
    return answer.content, answer.headers["x-model"]


def batch(door: Door, fields: dict[str, Any]) -> tuple[bytes, str]:
    """The first of two items has the fields itself, the other one by default; both are the same."""
    sent = {"items": [{"seed": 5, "input": TEXT, **fields}], "response_format": "wav"} | {}
    result = door.http.post("/v1/audio/speech/batch", json=sent).json()["results"][0]
    assert result["status"] == "success", result
    by_default = door.http.post("/v1/audio/speech/batch", json={"items": [{"input": TEXT}], "seed": 5, **fields})
    assert by_default.json()["results"][0]["audio_data"] == result["audio_data"]
    return base64.b64decode(result["audio_data"]), ""


def socket(door: Door, fields: dict[str, Any]) -> tuple[bytes, str]:
    with connect(f"ws://127.0.0.1:{door.port}/v1/audio/speech/stream", proxy=None, max_size=None) as talk:
        talk.send(json.dumps({"type": "session.config", "seed": 5, "stream_audio": False, **fields}))
        configured = json.loads(talk.recv(timeout=LIMIT_S))
        assert configured["type"] == "session.configured", configured
        talk.send(json.dumps({"type": "input.text", "text": TEXT}))
        talk.send(json.dumps({"type": "input.done"}))
        return heard(talk), configured["model"]


def heard(talk: ClientConnection) -> bytes:
    audio = b""
    while True:
        message = talk.recv(timeout=LIMIT_S)
        if isinstance(message, bytes):
            audio += message
        elif json.loads(message)["type"] == "session.done":
            return audio
        else:
            assert json.loads(message)["type"] != "error", message


def in_fish(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields under Fish Audio's names."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        theirs = {"bitrate": "mp3_bitrate"}.get(name) or FISH[name]
        outer, _, inner = theirs.partition(".")
        found[outer] = {**found.get(outer, {}), inner: value} if inner else value
    return found


def fish(door: Door, fields: dict[str, Any]) -> tuple[bytes, str]:
    answer = door.http.post("/v1/tts", json={"text": TEXT, "seed": 5, "streaming": False, **in_fish(fields)})
    assert answer.status_code == 200, answer.text
    return answer.content, answer.headers["x-model"]


def live(door: Door, fields: dict[str, Any]) -> tuple[bytes, str]:
    with connect(f"ws://127.0.0.1:{door.port}/v1/tts/live", proxy=None, max_size=None) as talk:
        talk.send(ormsgpack.packb({"event": "start", "request": {"text": TEXT, "seed": 5, **in_fish(fields)}}))
        talk.send(ormsgpack.packb({"event": "stop"}))
        audio = b""
        while (message := ormsgpack.unpackb(talk.recv(timeout=LIMIT_S, decode=False)))["event"] == "audio":
            audio += message["audio"]
        assert message["reason"] == "stop", message
        name, rate = fields.get("response_format", "wav"), fields.get("sample_rate", RATE)
        return with_exact_sizes(name, rate, audio), ""


OWN_DOORS: list[Callable[[Door, dict[str, Any]], tuple[bytes, str]]] = [msgpack, form, batch, socket]
FISH_DOORS: list[Callable[[Door, dict[str, Any]], tuple[bytes, str]]] = [fish, live]


def asked(door: Door) -> SpeechRequest:
    """What the synthesizer was asked last, but for what differs on purpose."""
    return replace(door.service.requests[-1], request_id="", streaming=False, voice_field="", continues=None)


def test_every_field_has_a_value_here() -> None:
    acting = {name for name, field in FIELDS.items() if field.only is None and not field.hint}
    assert SENT.keys() == acting - DELIVERY


@pytest.mark.parametrize("name", SENT)
def test_a_field_means_the_same_on_every_door(door: Door, name: str) -> None:
    upload = {"name": "Anna", "consent": "c", "ref_text": REF_TEXT}
    assert door.http.post("/v1/audio/voices", data=upload, files={"audio_sample": CLIP}).status_code == 201
    plain, _ = complete(door, {})
    unchanged = asked(door)
    fields = SENT[name]
    expected, model = complete(door, fields)
    request = asked(door)
    assert (expected, request, model) != (plain, unchanged, "fishaudio/s2-pro"), f"{name} has no effect"
    on_fish = all(field in FISH or field == "bitrate" for field in fields)
    for speak in OWN_DOORS + (FISH_DOORS if on_fish else []):
        audio, used = speak(door, fields)
        assert audio == expected, speak.__name__
        assert asked(door) == request, speak.__name__
        assert used in ("", model), speak.__name__


def test_a_missing_feature_is_refused_on_every_door(door: Door) -> None:
    """By its name, and before anything is spoken."""
    values: dict[str, Any] = {"string": "x", "number": 3, "integer": 3, "boolean": True, "object": {"a": "b"}}
    for name in (name for name, field in FIELDS.items() if field.only is not None):
        fields = {name: values[FIELDS[name].types[0]]}
        packed = ormsgpack.packb(body(fields))
        form = {key: value if isinstance(value, str) else json.dumps(value) for key, value in body(fields).items()}
        answers = [
            door.http.post("/v1/audio/speech", json=body(fields)),
            door.http.post("/v1/audio/speech", content=packed, headers={"Content-Type": "application/msgpack"}),
            door.http.post("/v1/audio/speech", data=form, files={"unused": b""}),
        ]
        batch = {"items": [body(fields), {"input": TEXT}]}
        errors = [answer.json()["error"] for answer in answers]
        errors.append(door.http.post("/v1/audio/speech/batch", json=batch).json()["results"][0]["error"])
        with connect(f"ws://127.0.0.1:{door.port}/v1/audio/speech/stream", proxy=None) as talk:
            talk.send(json.dumps({"type": "session.config", **fields}))
            errors.append(json.loads(talk.recv(timeout=LIMIT_S)))
        assert {(error["code"], error["param"]) for error in errors} == {("unsupported_field", name)}, errors
    assert {request.text for request in door.service.requests} <= {TEXT}


# -- the trial requests ------------------------------------------------------------------------------------------------------

TRIALS = [row for row in ROWS if row["body"] and not {"stream", "stream_format"} & row["body"].keys()]


def sent(row: dict[str, Any]) -> dict[str, Any]:
    return {name: filled(value) for name, value in row["body"].items()}


@pytest.mark.parametrize("row", TRIALS, ids=lambda row: row["id"])
def test_trial_requests_in_msgpack(door: Door, row: dict[str, Any]) -> None:
    answer = door.http.post(
        "/v1/audio/speech", content=ormsgpack.packb(sent(row)), headers={"Content-Type": "application/msgpack"}
    )
    assert answer.status_code in row["status_allowed"], answer.text


@pytest.mark.parametrize("row", TRIALS, ids=lambda row: row["id"])
def test_trial_requests_in_a_batch(door: Door, row: dict[str, Any]) -> None:
    good, tried = door.http.post("/v1/audio/speech/batch", json={"items": [{"input": "Fine."}, sent(row)]}).json()["results"]
    assert good["status"] == "success"
    if tried["status"] == "success":
        assert 200 in row["status_allowed"]
    else:
        assert row["status_allowed"] != [200], tried
        assert tried["error"]["type"].endswith("_error")


@pytest.mark.parametrize("row", TRIALS, ids=lambda row: row["id"])
def test_trial_requests_over_the_socket(door: Door, row: dict[str, Any]) -> None:
    fields = sent(row)
    text = fields.pop("input", None)
    with connect(f"ws://127.0.0.1:{door.port}/v1/audio/speech/stream", proxy=None, max_size=None) as talk:
        talk.send(json.dumps({"type": "session.config", **fields}))
        configured = json.loads(talk.recv(timeout=LIMIT_S))
        if configured["type"] == "error":
            assert row["status_allowed"] != [200], configured
            return
        talk.send(json.dumps({"type": "input.text", "text": text}))
        talk.send(json.dumps({"type": "input.done"}))
        audio, errors = b"", []
        while not (isinstance(message := talk.recv(timeout=LIMIT_S), str) and '"session.done"' in message):
            audio += message if isinstance(message, bytes) else b""
            errors += [message] if isinstance(message, str) and '"error"' in message[:20] else []
        if audio:
            assert 200 in row["status_allowed"]
            assert not errors
        else:
            assert row["status_allowed"] != [200], errors


def for_fish(row: dict[str, Any]) -> bool:
    """Whether it can be said in Fish Audio's names: its models and OpenAI's voices aren't known there."""
    own = {"model": "fishaudio/s2-pro", "voice": "default"}
    body = row["body"]
    return body.keys() - own.keys() - {"input"} <= FISH.keys() and all(body.get(name, own[name]) == own[name] for name in own)


@pytest.mark.parametrize("row", [row for row in TRIALS if for_fish(row)], ids=lambda row: row["id"])
def test_trial_requests_at_fish_audios_door(door: Door, row: dict[str, Any]) -> None:
    fields = {name: value for name, value in sent(row).items() if name not in {"model", "voice", "input"}}
    text = {"text": sent(row)["input"]} if "input" in row["body"] else {}
    answer = door.http.post("/v1/tts", json={**in_fish(fields), **text})
    unknown = "reference_id" in fields  # A voice that isn't there is 404 at that door.
    assert answer.status_code in ([404] if unknown else row["status_allowed"]), answer.text
