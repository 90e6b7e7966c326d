"""Voices and consents over real HTTP, with a service that hums."""

import base64
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
import uvicorn

from duetts.config import Limits, RequestsConfig, ServerConfig, VoicesConfig
from duetts.server.app import create_app
from duetts.serving import KEEP_ALIVE_S
from tests.inputs import REF_TEXT, clip
from tests.server.conftest import NATIVE, Door, error_of
from tests.server.sine import SineService
from tests.waiting import LIMIT_S

CLIP = clip("control_pcm16.wav")
DATA = f"data:audio/wav;base64,{base64.b64encode(CLIP).decode()}"
PATH = "/v1/audio/voices"


def upload(door: Door, name: Any = "Anna", audio: bytes | None = CLIP, **fields: Any) -> httpx.Response:
    """A form as clients send it. A field of None is left out."""
    given = {"name": name, "consent": "c-1", "ref_text": REF_TEXT, **fields}
    files = None if audio is None else {"audio_sample": ("anna.wav", audio, "audio/wav")}
    return door.http.post(PATH, data={key: value for key, value in given.items() if value is not None}, files=files)


@contextmanager
def serving(folder: Path, openai_aliases: bool = True, dialect: str = "auto", **voices: Any) -> Iterator[Door]:
    """Another server, with other settings."""
    limits = Limits()
    config = VoicesConfig(folder, **voices)
    service = SineService(limits, config)
    settings = ServerConfig((NATIVE,), limits=limits, voices=config, requests=RequestsConfig(openai_aliases, dialect))
    app = create_app(service, settings)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S, trust_env=False) as http:
        yield Door(service, port, http, app.state.outcomes)
    server.should_exit = True
    thread.join()


# -- a voice's life


def test_a_voice_from_upload_to_removal(door: Door) -> None:
    answer = upload(door, "Bob", tags="calm, low", speaker_description="A man.", language="en")
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["id"], made["object"], made["name"], made["type"], made["success"]) == (
        "Bob", "audio.voice", "Bob", "audio_sample", True,
    )  # fmt: skip
    assert abs(made["created_at"] - time.time()) < 60
    assert made["voice"]["duration"] == pytest.approx(4.0, abs=0.1)
    listed = door.http.get(PATH).json()
    assert listed["object"] == "list"
    assert listed["data"] == [{key: made[key] for key in ("id", "object", "name", "type", "created_at", "origin")}]
    assert listed["voices"] == [{"id": "default", "name": "default"}, {"id": "Bob", "name": "Bob"}]
    assert listed["uploaded_voices"] == [made["voice"]]
    assert made["voice"] == {
        "name": "Bob", "consent": "c-1", "created_at": made["created_at"], "file_size": len(CLIP), "mime_type": "audio/wav",
        "duration": made["voice"]["duration"], "ref_text": REF_TEXT, "embedding_source": "audio", "tags": "calm, low",
        "speaker_description": "A man.", "language": "en",
    }  # fmt: skip
    spoken = door.speak(voice="bob")
    assert spoken.status_code == 200
    assert spoken.headers["X-Voice-Resolved"] == "Bob"
    assert spoken.headers["X-Reference-Cache"] == "hit"
    assert door.service.spoken[-1].transcript == REF_TEXT
    again = upload(door, "BOB")
    error_of(again, 409, "voice_exists", "name")
    assert again.headers["X-Should-Retry"] == "false"
    one = door.http.get(f"{PATH}/bOb").json()
    assert (one["id"], one["ref_text"], one["consent"]) == ("Bob", REF_TEXT, "c-1")
    gone = door.http.delete(f"{PATH}/BOB")
    assert gone.status_code == 200
    assert gone.json() == {"id": "Bob", "object": "audio.voice.deleted", "name": "Bob", "deleted": True, "success": True}
    error_of(door.http.delete(f"{PATH}/BOB"), 404, "voice_not_found", "name")
    error_of(door.http.get(f"{PATH}/bob"), 404, "voice_not_found", "name")
    door.refused(400, "unknown_voice", "voice", input="Hi.", voice="bob")


