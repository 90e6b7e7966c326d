"""Voices as Fish Audio's servers and cloud know them, over the same store as ours."""

from typing import Any

import fish_audio_sdk
import fishaudio
import httpx
import ormsgpack
import pytest

from tests.inputs import REF_TEXT, clip
from tests.server.conftest import Door
from tests.server.test_fish import client, fish_error

CLIP = clip("control_pcm16.wav")
JSON = {"Accept": "application/json"}


def add(door: Door, name: str = "anna", headers: dict[str, str] = JSON, **fields: Any) -> httpx.Response:
    data = {"id": name, "text": REF_TEXT, "consent": "c-1", **fields}
    return door.http.post("/v1/references/add", data=data, files={"audio": ("a.wav", CLIP)}, headers=headers)


def names(door: Door) -> list[str]:
    return list(door.http.get("/v1/references/list?format=json").json()["reference_ids"])


def test_references_are_voices(door: Door) -> None:
    assert names(door) == []
    added = add(door)
    assert added.status_code == 200
    assert added.json() == {"success": True, "message": "the voice 'anna' is stored", "reference_id": "anna"}
    assert names(door) == ["anna"]
    assert door.speak(voice="Anna").headers["x-voice-resolved"] == "anna"
    assert door.http.post("/v1/tts", json={"text": "Hi.", "reference_id": "anna"}).status_code == 200
    fish_error(add(door, "ANNA"), 409, "voice_exists")
    renamed = door.http.post(
        "/v1/references/update", json={"old_reference_id": "anna", "new_reference_id": "Berta"}, headers=JSON
    )
    assert renamed.json()["new_reference_id"] == "Berta"
    assert names(door) == ["Berta"]
    assert door.speak(voice="anna").status_code == 400
    assert door.speak(voice="berta").status_code == 200
    assert door.service.encoded <= 1  # by the upload, if no test before it had this clip
    removed = door.http.request("DELETE", "/v1/references/delete", json={"reference_id": "berta"}, headers=JSON)
    assert removed.json() == {"success": True, "message": "the voice 'Berta' is removed", "reference_id": "Berta"}
    assert names(door) == []
    add(door, "c")
    assert door.http.delete("/v1/references/delete?reference_id=c&format=json").json()["success"]
    fish_error(door.http.delete("/v1/references/delete?reference_id=c"), 404, "voice_not_found")


def test_answers_are_msgpack_unless_json_is_asked_for(door: Door) -> None:
    answer = add(door, headers={"Accept": "*/*"})
    assert answer.headers["content-type"] == "application/msgpack"
    assert ormsgpack.unpackb(answer.content)["reference_id"] == "anna"
    packed = ormsgpack.packb({"id": "b", "text": REF_TEXT, "audio": CLIP, "consent": "c"})
    answer = door.http.post("/v1/references/add", content=packed, headers={"Content-Type": "application/msgpack"})
    assert ormsgpack.unpackb(answer.content)["success"] is True
    assert ormsgpack.unpackb(door.http.get("/v1/references/list").content)["reference_ids"] == ["anna", "b"]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"id": ""}, "invalid_value", "id is empty"),
        ({"id": "a/../b"}, "invalid_value", "id must not hold slashes"),
        ({"id": "default"}, "invalid_value", "reserved"),
        ({"text": ""}, "reference_text_required", "text"),
        ({"consent": ""}, "missing_field", "consent"),
    ],
    ids=str,
)
def test_faults_have_their_names(door: Door, fields: dict[str, str], code: str, words: str) -> None:
    assert words in fish_error(add(door, **({"name": fields["id"]} if "id" in fields else fields)), 400, code)
    assert names(door) == []


def test_other_faults(door: Door) -> None:
    data = {"id": "a", "text": REF_TEXT, "consent": "c"}
    fish_error(door.http.post("/v1/references/add", data=data, files={"audio": CLIP[:4000]}), 400, "reference_too_short")
    fish_error(door.http.post("/v1/references/add", data=data, files={"audio": b"no sound"}), 400, "reference_undecodable")
    assert "audio is missing" in fish_error(door.http.post("/v1/references/add", json=data), 400, "missing_field")
    fish_error(door.http.post("/v1/references/update", json={"old_reference_id": "a"}), 400, "missing_field")
    both = {"old_reference_id": "nobody", "new_reference_id": "x"}
    fish_error(door.http.post("/v1/references/update", json=both), 404, "voice_not_found")
    add(door, "a")
    add(door, "b")
    taken = {"old_reference_id": "a", "new_reference_id": "B"}
    fish_error(door.http.post("/v1/references/update", json=taken), 409, "voice_exists")
    bad = {"old_reference_id": "a", "new_reference_id": "x/y"}
    assert fish_error(door.http.post("/v1/references/update", json=bad), 400, "invalid_value").startswith("new_reference_id")
    fish_error(door.http.delete("/v1/references/delete"), 400, "invalid_value")
    fish_error(door.http.get("/v1/references/add"), 405, "method_not_allowed")
    fish_error(door.http.get("/v1/references"), 404, "route_not_found")
    assert names(door) == ["a", "b"]


