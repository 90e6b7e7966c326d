"""Bodies: JSON that is none, forms, and sizes."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ormsgpack
import pytest

from tests.inputs import INPUTS, REF_TEXT, clip
from tests.server.conftest import LIMITS, Door, error_of

PATH = "/v1/audio/speech"


def post(door: Door, content: Any, content_type: str = "application/json") -> httpx.Response:
    return door.http.post(PATH, content=content, headers={"Content-Type": content_type})


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"input":', "invalid_value"),
        (b"", "invalid_value"),
        (b"[]", "invalid_type"),
        (b'"text"', "invalid_type"),
        (b"null", "invalid_type"),
        (b"[" * 100_000, "invalid_value"),
        (b'{"input": "x", "seed": ' + b"1" * 5000 + b"}", "invalid_value"),
        ((INPUTS / "texts" / "invalid_utf8.bin").read_bytes(), "invalid_value"),
        (b'{"input": "\xff\xfe"}', "invalid_value"),
        (b'{"foo": [' + b"[]," * 500_000 + b"[]]}", "invalid_value"),
    ],
)
def test_what_is_no_json_object_is_refused(door: Door, body: bytes, code: str) -> None:
    error_of(post(door, body), 400, code, None)
    assert door.speak().status_code == 200


def test_repeated_names_are_refused(door: Door) -> None:
    error_of(post(door, '{"input": "a", "seed": 1, "seed": 2}'), 400, "invalid_value", "seed")
    error_of(post(door, '{"input": "a", "extra_params": {"top_k": 1, "top_k": 2}}'), 400, "invalid_value", "top_k")


def test_a_byte_order_mark_is_no_part_of_the_json(door: Door) -> None:
    assert post(door, b"\xef\xbb\xbf" + b'{"input": "Hello."}').status_code == 200


def test_content_types(door: Door) -> None:
    assert door.http.post(PATH, content=b'{"input": "Hello."}').status_code == 200  # none at all
    assert post(door, '{"input": "Hello."}', "Application/JSON; charset=utf-8").status_code == 200
    for content_type in ("text/plain", "application/cbor", "application/x-www-form-urlencoded", "", ";"):
        error_of(post(door, b"input=Hello", content_type), 415, "unsupported_media_type", None)


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_refused(door: Door, chunked: bool) -> None:
    body = json.dumps({"input": "x", "foo": "y" * LIMITS.max_body_bytes}).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    answer = post(door, pieces() if chunked else body)
    assert str(LIMITS.max_body_bytes) in error_of(answer, 413, "payload_too_large", None)
    assert door.speak().status_code == 200


def test_large_references_are_refused_before_they_are_decoded(door: Door) -> None:
    audio = "A" * (LIMITS.reference_bytes * 4 // 3 + 8)
    message = door.refused(400, "reference_too_large", "ref_audio", input="Hi.", ref_audio=audio, ref_text="x")
    assert str(LIMITS.reference_bytes) in message


def test_a_form_with_files_and_numbers(door: Door) -> None:
    data = {
        "input": "5", "seed": "11", "temperature": "0.5", "stream_format": "audio", "stream": "true", "ref_text": REF_TEXT,
        "extra_params": '{"top_k": 3}', "voice": "default", "foo": "bar",
    }  # fmt: skip
    files = {"ref_audio": ("any.name", clip("messenger.ogg"), "text/plain")}
    answer = door.http.post(PATH, data=data, files=files)
    assert answer.status_code == 200, answer.text
    request = door.service.requests[0]
    assert (request.text, request.seed, request.temperature, request.top_k) == ("5", 11, 0.5, 3)
    assert request.references[0].audio == clip("messenger.ogg")
    assert request.references[0].text == REF_TEXT
    assert answer.headers["x-ignored-fields"] == "foo"


def test_a_form_with_two_files_of_more_than_a_part_in_memory(door: Door) -> None:
    files = [("ref_audio", ("a", clip(name), None)) for name in ("stereo_96k_24bit.wav", "stereo_96k_24bit.wav")]
    answer = door.http.post(PATH, data={"input": "Hi.", "ref_text": ["one", "two"]}, files=files)
    assert answer.status_code == 200, answer.text
    assert [reference.text for reference in door.service.requests[0].references] == ["one", "two"]


@pytest.mark.parametrize(
    ("data", "code", "field"),
    [
        ({"input": "x", "seed": "seven"}, "invalid_type", "seed"),
        ({"input": "x", "seed": ["1", "2"]}, "invalid_type", "seed"),
        ({"input": ["a", "b"]}, "invalid_type", "input"),
        ({"input": "x", "temperature": "NaN"}, "out_of_range", "temperature"),
        ({"input": "x", "stream": "yes"}, "invalid_type", "stream"),
        ({}, "missing_field", "input"),
    ],
)
def test_form_fields_are_checked_as_those_of_json(door: Door, data: dict[str, Any], code: str, field: str) -> None:
    error_of(door.http.post(PATH, data=data, files={"foo": b"x"}), 400, code, field)


@pytest.mark.parametrize("content_type", ["application/msgpack", "application/x-msgpack", "Application/vnd.msgpack; v=5"])
def test_msgpack_is_json_with_bytes(door: Door, content_type: str) -> None:
    fields = {
        "input": "Hi.",
        "seed": 3,
        "speed": 1.5,
        "ref_audio": clip("control_pcm16.wav"),
        "ref_text": REF_TEXT,
        "top_k": None,
    }
    answer = post(door, ormsgpack.packb(fields), content_type)
    assert answer.status_code == 200, answer.text
    request = door.service.requests[0]
    assert (request.text, request.seed, request.references[0].audio) == ("Hi.", 3, clip("control_pcm16.wav"))
    in_list = {"input": "Hi.", "references": [{"audio": clip("control_pcm16.wav"), "text": REF_TEXT}]}
    assert post(door, ormsgpack.packb(in_list), content_type).status_code == 200
    assert door.service.requests[1].references == request.references


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"input": b"Hi."}, "invalid_type", "input"),
        ({"input": "x", "seed": b"1"}, "invalid_type", "seed"),
        ({"input": "x", "voice": {"id": b"a"}}, "invalid_type", "voice.id"),
        ({"input": "x", "temperature": float("inf")}, "out_of_range", "temperature"),
        ({"input": "x", "references": [{"audio": b"x", "text": b"y"}]}, "invalid_type", "references"),
        ({"input": "x", "extra_params": {"top_k": b"1"}}, "invalid_type", "top_k"),
        ({b"x": 1}, "invalid_value", None),
    ],
)
def test_fields_of_msgpack_are_checked_as_those_of_json(
    door: Door, fields: dict[Any, Any], code: str, field: str | None
) -> None:
    packed = b"\x81\xc4\x01x\x01" if b"x" in fields else ormsgpack.packb(fields)
    error_of(post(door, packed, "application/msgpack"), 400, code, field)


def test_a_msgpack_bomb_is_refused(door: Door) -> None:
    for bomb in (b"\x91" * 100_000, b"\x81\xa1a\xdd\x00\x0f\xff\xff" + b"\x90" * 0xFFFFF, b"\xdf\xff\xff\xff\xff"):
        error_of(post(door, bomb, "application/msgpack"), 400, "invalid_value", None)
    assert door.speak().status_code == 200


def test_files_are_no_text(door: Door) -> None:
    error_of(door.http.post(PATH, files={"input": ("a.txt", b"Hello.")}), 400, "invalid_type", "input")


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"--b\r\n", "multipart/form-data; boundary=b"),
        (b"rubbish", "multipart/form-data; boundary=b"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", "multipart/form-data; boundary=b"),
        (b'--b\r\nContent-Disposition: form-data; name="input"\r\n\r\nHello', "multipart/form-data; boundary=b"),
        (b'--b\r\nContent-Disposition: form-data; name="input"\r\n\r\n\xff\r\n--b--\r\n', "multipart/form-data; boundary=b"),
        (
            b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n' * 70 + b"--b--\r\n",
            "multipart/form-data; boundary=b",
        ),
        (b"", "multipart/form-data"),
        (b"", f"multipart/form-data; boundary={'b' * 300}"),
    ],
)
def test_broken_forms_are_refused(door: Door, body: bytes, content_type: str) -> None:
    error_of(post(door, body, content_type), 400, "invalid_value", None)


def test_an_unpaired_surrogate_in_a_message_is_no_failure(door: Door) -> None:
    message = error_of(post(door, '{"input": "Hello.", "voice": "\\ud800"}'), 400, "unknown_voice", "voice")
    assert r"\ud800" in message
    error_of(post(door, '{"\\ud800": 1, "\\ud800": 2}'), 400, "invalid_value", "\ud800")