def test_replacing_only_when_asked_and_only_by_what_is_right(door: Door) -> None:
    upload(door, "Bob")
    for audio, code in ((clip("sixty_seconds.mp3"), "reference_too_long"), (b"text", "reference_undecodable")):
        error_of(upload(door, "Bob", audio, overwrite="true"), 400, code, "audio_sample")
    error_of(upload(door, "Bob", ref_text=None, overwrite="true"), 400, "reference_text_required", "ref_text")
    error_of(upload(door, "Bob", overwrite="false"), 409, "voice_exists", "name")
    assert door.speak(voice="bob").status_code == 200
    assert door.service.spoken[-1].transcript == REF_TEXT
    assert upload(door, "bob", ref_text="Other words.", overwrite="1").status_code == 201
    assert door.speak(voice="bob").headers["X-Voice-Resolved"] == "bob"
    assert door.service.spoken[-1].transcript == "Other words."
    assert len(door.http.get(PATH).json()["data"]) == 1


def test_plain_names_for_clients_that_want_them(door: Door) -> None:
    upload(door, "Anna")
    for query in ("legacy=true", "names_only=true", "legacy=1"):
        assert door.http.get(f"{PATH}?{query}").json()["voices"] == ["default", "Anna"]
    assert door.http.get(f"{PATH}?legacy=false").json()["voices"][1] == {"id": "Anna", "name": "Anna"}
    error_of(door.http.get(f"{PATH}?legacy=maybe"), 400, "invalid_type", "legacy")
    for model in (door.http.get("/v1/models").json()["data"][0], door.http.get(f"/v1/models/{NATIVE}").json()):
        assert model["voices"] == [{"id": "default", "name": "default"}, {"id": "Anna", "name": "Anna"}]
    assert [m["id"] for m in door.http.get("/v1/audio/models").json()["models"]][:3] == [NATIVE, "second", "tts-1"]


@pytest.mark.parametrize(
    "aliases", [{"ref_audio", "text", "id"}, {"audio", "transcript", "voice_name"}, {"file", "ref_text", "name"}]
)
def test_other_names_of_the_parts(door: Door, aliases: set[str]) -> None:
    values = {
        "ref_text": "Words.",
        "text": "Words.",
        "transcript": "Words.",
        "name": "Anna",
        "id": "Anna",
        "voice_name": "Anna",
    }
    audio = next(iter(aliases - values.keys()))
    data = {name: values[name] for name in aliases & values.keys()} | {"consent": "yes"}
    answer = door.http.post(PATH, data=data, files={audio: ("a", CLIP)})
    assert answer.status_code == 201, answer.text
    assert answer.json()["voice"]["ref_text"] == "Words."


def test_json_works_as_well(door: Door) -> None:
    body = {
        "name": "Anna",
        "consent": "c",
        "ref_text": "Words.",
        "audio_sample": DATA,
        "overwrite": True,
        "tags": None,
        "foo": 1,
    }
    answer = door.http.post(PATH, json=body)
    assert answer.status_code == 201, answer.text
    assert answer.headers["X-Ignored-Fields"] == "foo"
    assert door.http.post(PATH, json=body | {"audio_sample": base64.b64encode(CLIP).decode()}).status_code == 201


@pytest.mark.parametrize(
    ("changes", "status", "code", "field"),
    [
        ({"name": None}, 400, "missing_field", "name"),
        ({"audio_sample": None}, 400, "missing_field", "audio_sample"),
        ({"consent": None}, 400, "missing_field", "consent"),
        ({"consent": "  "}, 400, "missing_field", "consent"),
        ({"ref_text": None}, 400, "reference_text_required", "ref_text"),
        ({"ref_text": " "}, 400, "reference_text_required", "ref_text"),
        ({"ref_text": "x" * 3000}, 400, "context_length_exceeded", "ref_text"),
        ({"name": 5}, 400, "invalid_type", "name"),
        ({"name": ["a", "b"]}, 400, "invalid_type", "name"),
        ({"audio_sample": 5}, 400, "invalid_type", "audio_sample"),
        ({"audio_sample": [DATA, DATA]}, 400, "invalid_type", "audio_sample"),
        ({"audio_sample": "http://127.0.0.1:1/a.wav"}, 403, "media_domain_forbidden", "audio_sample"),
        ({"audio_sample": "file:///etc/passwd"}, 403, "local_media_forbidden", "audio_sample"),
        ({"audio_sample": ""}, 400, "reference_undecodable", "audio_sample"),
        ({"overwrite": "maybe"}, 400, "invalid_type", "overwrite"),
        ({"overwrite": 2}, 400, "invalid_type", "overwrite"),
        ({"tags": "x" * 1025}, 400, "input_too_long", "tags"),
        ({"language": "\0"}, 400, "invalid_value", "language"),
        ({"tags": ["a"]}, 400, "invalid_type", "tags"),
        ({"text": "Words."}, 400, "invalid_value", "text"),
        ({"name": "default"}, 400, "invalid_value", "name"),
        ({"name": "none"}, 400, "invalid_value", "name"),
    ],
)
def test_what_is_refused(door: Door, changes: dict[str, Any], status: int, code: str, field: str) -> None:
    body = {"name": "Anna", "consent": "c", "ref_text": "Words.", "audio_sample": DATA} | changes
    error_of(door.http.post(PATH, json=body), status, code, field)
    assert door.http.get(PATH).json()["data"] == []
    assert not door.service.config.folder.exists() or not list(door.service.config.folder.iterdir())


