"""Many texts in one body: a result for each, whatever becomes of the others."""

import base64
import io
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email import message_from_bytes, policy
from typing import Any

import httpx
import ormsgpack
import pytest

from duetts.audio.encode import wav_header
from duetts.errors import EngineFailure, NotReady, Overloaded
from duetts.server import batch
from tests.inputs import REF_TEXT, clip
from tests.server.conftest import NATIVE, Door, error_of
from tests.server.sine import FRAME, RATE, Knobs, hum
from tests.server.test_failures import open_request
from tests.server.test_outcomes import outcome_of
from tests.waiting import wait_until

PATH = "/v1/audio/speech/batch"
REF = base64.b64encode(clip("control_pcm16.wav")).decode()


def short(value: Any) -> str:
    return str(value)[:50]


def post(door: Door, items: Any, accept: str = "", **defaults: Any) -> httpx.Response:
    return door.http.post(PATH, json={"items": items, **defaults}, headers={"Accept": accept})


def results_of(door: Door, items: Any, **defaults: Any) -> list[dict[str, Any]]:
    answer = post(door, items, **defaults)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["results"])


def wav(seed: int) -> bytes:
    pcm = b"".join(hum(seed, index) for index in range(3))
    return wav_header(RATE, len(pcm)) + pcm


def test_a_bad_item_fails_alone(door: Door) -> None:
    answer = post(door, [{"input": "a b c", "seed": 1}, {"input": ""}, {"input": "d", "voice": "default", "seed": 2}])
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert (body["object"], body["total"], body["succeeded"], body["failed"]) == ("audio.speech.batch", 3, 2, 1)
    assert body["id"] == answer.headers["X-Speech-Id"]
    assert body["id"].startswith("speech-batch-")
    first, second, third = body["results"]
    assert base64.b64decode(first.pop("audio_data")) == wav(1)
    first.pop("voice", None)  # of no account here
    assert first == {
        "index": 0, "status": "success", "id": f"{body['id']}-0", "format": "wav", "media_type": "audio/wav", "seed": 1,
        "pieces": {"total": 1, "spoken": 1, "redone": [], "suspect": []},
        "sample_rate": RATE, "duration": pytest.approx(3 * FRAME / RATE, abs=1e-5), "finish_reason": "stop",
        "usage": {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10,
                  "input_token_details": {"text_tokens": 7, "audio_tokens": 0}},
    }  # fmt: skip
    assert second["error"]["code"] == "invalid_value"
    assert second["error"]["param"] == "input"
    assert second.keys() == {"index", "status", "error"}
    assert (second["status"], third["status"], third["index"]) == ("error", "success", 2)
    assert base64.b64decode(third["audio_data"]) == wav(2)
    assert outcome_of(door, first["id"])["finish_reason"] == "stop"


def test_fields_at_the_top_are_defaults(door: Door) -> None:
    items = [{"input": "a"}, {"input": "b", "seed": 2, "response_format": "pcm"}, {"input": "c", "seed": None, "volume": -6}]
    results = results_of(
        door, items, seed=1, response_format="mp3", volume_multiplier=2, model=NATIVE, temperature=0.5, whim=1, language="en"
    )
    assert [result["seed"] for result in results] == [1, 2, 1]
    assert [result["format"] for result in results] == ["mp3", "pcm", "mp3"]
    assert results[1]["media_type"] == f"audio/pcm; rate={RATE}; channels=1"
    assert len(base64.b64decode(results[1]["audio_data"])) == 2 * 3 * FRAME
    assert results[0]["ignored_fields"] == ["whim", "language"]
    assert [request.temperature for request in door.service.requests] == [0.5] * 3
    assert [request.streaming for request in door.service.requests] == [False] * 3
    assert len({request.request_id for request in door.service.requests}) == 3


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({}, "missing_field", "items"),
        ({"items": None}, "missing_field", "items"),
        ({"items": {}}, "invalid_type", "items"),
        ({"items": "x"}, "invalid_type", "items"),
        ({"items": []}, "out_of_range", "items"),
        ({"items": [{"input": "x"}] * 33}, "out_of_range", "items"),
        ({"items": [{"input": "x"}], "stream": True}, "unsupported_field", "stream"),
        ({"items": [{"input": "x"}, {"input": "y", "stream": True}]}, "unsupported_field", "items.1.stream"),
        ({"items": [{"input": "x", "stream_format": "sse"}]}, "unsupported_field", "items.0.stream_format"),
        ({"items": [{"input": "x"}, {"input": "y"}], "speed": 9}, "out_of_range", "speed"),
        ({"items": [{"input": "x"}], "speed": "1"}, "invalid_type", "speed"),
        ({"items": [{"input": "x"}], "response_format": "m4a"}, "invalid_value", "response_format"),
        ({"items": [{"input": "x"}], "max_new_tokens": 0}, "out_of_range", "max_new_tokens"),
        ({"items": [{"input": "x"}], "voice": "nobody"}, "unknown_voice", "voice"),
        ({"items": [{"input": "x"}], "ref_audio": REF}, "reference_text_required", "ref_text"),
        ({"items": [{"input": "x"}], "ref_audio": REF[:400], "ref_text": "x"}, "reference_too_short", "ref_audio"),
        ({"items": [{}], "input": " "}, "invalid_value", "input"),
    ],
    ids=short,
)
def test_a_useless_body_is_refused_whole(door: Door, body: dict[str, Any], code: str, field: str) -> None:
    error_of(door.http.post(PATH, json=body), 400, code, field)


