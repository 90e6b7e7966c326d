"""Speech over real HTTP from the real synthesizer and engine on the tiny model."""

import base64
import io
import json
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..audio.listening import hear
from ..inputs import REF_TEXT, REFUSED_CLIPS, clip, clips
from .real import Served, serve
from .test_events import events_of, joined
from .test_trial_requests import ROWS, filled

TEXTS = ["Hi.", "One two three.", "Hello, how are you?", "The meeting is at 4.", "Yes, of course!", "Why?"]


@pytest.fixture
def served(tiny_served: Served) -> Served:
    return tiny_served


@pytest.fixture
def endless(endless_folder: Path) -> Iterator[Served]:
    yield from serve(endless_folder, max_num_seqs=1, max_queue=1)


def samples(body: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(body)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (44100, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def request_of(index: int) -> dict[str, Any]:
    """Different texts, seeds and sampling; some with a reference, some streamed."""
    fields: dict[str, Any] = {
        "input": TEXTS[index % len(TEXTS)], "seed": index, "temperature": 0.6 + 0.1 * (index % 5),
        "response_format": "pcm", "max_new_tokens": 4 + 3 * (index % 6),
    }  # fmt: skip
    if index % 4 == 0:
        encoded = base64.b64encode(clip("control_pcm16.wav")).decode()
        fields |= {"ref_audio": encoded, "ref_text": REF_TEXT}
    if index % 3 == 0:
        fields["stream_format"] = "audio"
    return fields


@pytest.mark.parametrize("count", [3, 24])
def test_requests_at_once_give_the_same_bytes_as_each_alone(served: Served, count: int) -> None:
    alone = [served.speak(**request_of(index)).content for index in range(count)]
    assert all(alone)
    with ThreadPoolExecutor(count) as pool:
        together = list(pool.map(lambda index: served.speak(**request_of(index)).content, range(count)))
    assert together == alone
    served.settled()


def test_streamed_bytes_equal_complete_bytes(served: Served) -> None:
    fields = {"input": "One two three.", "seed": 11, "max_new_tokens": 40}
    complete = served.speak(**fields).content
    with served.http.stream("POST", "/v1/audio/speech", json={**fields, "stream_format": "audio"}) as answer:
        assert "content-length" not in answer.headers
        parts = list(answer.iter_raw())
    streamed = b"".join(parts)
    assert len(parts) > 1
    assert streamed[:4] == b"RIFF"
    assert streamed[40:44] == b"\xff\xff\xff\xff"
    assert streamed[44:] == complete[44:]
    again = served.speak(**{**fields, "ref_audio": base64.b64encode(streamed).decode(), "ref_text": "One two three."})
    assert again.status_code in (200, 400)  # our own stream is a clip like any other: used, or refused as too short
    if again.status_code == 400:
        assert again.json()["error"]["code"] in ("reference_too_short", "reference_too_long")


@pytest.mark.parametrize("row", clips(), ids=lambda row: Path(row["file"]).name)
def test_every_clip_has_its_outcome(served: Served, row: dict[str, Any]) -> None:
    name = Path(row["file"]).name
    encoded = base64.b64encode(clip(name)).decode()
    answer = served.speak(
        input="Hi.", seed=1, max_new_tokens=4, ref_audio=f"data:audio/wav;base64,{encoded}", ref_text=REF_TEXT
    )
    assert answer.status_code in row["status_allowed"], answer.text
    if name in REFUSED_CLIPS:
        assert answer.json()["error"]["code"] == REFUSED_CLIPS[name]
        assert answer.json()["error"]["param"] == "ref_audio"
    else:
        assert answer.status_code == 200
        assert len(samples(answer.content)) > 0


def test_the_prompt_holds_the_clip(served: Served) -> None:
    """Every frame of the reference is a position of the prompt: ceil(samples / 2048) of them, and its transcript."""
    plain = int(served.speak(input="Hi.", seed=1).headers["X-Input-Tokens"])
    fields = {"ref_audio": base64.b64encode(clip("control_pcm16.wav")).decode(), "ref_text": "abc"}
    cloned = int(served.speak(input="Hi.", seed=1, **fields).headers["X-Input-Tokens"])
    frames = -(-int(4.027 * 44100) // 2048)
    assert cloned - plain - frames in range(len("abc") + len("<|speaker:0|>"), 24)
    twice = served.synthesizer.stats()
    served.speak(input="Why?", seed=2, **fields)
    again = served.synthesizer.stats()
    assert again["reference_misses"] == twice["reference_misses"]
    assert again["reference_hits"] == twice["reference_hits"] + 1


def test_events_tell_the_usage_of_a_clone(served: Served) -> None:
    fields = {"ref_audio": base64.b64encode(clip("control_pcm16.wav")).decode(), "ref_text": REF_TEXT, "seed": 3}
    answer = served.speak(input="Hi.", stream=True, response_format="mp3", speed=1.5, **fields)
    *deltas, done = events_of(answer.text)
    usage = done["usage"]
    assert usage["input_tokens"] == int(answer.headers["X-Input-Tokens"])
    assert usage["input_token_details"]["audio_tokens"] == -(-int(4.027 * 44100) // 2048)
    assert sum(usage["input_token_details"].values()) == usage["input_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert done["finish_reason"] in ("stop", "length")
    seconds = usage["output_tokens"] * 2048 / 44100 / 1.5
    assert done["duration"] == pytest.approx(seconds, abs=1e-3)
    heard, rate = hear(joined(deltas))
    assert len(heard) / rate == pytest.approx(seconds, abs=0.06)


def test_a_multipart_file_clones_like_a_data_uri(served: Served) -> None:
    audio = clip("control_pcm16.wav")
    form = {"input": "Hi.", "ref_text": REF_TEXT, "seed": "5"}
    posted = served.http.post("/v1/audio/speech", data=form, files={"ref_audio": ("clip.wav", audio, "audio/wav")})
    inline = served.speak(input="Hi.", ref_text=REF_TEXT, seed=5, ref_audio=base64.b64encode(audio).decode())
    assert posted.status_code == 200
    assert posted.content == inline.content


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_trial_requests(served: Served, row: dict[str, Any]) -> None:
    body = row.get("raw_body") or json.dumps({name: filled(value) for name, value in row["body"].items()})
    answer = served.http.post("/v1/audio/speech", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in row["status_allowed"], answer.text


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"input": "..."}, "nothing_to_speak", "input"),
        ({"input": "x", "temperature": 3}, "out_of_range", "temperature"),
        ({"input": "x", "top_p": 0}, "out_of_range", "top_p"),
        ({"input": "x", "top_k": -1}, "out_of_range", "top_k"),
        ({"input": "x", "seed": 2**63}, "out_of_range", "seed"),
        ({"input": "x", "max_new_tokens": 0}, "out_of_range", "max_new_tokens"),
        ({"input": "x", "max_new_tokens": 10**6}, "context_length_exceeded", "max_new_tokens"),
        ({"input": "a" + "." * 2000}, "context_length_exceeded", "input"),
        ({"input": "x" * 40000}, "input_too_long", "input"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals_name_field_and_code(served: Served, fields: dict[str, Any], code: str, field: str) -> None:
    served.settled()  # a step under way would be counted later
    before = served.synthesizer.stats()["steps"]
    answer = served.speak(**fields)
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, field)
    assert served.synthesizer.stats()["steps"] == before


def test_a_deadline_is_504(endless: Served) -> None:
    answer = endless.speak(input="A long one.", max_new_tokens=900, timeout=0.2)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    endless.settled()