def test_bodies_that_are_none(door: Door) -> None:
    assert door.http.post(PATH, content=b"{").status_code == 400
    assert door.http.post(PATH, json=[]).status_code == 400
    assert door.http.post(PATH, content=b"x", headers={"Content-Type": "text/plain"}).status_code == 415
    assert door.http.post(PATH, content=b"x" * (3 << 20), headers={"Content-Type": "application/json"}).status_code == 413
    assert door.http.put(PATH, json={}).status_code == 405
    assert door.http.post(f"{PATH}/", json={}).status_code == 400


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd", "..", "a/b", "a\\b", "a\0b", "%2e%2e", "a\nb", ".", "~", "x" * 65, "x" * 5000, "\u202eanna",
        "anna/audio/..",
    ],
)  # fmt: skip
def test_names_are_no_paths(door: Door, name: str) -> None:
    upload(door, "Anna")
    before = sorted(door.service.config.folder.rglob("*"))
    path = f"{PATH}/{quote(name, safe='').replace('.', '%2E')}"
    for method in ("GET", "DELETE"):
        answer = door.http.request(method, path)
        if "\n" in name:  # no path at all
            error_of(answer, 404, "route_not_found", None)
        else:
            error_of(answer, 404, "voice_not_found", "name")
    body = {"name": name, "consent": "c", "ref_text": "Words.", "audio_sample": DATA}
    answer = door.http.post(PATH, json=body)
    if name == "%2e%2e":  # a strange name, but only a name
        assert answer.status_code == 201
    else:
        error_of(answer, 400, "invalid_value", "name")
        assert sorted(door.service.config.folder.rglob("*")) == before
    assert door.http.get(f"{PATH}/anna").status_code == 200


@pytest.mark.parametrize(
    "name", ["Zoë", "山田 太郎", "a.b", "100%", "a?b#c", "O'Neil & Co", "voice.json", "🙂1", "audio", "legacy=1"]
)
def test_strange_names_work_everywhere(door: Door, name: str) -> None:
    assert upload(door, name).json()["id"] == name
    spoken = door.speak(voice=name.upper())
    assert spoken.status_code == 200, spoken.text
    assert spoken.headers["X-Voice-Resolved"] == quote(name, safe=" ")
    path = f"{PATH}/{quote(name, safe='')}"
    assert door.http.get(path).json()["name"] == name
    assert door.http.get(PATH).json()["voices"][1]["id"] == name
    assert door.http.delete(path).json()["id"] == name


def test_of_uploads_at_once_one_wins(door: Door) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda index: upload(door, "Anna", ref_text=f"Words {index}."), range(8)))
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 7
    won = next(answer for answer in answers if answer.status_code == 201)
    assert door.http.get(f"{PATH}/anna").json()["ref_text"] == won.json()["voice"]["ref_text"]


# -- in a request


def test_ways_to_name_a_voice(door: Door) -> None:
    upload(door, "Anna")
    for fields in (
        {"voice": "anna"}, {"voice": {"id": "ANNA"}}, {"speaker": "anna"}, {"speaker": {"id": "anna"}},
        {"reference_id": "Anna"}, {"reference_id": "anna", "voice": "default"},
    ):  # fmt: skip
        answer = door.speak(**fields)
        assert answer.headers["X-Voice-Resolved"] == "Anna", fields
        assert "X-Ignored-Fields" not in answer.headers
    assert door.service.encoded <= 1  # by the upload, if no test before it had this clip
    both = door.speak(reference_id="anna", voice="nobody")
    assert (both.headers["X-Voice-Resolved"], both.headers["X-Ignored-Fields"]) == ("Anna", "voice")
    door.refused(400, "unknown_voice", "speaker", input="Hi.", speaker="nobody")
    for name in ("nobody", "default", "none"):
        door.refused(400, "unknown_voice", "reference_id", input="Hi.", reference_id=name)


