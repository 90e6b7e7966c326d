"""Every field of a body: honoured, refused by name, or listed as ignored."""

import json
from dataclasses import replace
from typing import Any

import pytest

from duetts.audio.formats import FORMATS
from duetts.server.schemas import FIELDS
from tests.server.conftest import NATIVE, Door


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input", 5),
        ("input", ["a"]),
        ("input", True),
        ("speed", "1.2"),
        ("speed", True),
        ("temperature", "0.7"),
        ("top_k", 3.5),
        ("top_k", True),
        ("seed", "7"),
        ("seed", 7.0),
        ("max_new_tokens", False),
        ("stream", "true"),
        ("stream", 1),
        ("stream_format", 1),
        ("response_format", 3),
        ("sample_rate", "44100"),
        ("model", 1),
        ("voice", 1),
        ("voice", ["default"]),
        ("timeout", "3"),
        ("extra_params", []),
        ("references", {}),
        ("ref_audio", {}),
        ("instructions", 4),
        ("language", 4),
        ("initial_codec_chunk_frames", "2"),
        ("normalize", 1),
        ("volume", "3"),
        ("volume", True),
        ("volume_multiplier", "2"),
        ("normalize_loudness", 1),
        ("sample_rate", 44100.0),
        ("sample_rate", True),
        ("bitrate", "128"),
    ],
)
def test_wrong_types_are_named(door: Door, name: str, value: Any) -> None:
    message = door.refused(400, "invalid_type", name, **{"input": "Hello.", name: value})
    assert message.startswith(f"{name} must be of type ")
    assert not door.service.requests


