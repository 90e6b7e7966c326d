"""Clips in a request: every way to write one, and every way that is refused."""

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.inputs import REF_TEXT, REFUSED_CLIPS, clip, clips
from tests.server.conftest import Door

CLIP = clip("control_pcm16.wav")
BASE64 = base64.b64encode(CLIP).decode()
DATA = f"data:audio/wav;base64,{BASE64}"


@pytest.mark.parametrize(
    "audio",
    [
        DATA,
        BASE64,
        BASE64.rstrip("="),
        "\n".join(BASE64[at : at + 76] for at in range(0, len(BASE64), 76)),
        base64.urlsafe_b64encode(CLIP).decode(),
        f"data:text/plain;charset=x;base64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"DATA:audio/wav;BASE64,{BASE64}",
        [DATA],
    ],
    ids=["data", "bare", "unpadded", "wrapped", "urlsafe", "media type", "no type", "upper case", "list"],
)
def test_ways_to_write_a_clip(door: Door, audio: Any) -> None:
    assert door.speak(ref_audio=audio, ref_text=REF_TEXT).status_code == 200
    assert [(r.audio, r.text) for r in door.service.requests[0].references] == [(CLIP, REF_TEXT)]
    assert len(door.service.waves) == 1


@pytest.mark.parametrize("key", ["audio", "ref_audio", "audio_path", "data"])
def test_lists_of_references(door: Door, key: str) -> None:
    entries = [{key: DATA, "text": "one"}, {key: BASE64, "text": "two", "media_type": "audio/wav"}]
    assert door.speak(references=entries).status_code == 200
    assert [reference.text for reference in door.service.requests[0].references] == ["one", "two"]


def test_keys_of_references_that_nobody_reads_are_listed(door: Door) -> None:
    entries = [{"audio": DATA, "text": "one", "media_type": "audio/wav", "colour": 1}, {"data": DATA, "text": "two", "b\nc": 2}]
    assert door.speak(references=entries, whim=1).headers["x-ignored-fields"] == "whim, references.b%0Ac, references.colour"


def test_lists_of_ref_audio(door: Door) -> None:
    assert door.speak(ref_audio=[DATA, BASE64], ref_text=["one", "two"]).status_code == 200
    assert [reference.text for reference in door.service.requests[0].references] == ["one", "two"]


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"ref_audio": DATA}, "reference_text_required", "ref_text"),
        ({"ref_text": "words"}, "invalid_value", "ref_audio"),
        ({"ref_audio": DATA, "ref_text": ["a", "b"]}, "invalid_value", "ref_text"),
        ({"ref_audio": [DATA, DATA], "ref_text": "a"}, "invalid_value", "ref_text"),
        ({"ref_audio": [], "ref_text": "a"}, "invalid_value", "ref_audio"),
        ({"ref_audio": [5], "ref_text": "a"}, "invalid_type", "ref_audio"),
        ({"ref_audio": DATA, "ref_text": [5]}, "invalid_type", "ref_text"),
        ({"ref_audio": "data:audio/wav;base64,@@@@", "ref_text": "a"}, "invalid_value", "ref_audio"),
        ({"ref_audio": "data:audio/wav;base64", "ref_text": "a"}, "invalid_value", "ref_audio"),
        ({"ref_audio": "data:audio/wav,plain", "ref_text": "a"}, "invalid_value", "ref_audio"),
        ({"ref_audio": "äöü", "ref_text": "a"}, "invalid_value", "ref_audio"),
        ({"ref_audio": "AAAAA", "ref_text": "a"}, "invalid_value", "ref_audio"),
        ({"ref_audio": "ftp://h/a.wav", "ref_text": "a"}, "invalid_value", "ref_audio"),
        ({"ref_audio": "gopher:x", "ref_text": "a"}, "invalid_value", "ref_audio"),
        ({"references": []}, "invalid_value", "references"),
        ({"references": ["x"]}, "invalid_type", "references"),
        ({"references": [{"text": "a"}]}, "invalid_value", "references"),
        ({"references": [{"audio": DATA, "data": DATA, "text": "a"}]}, "invalid_value", "references"),
        ({"references": [{"audio": DATA}]}, "reference_text_required", "references"),
        ({"references": [{"audio": DATA, "text": 5}]}, "invalid_type", "references"),
        ({"references": [{"vq_codes": [[1]], "audio": DATA, "text": "a"}]}, "invalid_value", "references"),
        ({"references": [{"vq_codes": [[1]]}]}, "reference_text_required", "references"),
        ({"references": [{"audio": DATA, "text": "a"}], "ref_audio": DATA}, "invalid_value", "references"),
        ({"references": [{"audio": DATA, "text": "a"}], "ref_text": "a"}, "invalid_value", "references"),
    ],
)
def test_shapes_that_are_refused(door: Door, fields: dict[str, Any], code: str, field: str) -> None:
    door.refused(400, code, field, input="Hello.", **fields)
    assert not door.service.requests


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:1/x.wav",
        "http://169.254.169.254/latest/meta-data",
        "http://2130706433/x.wav",
        "https://public.example/redirects-to-loopback",
        "HTTP://127.0.0.1:1/x.wav",
    ],
)
def test_addresses_are_refused_unvisited(door: Door, address: str) -> None:
    message = door.refused(403, "media_domain_forbidden", "ref_audio", input="Hello.", ref_audio=address, ref_text="x")
    assert address not in message


def test_local_files_are_refused_alike_whether_they_exist(door: Door, tmp_path: Path) -> None:
    there = tmp_path / "voice.wav"
    there.write_bytes(CLIP)
    addresses = [
        f"file://{there}", f"file://{tmp_path}/missing.wav", f"FILE:{there}", str(there), f"{tmp_path}/missing", "voice.wav",
        "~/voice", "../voice", ".\\voice", "voices\\a",
    ]  # fmt: skip
    messages = {
        door.refused(403, "local_media_forbidden", "ref_audio", input="Hello.", ref_audio=address, ref_text="x")
        for address in addresses
    }
    assert len(messages) == 1


@pytest.mark.parametrize("row", clips(), ids=lambda row: row["file"].removeprefix("audio/"))
def test_every_clip(door: Door, row: dict[str, Any]) -> None:
    name = row["file"].removeprefix("audio/")
    audio = f"data:audio/wav;base64,{base64.b64encode(clip(name)).decode()}"
    if name in REFUSED_CLIPS:
        door.refused(400, REFUSED_CLIPS[name], "ref_audio", input="Hello.", ref_audio=audio, ref_text=REF_TEXT)
    else:
        assert door.speak(ref_audio=audio, ref_text=REF_TEXT).status_code == 200
        assert len(door.service.waves[0]) / 44100 == pytest.approx(row["seconds"], abs=0.06)
    assert door.speak().status_code == 200