def test_the_client_lists_gets_changes_and_removes_voices(door: Door) -> None:
    for name in ("anna", "Berta", "Zoë the second"):
        assert add(door, name).status_code == 200
    with client(door) as fish:
        page = fish.voices.list(page_size=2)
        assert (page.total, [voice.id for voice in page.items]) == (3, ["anna", "Berta"])
        assert [voice.title for voice in fish.voices.list(page_size=2, page_number=2).items] == ["Zoë the second"]
        assert [voice.id for voice in fish.voices.list(title="ert", self_only=True, tags=["x"]).items] == ["Berta"]
        voice = fish.voices.get("Zoë the second")
        assert (voice.type, voice.state, voice.tags, voice.visibility) == ("tts", "trained", [], "private")
        fish.voices.update("Zoë the second", title="Zoë", description="Calm.", tags=["low", "slow"])
        voice = fish.voices.get("zoë")
        assert (voice.title, voice.description, voice.tags) == ("Zoë", "Calm.", ["low", "slow"])
        fish.voices.update("zoë", description="Very calm.")
        assert fish.voices.get("zoë").description == "Very calm."
        assert fish.voices.get("zoë").tags == ["low", "slow"]
        assert fish.tts.convert(text="Hi.", reference_id="zoë")
        fish.voices.delete("zoë")
        with pytest.raises(fishaudio.exceptions.NotFoundError):
            fish.voices.get("zoë")
    assert names(door) == ["anna", "Berta"]


def test_the_client_creates_a_voice_where_no_consent_is_asked_for(door: Door) -> None:
    """It cannot send one: on a server that wants it, it is told so."""
    with client(door) as fish, pytest.raises(fishaudio.exceptions.APIError, match="consent"):
        fish.voices.create(title="Carl", voices=[CLIP], texts=[REF_TEXT])
    form = {"title": "Carl", "texts": REF_TEXT, "consent": "c", "visibility": "private", "type": "tts", "train_mode": "fast"}
    answer = door.http.post("/model", data={**form, "tags": ["a", "b"]}, files=[("voices", CLIP)])
    assert answer.status_code == 201
    assert fishaudio.types.Voice.model_validate(answer.json()).tags == ["a", "b"]
    assert answer.headers["x-ignored-fields"] == "visibility, type, train_mode"
    fish_error(door.http.post("/model", data=form, files=[("voices", CLIP)]), 409, "voice_exists")
    form["title"] = "Dora"
    two = [("voices", CLIP), ("voices", CLIP)]
    assert fish_error(door.http.post("/model", data=form, files=two), 400, "invalid_value").startswith("voices must be one")
    fish_error(door.http.post("/model", data={"title": "D", "consent": "c"}, files=two[:1]), 400, "reference_text_required")


def test_the_older_client_lists_and_removes(door: Door) -> None:
    add(door, "anna")
    with fish_audio_sdk.Session("none", base_url=f"http://127.0.0.1:{door.port}") as session:
        assert [model.title for model in session.list_models().items] == ["anna"]
        assert session.get_model("anna").id == "anna"
        session.delete_model("anna")
        assert session.list_models().total == 0


@pytest.mark.parametrize("query", ["page_size=0", "page_size=x", "page_size=1001", "page_number=-1", "page_number=99999999999"])
def test_pages_have_bounds(door: Door, query: str) -> None:
    assert "must be a number between" in fish_error(door.http.get(f"/model?{query}"), 400, "out_of_range")


def test_a_change_is_whole_or_not_at_all(door: Door) -> None:
    add(door, "anna")
    add(door, "berta")
    fish_error(door.http.patch("/model/anna", json={"title": "berta"}), 409, "voice_exists")
    fish_error(door.http.patch("/model/anna", json={"title": "x/y"}), 400, "invalid_value")
    fish_error(door.http.patch("/model/anna", json={"title": 5}), 400, "invalid_type")
    fish_error(door.http.patch("/model/anna", json={"tags": ["a", 5]}), 400, "invalid_type")
    fish_error(door.http.patch("/model/anna", json={"description": "x" * 100_000}), 400, "input_too_long")
    fish_error(door.http.patch("/model/nobody", json={"title": "x"}), 404, "voice_not_found")
    plain = {"Content-Type": "text/plain"}
    fish_error(door.http.patch("/model/anna", content=b"a=1", headers=plain), 415, "unsupported_media_type")
    coded = {"Content-Type": "application/x-www-form-urlencoded"}
    fish_error(door.http.patch("/model/anna", content=b"title=%ff", headers=coded), 400, "invalid_value")
    fish_error(door.http.patch("/model/anna", content=b"a=1&" * 100, headers=coded), 400, "invalid_value")
    assert names(door) == ["anna", "berta"]
    assert door.http.patch("/model/anna", json={"title": "ANNA"}).json()["title"] == "ANNA"
    assert names(door) == ["ANNA", "berta"]
    assert door.speak(voice="anna").status_code == 200
