"""Fish Audio's speech: its fields, its errors, and its two generations of clients."""

import base64
import json
from typing import Any

import fish_audio_sdk
import fishaudio
import httpx
import ormsgpack
import pytest
from fishaudio.types import Prosody, ReferenceAudio, TTSConfig

from duetts.audio.formats import FORMATS
from duetts.errors import EngineFailure, NotReady, Overloaded
from duetts.server.fish import NAMES, OWN, SAME
from duetts.server.schemas import FIELDS
from tests.audio.listening import hear
from tests.inputs import REF_TEXT, clip
from tests.server.conftest import NATIVE, Door
from tests.server.sine import FRAME, RATE, Knobs, hum

REF = base64.b64encode(clip("control_pcm16.wav")).decode()
SECONDS = 3 * FRAME / RATE
# What the client 1.3.0 sends when nothing is chosen.
DEFAULTS = {
    "chunk_length": 200, "format": "mp3", "mp3_bitrate": 128, "opus_bitrate": 32, "references": [], "normalize": True,
    "latency": "balanced", "top_p": 0.7, "temperature": 0.7, "max_new_tokens": 1024, "repetition_penalty": 1.2,
    "min_chunk_length": 50, "condition_on_previous_chunks": True, "early_stop_threshold": 1.0,
}  # fmt: skip