def test_a_clip_wins_over_a_voice(door: Door) -> None:
    upload(door, "Anna")
    for fields in ({"voice": "anna"}, {"speaker": "ANNA"}, {"reference_id": "anna"}, {"voice": "none"}):
        answer = door.speak(ref_audio=DATA, ref_text="Other words.", **fields)
        assert answer.status_code == 200
        assert answer.headers["X-Ignored-Fields"] == next(iter(fields))
        assert "X-Voice-Resolved" not in answer.headers
    for fields in ({}, {"voice": "default"}, {"voice": ""}, {"reference_id": ""}):
        assert "X-Ignored-Fields" not in door.speak(ref_audio=DATA, ref_text="Other words.", **fields).headers
    assert not door.service.spoken


def test_the_message_lists_what_exists(door: Door) -> None:
    upload(door, "Anna")
    message = door.refused(400, "unknown_voice", "voice", input="Hi.", voice="nobody")
    for word in ("nobody", "default, Anna", PATH, "ref_audio"):
        assert word in message


OPENAI_MODELS = ["tts-1", "tts-1-hd", "gpt-4o-mini-tts", "gpt-4o-mini-tts-2025-12-15"]


@pytest.mark.parametrize("model", OPENAI_MODELS)
def test_openai_names_speak_here(door: Door, model: str) -> None:
    answer = door.speak(model=model, voice="Alloy")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "audio/mpeg"
    assert answer.headers["X-Voice-Resolved"] == "none"  # the default of a model that is not trained
    assert answer.headers["X-Model"] == NATIVE
    assert door.http.get(f"/v1/models/{model}").json()["root"] == NATIVE
    door.refused(400, "unknown_voice", "voice", input="Hi.", model=model, voice="nobody")
    door.refused(400, "unknown_voice", "voice", input="Hi.", model=NATIVE, voice="alloy")
    upload(door, "alloy")
    for name in (model, NATIVE):
        assert door.speak(model=name, voice="ALLOY").headers["X-Voice-Resolved"] == "alloy"


def test_models_that_look_like_openai_names_are_unknown(door: Door) -> None:
    for model in ("tts-2", "gpt-4o", "tts-1-hd-x", "gpt-4o-mini-tts-", "TTS-1"):
        door.refused(404, "model_not_found", "model", input="Hi.", model=model)


# -- other settings


def test_settings_of_the_operator(tmp_path: Path) -> None:
    settings = {
        "default_voice": "seed:7", "aliases": (("nova", "anna"),), "max_voices": 2, "overwrite": True,
        "consent_required": False, "share_audio": True,
    }  # fmt: skip
    with serving(tmp_path, openai_aliases=False, **settings) as door:
        assert upload(door, "Anna", consent=None).status_code == 201
        assert upload(door, "Anna", consent=None).status_code == 201
        assert door.speak(voice="nova").headers["X-Voice-Resolved"] == "Anna"
        plain = door.speak()
        assert plain.headers["X-Voice-Resolved"].startswith("seed-7-")
        assert door.http.get(f"{PATH}/default").json()["resolved"] == plain.headers["X-Voice-Resolved"]
        origins = {voice["name"]: voice["origin"] for voice in door.http.get(PATH).json()["data"]}
        assert origins == {"Anna": "stored", plain.headers["X-Voice-Resolved"]: "generated"}
        for name in ("default", plain.headers["X-Voice-Resolved"]):
            error_of(door.http.delete(f"{PATH}/{name}"), 403, "voice_protected", "name")
        error_of(upload(door, "Bert"), 400, "voice_limit", "name")
        audio = door.http.get(f"{PATH}/ANNA/audio")
        assert (audio.content, audio.headers["Content-Type"]) == (CLIP, "audio/wav")
        error_of(door.http.get(f"{PATH}/bert/audio"), 404, "voice_not_found", "name")
        door.refused(404, "model_not_found", "model", input="Hi.", model="tts-1")
        assert [model["id"] for model in door.http.get("/v1/models").json()["data"]] == [NATIVE]