def test_an_unknown_model_as_default_is_404(door: Door) -> None:
    error_of(post(door, [{"input": "x"}], model="no-such"), 404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("bad", "code", "field"),
    [
        ({"input": "x", "speed": 9}, "out_of_range", "speed"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": "x", "model": "no-such"}, "model_not_found", "model"),
        ({"input": "x", "max_new_tokens": 0}, "out_of_range", "max_new_tokens"),
        ({"input": "x", "ref_audio": "file:///etc/passwd", "ref_text": "x"}, "local_media_forbidden", "ref_audio"),
        ({"input": "x", "ref_audio": REF[:400], "ref_text": "x"}, "reference_too_short", "ref_audio"),
        ({"input": "x", "references": [{"audio": "%", "text": "x"}]}, "invalid_value", "references"),
        ({}, "missing_field", "input"),
        ("text", "invalid_type", "items.1"),
        (None, "invalid_type", "items.1"),
        ([], "invalid_type", "items.1"),
    ],
    ids=short,
)
def test_each_fault_of_an_item_is_its_own(door: Door, bad: Any, code: str, field: str) -> None:
    good, worse = results_of(door, [{"input": "fine", "seed": 1}, bad])
    assert base64.b64decode(good["audio_data"]) == wav(1)
    assert (worse["status"], worse["error"]["code"], worse["error"]["param"]) == ("error", code, field)


def test_all_items_may_fail_each_for_itself(door: Door) -> None:
    answer = post(door, [{"input": ""}, {"input": "x", "speed": 9}])
    assert answer.status_code == 200
    assert (answer.json()["succeeded"], answer.json()["failed"]) == (0, 2)


def test_a_failure_in_the_midst_is_one_items(door: Door) -> None:
    door.service.knobs = Knobs(failing="b")
    results = results_of(door, [{"input": name} for name in "abc"])
    assert [result["status"] for result in results] == ["success", "error", "success"]
    assert results[1]["error"]["code"] == "internal_error"


def test_one_clip_is_decoded_once_for_all_items(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of the clip is turned into bytes once; the synthesizer then knows equal bytes (test_real_speech)."""
    calls = []
    original = batch.read_clip
    monkeypatch.setattr(batch, "read_clip", lambda *arguments: calls.append(1) or original(*arguments))
    in_list = {"input": "x", "references": [{"audio": REF, "text": "own"}]}
    results_of(door, [*({"input": str(index)} for index in range(5)), in_list], ref_audio=REF, ref_text=REF_TEXT)
    assert len(calls) == 1
    audios = [request.references[0].audio for request in door.service.requests]
    assert all(audio is audios[0] for audio in audios)
    assert [request.references[0].text for request in door.service.requests] == [REF_TEXT] * 5 + ["own"]


def together(door: Door, knobs: Knobs, count: int, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of items whose first chunks are held until so many are spoken at once."""
    door.service.knobs = knobs
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(results_of, door, items)
        wait_until(lambda: door.service.speaking == count)
        knobs.held_at = -1
        return results.result()


def test_results_keep_their_order_and_few_run_at_once(door: Door) -> None:
    results = together(door, Knobs(held_at=0), batch.AT_ONCE, [{"input": str(index), "seed": index} for index in range(32)])
    assert [(result["index"], result["seed"]) for result in results] == [(index, index) for index in range(32)]
    assert door.service.most_speaking == batch.AT_ONCE


def test_a_batch_waits_for_places_that_it_has_itself(door: Door) -> None:
    results = together(door, Knobs(places=2, held_at=0), 2, [{"input": str(index)} for index in range(6)])
    assert [result["status"] for result in results] == ["success"] * 6
    assert door.service.most_speaking == 2
    assert door.outcomes.num_running == 0


@pytest.mark.parametrize(
    ("error", "error_at", "status", "code"),
    [
        (Overloaded("full", retry_after_s=2), 0, 429, "queue_full"),
        (Overloaded("full", retry_after_s=2), -1, 429, "queue_full"),
        (NotReady("dead"), 0, 503, "not_ready"),
        (NotReady("dead"), -1, 503, "not_ready"),
    ],
    ids=str,
)
def test_no_room_for_anything_is_a_status(door: Door, error: Exception, error_at: int, status: int, code: str) -> None:
    door.service.knobs = Knobs(error=error, error_at=error_at)
    answer = post(door, [{"input": ""}, {"input": "x"}, {"input": "y"}] if error_at == 0 else [{"input": "x"}] * 2)
    error_of(answer, status, code, None)
    assert "retry-after" in answer.headers
    assert door.outcomes.num_running == 0


def test_an_item_gives_up_when_there_is_never_room(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PATIENCE_S", 0.1)
    door.service.knobs = Knobs(places=1, num_chunks=50, chunk_wait_s=0.01)
    results = results_of(door, [{"input": "a"}, {"input": "b"}])
    assert results[0]["status"] == "success"
    assert results[1]["error"]["code"] == "queue_full"


def test_lines_come_when_they_are_ready(door: Door) -> None:
    items = [{"input": "a", "speed": 0.25, "response_format": "mp3"}, {"input": ""}, {"input": "c"}]
    answer = post(door, items, accept="text/html, application/x-ndjson;q=0.9")
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert sorted(line["index"] for line in lines) == [0, 1, 2]
    assert lines[0]["index"] == 1
    assert {line["status"] for line in lines} == {"success", "error"}


def test_parts_carry_bytes(door: Door) -> None:
    items = [{"input": "a", "seed": 1}, {"input": ""}, {"input": "c", "response_format": "pcm"}]
    answer = post(door, items, accept="multipart/mixed")
    head = b"Content-Type: " + answer.headers["content-type"].encode() + b"\r\n\r\n"
    first, third, summary = message_from_bytes(head + answer.content, policy=policy.HTTP).iter_parts()
    assert first.get_payload(decode=True) == wav(1)
    assert (first.get_content_type(), first.get_filename()) == ("audio/wav", "0.wav")
    assert (third.get_content_type(), third.get_param("rate")) == ("audio/pcm", str(RATE))
    body = json.loads(summary.get_payload(decode=True))
    assert [result.get("file") for result in body["results"]] == ["0.wav", None, "2.pcm"]
    assert body["results"][1]["error"]["code"] == "invalid_value"
    assert (body["total"], body["succeeded"], body["failed"]) == (3, 2, 1)
    assert "audio_data" not in body["results"][0]


def test_a_zip_file_holds_files(door: Door) -> None:
    answer = post(door, [{"input": "a", "seed": 1}, {"input": ""}], accept="application/zip")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["0.wav", "results.json"]
        assert archive.read("0.wav") == wav(1)
        assert json.loads(archive.read("results.json"))["failed"] == 1


@pytest.mark.parametrize("accept", ["", "*/*", "application/json, application/zip", "text/html", ",;"])
def test_json_is_what_nobody_chose_otherwise(door: Door, accept: str) -> None:
    assert post(door, [{"input": "a"}], accept=accept).json()["succeeded"] == 1


def test_msgpack_and_forms(door: Door) -> None:
    body = {"items": [{"input": "a"}, {"input": "b"}], "ref_audio": clip("control_pcm16.wav"), "ref_text": REF_TEXT}
    packed = door.http.post(PATH, content=ormsgpack.packb(body), headers={"Content-Type": "application/msgpack"})
    assert packed.json()["succeeded"] == 2, packed.text
    form = {"items": '[{"input": "a"}, {"input": "5"}]', "ref_text": REF_TEXT}
    posted = door.http.post(PATH, data=form, files={"ref_audio": clip("control_pcm16.wav")})
    assert posted.json()["succeeded"] == 2, posted.text
    assert {request.references[0].audio for request in door.service.requests} == {clip("control_pcm16.wav")}


def test_leaving_ends_every_item(door: Door) -> None:
    door.service.knobs = Knobs(num_chunks=10**6, chunk_wait_s=0.005)
    before = door.outcomes.counts["client_disconnect"]
    with open_request(door, PATH, items=[{"input": "x"}] * 4):
        wait_until(lambda: door.service.speaking == 4)
    wait_until(lambda: not door.service.speaking and not door.outcomes.num_running)
    assert door.outcomes.counts["client_disconnect"] == before + 4


def test_a_delete_ends_every_item(door: Door) -> None:
    door.service.knobs = Knobs(num_chunks=10**6, chunk_wait_s=0.005)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(post, door, [{"input": "x"}] * 4)
        wait_until(lambda: door.service.speaking == 4)
        batch_id = door.service.requests[0].request_id.rpartition("-")[0]
        assert door.http.delete(f"/v1/audio/speech/{batch_id}").json()["cancelled"] is True
        error_of(future.result(), 499, "cancelled", None)
    assert door.service.speaking == 0


def test_a_fault_of_ours_is_a_500(door: Door) -> None:
    door.service.knobs = Knobs(error=ValueError("secret"), error_at=1)
    assert "secret" not in error_of(post(door, [{"input": "x"}]), 500, "internal_error", None)
    door.service.knobs = Knobs(error=EngineFailure("lost"), error_at=-1)
    assert results_of(door, [{"input": "x"}])[0]["error"]["code"] == "internal_error"
    assert door.outcomes.num_running == 0