def tts(door: Door, text: Any = "Hello there.", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return door.http.post("/v1/tts", json={"text": text, **fields}, headers=headers)


def fish_error(response: httpx.Response, status: int, code: str | None) -> str:
    """Asserts an error of Fish Audio's shape, and returns its message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert (body["statusCode"], body["code"]) == (status, code)
    assert body["message"] == body["detail"]
    assert body["error"]
    assert body["request_id"] == response.headers["X-Request-Id"]
    assert "Traceback" not in response.text
    return str(body["message"])


def test_a_stream_of_wav_is_the_answer(door: Door) -> None:
    answer = tts(door, seed=5)
    assert answer.status_code == 200
    assert (answer.headers["content-type"], answer.headers["transfer-encoding"]) == ("audio/wav", "chunked")
    assert answer.content[44:] == b"".join(hum(5, index) for index in range(3))
    assert answer.content[4:8] == b"\xff" * 4
    assert "x-ignored-fields" not in answer.headers
    assert (answer.headers["x-seed"], answer.headers["x-model"]) == ("5", NATIVE)


def test_a_whole_body_when_streaming_is_false(door: Door) -> None:
    answer = tts(door, seed=5, streaming=False)
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["x-finish-reason"] == "stop"


@pytest.mark.parametrize(
    ("headers", "content_type"),
    [
        ({}, "audio/wav"),
        ({"model": "s1"}, "audio/mpeg"),
        ({"User-Agent": "fish-audio/python/1.3.0"}, "audio/mpeg"),
        ({"User-Agent": "curl/8"}, "audio/wav"),
    ],
)
def test_clients_of_theirs_expect_mp3(door: Door, headers: dict[str, str], content_type: str) -> None:
    assert tts(door, headers=headers).headers["content-type"] == content_type
    assert tts(door, headers=headers, format="flac").headers["content-type"] == "audio/flac"


@pytest.mark.parametrize(("model", "chosen"), [("second", "second"), ("s2.1-pro", NATIVE), ("tts-1", NATIVE), ("", NATIVE)])
def test_the_header_chooses_a_served_model(door: Door, model: str, chosen: str) -> None:
    assert tts(door, headers={"model": model}).headers["x-model"] == chosen


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats(door: Door, name: str) -> None:
    answer = tts(door, format=name, seed=3)
    heard, rate = hear(answer.content) if name != "pcm" else (answer.content[::2], RATE)
    assert len(heard) / rate == pytest.approx(SECONDS, abs=0.06)


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"format": "mp3", "mp3_bitrate": 64}, {"response_format": "mp3", "bitrate": 64}),
        ({"format": "mp3", "mp3_bitrate": 64000, "opus_bitrate": 24}, {"response_format": "mp3", "bitrate": 64}),
        ({"format": "opus", "opus_bitrate": 24}, {"response_format": "opus", "bitrate": 24}),
        ({"format": "opus", "opus_bitrate": 32000}, {"response_format": "opus", "bitrate": 32}),
        ({"format": "opus", "opus_bitrate": -1000}, {"response_format": "opus"}),
        ({"format": "wav", "mp3_bitrate": 128}, {"response_format": "wav"}),
        ({"format": "pcm", "sample_rate": 24000}, {"response_format": "pcm", "sample_rate": 24000}),
        ({"prosody": {"speed": 2, "volume": 6}}, {"speed": 2, "volume": 6}),
        ({"prosody": {"normalize_loudness": True}}, {"normalize_loudness": True}),
        ({"prosody": {}}, {}),
        ({"references": []}, {}),
        ({"max_new_tokens": 0}, {}),
    ],
    ids=str,
)
def test_fields_have_the_effect_of_ours(door: Door, fields: dict[str, Any], same: dict[str, Any]) -> None:
    theirs = tts(door, seed=7, **fields)
    ours = door.speak(seed=7, stream_format="audio", **same)
    assert theirs.status_code == 200, theirs.text
    assert theirs.content == ours.content
    assert theirs.headers["content-type"] == ours.headers["content-type"]


def test_fields_reach_the_request(door: Door) -> None:
    fields = {
        "chunk_length": 150, "temperature": 0.5, "top_p": 0.6, "top_k": 7, "repetition_penalty": 1.1, "seed": 9, "timeout": 30,
        "max_new_tokens": 77, "condition_on_previous_chunks": False,
    }  # fmt: skip
    assert tts(door, **fields).status_code == 200
    request = door.service.requests[0]
    assert (request.text, request.chunk_length, request.temperature, request.top_p) == ("Hello there.", 150, 0.5, 0.6)
    assert (request.top_k, request.repetition_penalty, request.seed, request.timeout_s) == (7, 1.1, 9, 30)
    assert (request.max_piece_frames, request.max_new_tokens, request.conditioned) == (77, None, False)
    assert request.streaming
    tts(door)
    assert (door.service.requests[1].max_piece_frames, door.service.requests[1].conditioned) == (None, True)


def test_what_has_no_effect_is_listed(door: Door) -> None:
    idle = {"min_chunk_length": 50, "early_stop_threshold": 1.0, "use_memory_cache": "on", "features": ["a"]}
    answer = tts(door, normalize=True, whim=1, prosody={"pitch": 1}, **idle)
    assert set(answer.headers["x-ignored-fields"].split(", ")) == {"whim", "prosody.pitch", *idle}
    assert door.service.requests[-1].normalize


def test_unread_keys_of_references_are_listed(door: Door) -> None:
    audio = base64.b64encode(clip("control_pcm16.wav")).decode()
    clips = [{"audio": audio, "text": REF_TEXT, "media_type": "audio/wav", "mood": 1}]
    assert tts(door, references=clips).headers["x-ignored-fields"] == "references.mood"


def test_latency_says_how_much_comes_first(door: Door) -> None:
    for fields in ({}, {"latency": "low"}, {"latency": "balanced"}, {"latency": "normal"}):
        tts(door, **fields)
    assert [request.first_chunk for request in door.service.requests] == [0, 1, 0, 4]


def test_every_field_of_theirs_is_known() -> None:
    assert DEFAULTS.keys() <= {*NAMES, *SAME, *OWN}
    assert {NAMES.get(name, name) for name in (*NAMES, *SAME)} <= FIELDS.keys()


def test_clips_come_as_bytes_or_base64(door: Door) -> None:
    packed = ormsgpack.packb({"text": "Hi.", "references": [{"audio": clip("control_pcm16.wav"), "text": REF_TEXT}]})
    answers = [
        door.http.post("/v1/tts", content=packed, headers={"Content-Type": "application/msgpack"}),
        tts(door, references=[{"audio": REF, "text": REF_TEXT}]),
        door.http.post(
            "/v1/tts",
            data={"text": "5", "format": "mp3", "references": json.dumps([{"audio": REF, "text": REF_TEXT}])},
            files={"x": b""},
        ),
        door.http.post(
            "/v1/tts", data={"text": "5", "ref_text": REF_TEXT}, files={"ref_audio": clip("control_pcm16.wav")}
        ),
    ]  # fmt: skip
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
    for request in door.service.requests:
        assert request.references[0].audio == clip("control_pcm16.wav")
        assert request.references[0].text == REF_TEXT


@pytest.mark.parametrize(
    ("fields", "status", "code", "words"),
    [
        ({"text": None}, 400, "missing_field", "text, the text"),
        ({"text": ""}, 400, "invalid_value", ""),
        ({"text": 5}, 400, "invalid_type", "text must be"),
        ({"format": "m4a"}, 400, "invalid_value", "format 'm4a' is not one of wav, pcm, mp3"),
        ({"format": "mp3", "mp3_bitrate": 77}, 400, "invalid_value", "mp3_bitrate"),
        ({"prosody": {"speed": 9}}, 400, "out_of_range", "prosody.speed is 9"),
        ({"prosody": {"speed": "1"}}, 400, "invalid_type", "prosody.speed"),
        ({"prosody": 1}, 400, "invalid_type", "prosody must be"),
        ({"latency": "fast"}, 400, "invalid_value", "normal, balanced, low"),
        ({"max_new_tokens": "5"}, 400, "invalid_type", "max_new_tokens"),
        ({"condition_on_previous_chunks": 1}, 400, "invalid_type", "condition_on_previous_chunks"),
        ({"temperature": "hot"}, 400, "invalid_type", "temperature"),
        ({"reference_id": "nobody"}, 404, "voice_not_found", "nobody"),
        ({"reference_id": 5}, 400, "invalid_type", "reference_id"),
        ({"references": [{"audio": REF}]}, 400, "reference_text_required", "references"),
        ({"references": [{"audio": "a.wav", "text": "x"}]}, 403, "local_media_forbidden", "references"),
        ({"references": [{"audio": REF[:400], "text": "x"}]}, 400, "reference_too_short", ""),
        ({"sample_rate": 4}, 400, "unsupported_sample_rate", "sample_rate 4"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_have_their_shape_and_names(door: Door, fields: dict[str, Any], status: int, code: str, words: str) -> None:
    message = fish_error(tts(door, **fields), status, code)
    assert words in message
    assert "response_format" not in message
    assert tts(door).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code", "header"),
    [
        (Overloaded("full", retry_after_s=2), 429, "queue_full", "retry-after"),
        (NotReady("dead"), 503, "not_ready", "retry-after"),
        (EngineFailure("lost"), 500, "internal_error", "x-request-id"),
        (ValueError("secret"), 500, "internal_error", "x-should-retry"),
    ],
    ids=str,
)
def test_failures_have_their_shape(door: Door, error: Exception, status: int, code: str, header: str) -> None:
    door.service.knobs = Knobs(error=error)
    answer = tts(door)
    assert "secret" not in fish_error(answer, status, code)
    assert header in answer.headers


def test_their_paths_answer_in_their_shape_whatever_is_wrong(door: Door) -> None:
    fish_error(door.http.get("/v1/tts"), 405, "method_not_allowed")
    fish_error(door.http.post("/v1/asr"), 404, "route_not_found")
    fish_error(door.http.get("/wallet/self/api-credit"), 404, "route_not_found")
    fish_error(door.http.post("/v1/tts", content=b"x", headers={"Content-Type": "text/plain"}), 415, "unsupported_media_type")
    fish_error(door.http.post("/v1/tts/", content=b"[" * 100_000), 400, "invalid_value")
    fish_error(door.http.post("/v1/tts", content=b"{" + b" " * (2 << 20) + b"}"), 413, "payload_too_large")
    for bomb in (b"\x91" * 100_000, b"\x81\xa1a\xdd\x00\x0f\xff\xff" + b"\x90" * 0xFFFFF, b"\xc1"):
        answer = door.http.post("/v1/tts", content=bomb, headers={"Content-Type": "application/msgpack"})
        fish_error(answer, 400, "invalid_value")
    assert door.http.post("/v1/ttsx").json()["error"]["code"] == "route_not_found"


# -- the client of 2025, and the one before it


def client(door: Door) -> fishaudio.FishAudio:
    return fishaudio.FishAudio(api_key="none", base_url=f"http://127.0.0.1:{door.port}")


def test_the_client_sends_what_this_file_says(door: Door) -> None:
    with client(door) as fish:
        config = TTSConfig().model_dump(exclude_none=True)
        assert config == DEFAULTS
        audio = fish.tts.convert(text="Hello there.")
    heard, rate = hear(audio)
    assert len(heard) / rate == pytest.approx(SECONDS, abs=0.06)
    request = door.service.requests[0]
    assert (request.temperature, request.repetition_penalty, request.max_piece_frames) == (0.7, 1.2, 1024)


def test_the_client_streams_and_clones(door: Door) -> None:
    with client(door) as fish:
        voice = ReferenceAudio(audio=clip("control_pcm16.wav"), text=REF_TEXT)
        config = TTSConfig(prosody=Prosody(speed=2.0, volume=-3), sample_rate=24000)
        pieces = list(fish.tts.stream(text="Hello there.", references=[voice], format="wav", config=config, model="s2-pro"))
    heard, rate = hear(b"".join(pieces))
    assert rate == 24000
    assert len(heard) / rate == pytest.approx(SECONDS / 2, abs=0.01)
    assert door.service.requests[0].references[0].text == REF_TEXT


@pytest.mark.parametrize("name", ["mp3", "wav", "pcm", "opus"])
def test_the_client_has_four_formats(door: Door, name: Any) -> None:
    with client(door) as fish:
        audio = fish.tts.convert(text="Hello there.", format=name)
    heard, rate = hear(audio) if name != "pcm" else (audio[::2], RATE)
    assert len(heard) / rate == pytest.approx(SECONDS, abs=0.06)


def test_the_client_understands_errors(door: Door) -> None:
    with client(door) as fish:
        with pytest.raises(fishaudio.exceptions.NotFoundError, match="nobody") as missing:
            fish.tts.convert(text="Hi.", reference_id="nobody")
        assert missing.value.status == 404
        door.service.knobs = Knobs(error=Overloaded("full", retry_after_s=1))
        with pytest.raises(fishaudio.exceptions.RateLimitError):
            fish.tts.convert(text="Hi.")


async def test_the_asynchronous_client(door: Door) -> None:
    async with fishaudio.AsyncFishAudio(api_key="none", base_url=f"http://127.0.0.1:{door.port}") as fish:
        assert await fish.tts.convert(text="Hello there.", format="wav")


def test_the_older_client(door: Door) -> None:
    with fish_audio_sdk.Session("none", base_url=f"http://127.0.0.1:{door.port}") as session:
        reference = fish_audio_sdk.ReferenceAudio(audio=clip("control_pcm16.wav"), text=REF_TEXT)
        pieces = list(session.tts(fish_audio_sdk.TTSRequest(text="Hello there.", references=[reference]), backend="s1"))
        heard, rate = hear(b"".join(pieces))
        assert len(heard) / rate == pytest.approx(SECONDS, abs=0.06)
        with pytest.raises(fish_audio_sdk.HttpCodeErr) as refusal:
            list(session.tts(fish_audio_sdk.TTSRequest(text="Hi.", reference_id="nobody")))
        assert refusal.value.status == 404