@pytest.mark.parametrize(
    ("dialect", "kind", "rate", "status"), [("native", "audio/wav", 44100, 400), ("openai", "audio/mpeg", 24000, 200)]
)
def test_the_operator_may_decide_on_the_dialect(tmp_path: Path, dialect: str, kind: str, rate: int, status: int) -> None:
    with serving(tmp_path, dialect=dialect) as door:
        for model in ("tts-1", NATIVE):
            assert door.speak(model=model).headers["Content-Type"] == kind
            assert door.speak(model=model, response_format="pcm").headers["X-Sample-Rate"] == str(rate)
            assert door.speak(model=model, voice="alloy").status_code == status


def test_clips_are_private_by_default(door: Door) -> None:
    upload(door, "Anna")
    error_of(door.http.get(f"{PATH}/anna/audio"), 403, "voice_audio_forbidden", "name")


def test_a_place_that_cannot_be_written_serves_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with serving(tmp_path / "file" / "voices") as door:
        assert door.speak().status_code == 200
        assert door.http.get(PATH).json()["data"] == []
        message = error_of(upload(door, "Anna"), 500, "internal_error", None)
        assert str(tmp_path) not in message
        assert upload(door, "Anna").headers["X-Should-Retry"] == "false"


def test_servers_of_one_folder_see_each_others_voices(tmp_path: Path) -> None:
    with serving(tmp_path) as one, serving(tmp_path) as two:
        upload(one, "Anna")
        assert two.speak(voice="anna").headers["X-Reference-Cache"] == "hit"
        assert two.service.encoded == 0
        error_of(upload(two, "anna"), 409, "voice_exists", "name")
        assert two.http.delete(f"{PATH}/anna").status_code == 200
        one.refused(400, "unknown_voice", "voice", input="Hi.", voice="anna")


# -- OpenAI's client


def test_openai_client_keeps_voices_and_consents(door: Door) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{door.port}/v1", api_key="none", max_retries=0) as client:
        recording = ("consent.wav", CLIP, "audio/wav")
        consents = [client.audio.voice_consents.create(name=f"c{i}", language="en-US", recording=recording) for i in range(3)]
        assert {consent.object for consent in consents} == {"audio.voice_consent"}
        with pytest.raises(openai.BadRequestError, match="no more are allowed"):
            client.audio.voice_consents.create(name="c4", language="en-US", recording=recording)
        listed = list(client.audio.voice_consents.list(limit=2))
        assert sorted(consent.id for consent in listed) == sorted(consent.id for consent in consents)
        first = consents[0]
        assert client.audio.voice_consents.update(first.id, name="other").name == "other"
        assert client.audio.voice_consents.retrieve(first.id).model_dump() == first.model_dump() | {"name": "other"}
        made = client.audio.voices.create(
            name="Anna", audio_sample=("a.wav", CLIP, "audio/wav"), consent=first.id, extra_body={"ref_text": REF_TEXT}
        )
        assert (made.id, made.object, made.type) == ("Anna", "audio.voice", "audio_sample")
        assert client.audio.speech.create(model="tts-1", voice={"id": made.id}, input="Hello.").read()
        assert client.audio.voices.delete(made.id).deleted
        for consent in consents:
            assert client.audio.voice_consents.delete(consent.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.audio.voice_consents.retrieve(first.id)


def test_consents_that_are_refused(door: Door) -> None:
    path = "/v1/audio/voice_consents"
    good = {"name": "a", "language": "en", "recording": DATA}
    for field in good:
        body = {key: value for key, value in good.items() if key != field}
        error_of(door.http.post(path, json=body), 400, "missing_field", field)
    for field in ("name", "language"):
        for value in ("", "x" * 257, "a\0"):
            error_of(door.http.post(path, json=good | {field: value}), 400, "invalid_value", field)
    error_of(door.http.post(path, json=good | {"recording": "data:;base64,"}), 400, "invalid_value", "recording")
    for limit in ("0", "101", "x", "-1", "9999"):
        error_of(door.http.get(f"{path}?limit={limit}"), 400, "out_of_range", "limit")
    error_of(door.http.get(f"{path}?after=cons_x"), 404, "consent_not_found", "after")
    for name in ("cons_x", "..", "%00", "cons_" + "0" * 24):
        for method, body in (("GET", None), ("DELETE", None), ("POST", {"name": "b"})):
            answer = door.http.request(method, f"{path}/{name.replace('.', '%2E')}", json=body)
            error_of(answer, 404, "consent_not_found", "id")