@pytest.mark.parametrize(
    ("name", "number"), [("speed", "1e999"), ("temperature", "NaN"), ("seed", "-Infinity"), ("top_k", "1e999")]
)
def test_numbers_that_are_none_are_out_of_range(door: Door, name: str, number: str) -> None:
    raw = f'{{"input": "Hello.", "{name}": {number}}}'
    answer = door.http.post("/v1/audio/speech", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("out_of_range", name)


@pytest.mark.parametrize("speed", [0, -1, 0.2, 4.5, 10**400])
def test_speed_out_of_range(door: Door, speed: float) -> None:
    message = door.refused(400, "out_of_range", "speed", input="Hello.", speed=speed)
    assert "0.25 and 4" in message or speed > 2**64


@pytest.mark.parametrize(
    ("fields", "code", "field", "words"),
    [
        ({"volume": 20.5}, "out_of_range", "volume", "-20 and 20"),
        ({"volume_multiplier": 0}, "out_of_range", "volume_multiplier", "0.1 and 10"),
        ({"volume_multiplier": 2, "volume": 1}, "invalid_value", "volume_multiplier", "one of them"),
        ({"sample_rate": 44000}, "unsupported_sample_rate", "sample_rate", "8000, 11025, 12000, 16000, 22050, 24000"),
        ({"sample_rate": 44100, "response_format": "opus"}, "unsupported_sample_rate", "sample_rate", "24000, 48000"),
        ({"sample_rate": 0}, "unsupported_sample_rate", "sample_rate", "44100"),
        ({"bitrate": 100, "response_format": "mp3"}, "invalid_value", "bitrate", "64, 96, 128, 192"),
        ({"bitrate": 128}, "invalid_value", "bitrate", "wav"),
        ({"stream_format": "mp3"}, "invalid_value", "stream_format", "audio, sse"),
        ({"response_format": "m4a"}, "invalid_value", "response_format", "wav, pcm, mp3, opus, flac, aac"),
    ],
    ids=str,
)
def test_outputs_that_cannot_be_are_named(door: Door, fields: dict[str, Any], code: str, field: str, words: str) -> None:
    assert words in door.refused(400, code, field, input="Hello.", **fields)
    assert not door.service.requests


def test_a_format_whose_encoder_is_missing(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "opus", replace(FORMATS["opus"], codec="libnone"))
    message = door.refused(400, "format_unavailable", "response_format", input="Hi.", response_format="opus")
    assert "libnone" in message
    assert door.http.get(f"/v1/models/{NATIVE}").json()["formats"] == ["wav", "pcm", "mp3", "flac", "aac"]


@pytest.mark.parametrize("name", sorted(name for name, field in FIELDS.items() if field.only is not None))
def test_fields_of_missing_features_are_refused(door: Door, name: str) -> None:
    values = {"string": "x", "number": 3, "integer": 3, "boolean": True, "object": {"a": "b"}}
    value = values[FIELDS[name].types[0]]
    door.refused(400, "unsupported_field", name, input="Hello.", **{name: value})
    assert door.speak(**{name: None}).status_code == 200
    for neutral in FIELDS[name].only or ():
        assert door.speak(**{name: neutral}).status_code == 200


def test_neutral_values_are_accepted(door: Door) -> None:
    output = {"speed": 1, "sample_rate": 44100, "volume": 0, "normalize_loudness": False, "bitrate": None}
    answer = door.speak(stream=False, stream_format=None, voice={"id": "Default"}, model=None, **output)
    assert answer.status_code == 200
    assert "x-ignored-fields" not in answer.headers
    assert answer.content == door.speak(seed=int(answer.headers["x-seed"])).content


def test_fields_without_effect_are_listed(door: Door) -> None:
    answer = door.speak(foo="bar", user=None, instructions=81 * "x", language="en")
    assert answer.headers["x-ignored-fields"] == "foo, instructions, language"


@pytest.mark.parametrize("instructions", ["", "  ", "Calm.", f"  {80 * 'x'} "])
def test_short_instructions_have_an_effect(door: Door, instructions: str) -> None:
    assert "x-ignored-fields" not in door.speak(instructions=instructions).headers
    request = door.service.requests[-1]
    assert (request.instructions, request.tagged) == (instructions, bool(instructions.strip()))


def test_names_of_ignored_fields_cannot_break_the_header(door: Door) -> None:
    odd = {"a\r\nX-Evil: 1": 1, "näme": 2, "\ud800": 3, "x" * 500: 4} | {f"f{index}": 5 for index in range(40)}
    content = json.dumps({"input": "Hello."} | odd)
    answer = door.http.post("/v1/audio/speech", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    assert "x-evil" not in answer.headers
    listed = answer.headers["x-ignored-fields"].split(", ")
    assert listed[:3] == ["a%0D%0AX-Evil%3A%201", "n%C3%A4me", "%3F"]
    assert listed[-1] == "..."
    assert len(answer.headers["x-ignored-fields"]) < 2000


def test_input_must_be_there(door: Door) -> None:
    door.refused(400, "missing_field", "input")
    door.refused(400, "missing_field", "input", input=None)
    door.refused(400, "invalid_value", "input", input="")
    door.refused(400, "invalid_value", "input", input="   ")


def test_input_reaches_the_service_untouched(door: Door) -> None:
    door.speak("  [laugh] <|speaker:1|> e\u0301 ")
    assert door.service.requests[0].text == "  [laugh] <|speaker:1|> e\u0301 "


def test_instructions_have_a_limit(door: Door) -> None:
    assert "4096" in door.refused(400, "input_too_long", "instructions", input="Hello.", instructions="x" * 5000)


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": NATIVE}, {"model": "second"}])
def test_served_models(door: Door, fields: dict[str, Any]) -> None:
    assert door.speak(**fields).headers["x-model"] == (fields.get("model") or NATIVE)


def test_unknown_models_get_the_list(door: Door) -> None:
    message = door.refused(404, "model_not_found", "model", input="Hello.", model="no-such")
    assert "no-such" in message
    assert NATIVE in message


@pytest.mark.parametrize("voice", ["default", "DEFAULT", "", None, {"id": "default"}])
def test_the_default_voice(door: Door, voice: Any) -> None:
    assert door.speak(voice=voice).status_code == 200
    assert door.speak(speaker=voice).status_code == 200


@pytest.mark.parametrize("voice", ["nobody", "../../etc/passwd", {"id": "nobody"}, "n\r\nX: y"])
def test_unknown_voices(door: Door, voice: Any) -> None:
    assert "ref_audio" in door.refused(400, "unknown_voice", "voice", input="Hello.", voice=voice)


def test_voice_objects_need_an_id(door: Door) -> None:
    door.refused(400, "invalid_type", "voice.id", input="Hello.", voice={"name": "anna"})
    door.refused(400, "invalid_value", "speaker", input="Hello.", voice="default", speaker="default")


def test_extra_params_are_the_fields_by_another_way(door: Door) -> None:
    assert door.speak(extra_params={"temperature": 0.5, "top_k": 7, "top_p": None}).status_code == 200
    assert (door.service.requests[0].temperature, door.service.requests[0].top_k) == (0.5, 7)
    door.refused(400, "unsupported_field", "extra_params.foo", input="Hi.", extra_params={"foo": 1})
    door.refused(400, "invalid_type", "top_p", input="Hi.", extra_params={"top_p": "1"})
    door.refused(400, "invalid_value", "top_k", input="Hi.", top_k=1, extra_params={"top_k": 2})


# -- what is said --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [{"a": 5}, {"a": None}, {"a": ["b"]}])
def test_respellings_are_strings(door: Door, words: dict[str, Any]) -> None:
    door.refused(400, "invalid_type", "pronunciation", input="Hello.", pronunciation=words)


@pytest.mark.parametrize(("normalize", "listed"), [(True, None), (False, "language")])
def test_a_language_has_an_effect_when_text_is_normalised(door: Door, normalize: bool, listed: str | None) -> None:
    assert door.speak(language="en", normalize=normalize).headers.get("x-ignored-fields") == listed
    assert "x-ignored-fields" not in door.speak(language="").headers


@pytest.mark.parametrize("text", ["Hello.", " é\r\n𝄞 ", 'a "b" \\ [c]'])
def test_the_characters_that_were_sent_are_counted(door: Door, text: str) -> None:
    assert door.speak(text).headers["x-input-characters"] == str(len(text))


@pytest.mark.parametrize("stream_format", [None, "audio", "sse"])
def test_who_cannot_promise_equal_bytes_says_so(door: Door, stream_format: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "x-deterministic" not in door.speak(stream_format=stream_format).headers
    monkeypatch.setattr(door.service, "info", replace(door.service.info, device="cuda:0"))
    assert door.speak(stream_format=stream_format).headers["x-deterministic"] == "false"
