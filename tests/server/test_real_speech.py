"""Speech over real HTTP from the real synthesizer and engine on the tiny model."""

import asyncio
import base64
import io
import json
import threading
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import uvicorn

from duetts.config import EngineConfig, Limits, ServerConfig
from duetts.engine.inprocess import start_speaker
from duetts.server.app import create_app
from duetts.synthesizer import Synthesizer
from tests.waiting import wait_until

from ..audio.listening import hear
from ..inputs import REF_TEXT, REFUSED_CLIPS, clip, clips
from .test_events import events_of, joined
from .test_trial_requests import ROWS, filled

NATIVE = "fishaudio/s2-pro"
TEXTS = ["Hi.", "One two three.", "Hello, how are you?", "The meeting is at 4.", "Yes, of course!", "Why?"]
HALF_SIZED = Limits(max_new_tokens=60)


@dataclass(frozen=True)
class Served:
    """A running server and what tests look at behind it."""

    http: httpx.Client
    base: str
    synthesizer: Synthesizer

    def speak(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/audio/speech", json=fields)

    def settled(self) -> None:
        """Nothing is left of any request."""
        engine = self.synthesizer._speaker._engine
        wait_until(lambda: not engine.stats()["open"] and engine._codec.idle)
        engine.assert_idle()


def serve(folder: Path, **engine: Any) -> Iterator[Served]:
    speaker = start_speaker(folder, EngineConfig(device="cpu", cpu_threads=1, **engine))
    synthesizer = Synthesizer(folder, speaker, HALF_SIZED)
    app = create_app(synthesizer, ServerConfig((NATIVE,), limits=HALF_SIZED))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    base = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=base, timeout=60, trust_env=False) as http:
        yield Served(http, base, synthesizer)
    server.should_exit = True
    thread.join()
    asyncio.run(synthesizer.close())


@pytest.fixture(scope="module")
def served(tiny_folder: Path) -> Iterator[Served]:
    yield from serve(tiny_folder, max_queue=100)


@pytest.fixture
def endless(endless_folder: Path) -> Iterator[Served]:
    yield from serve(endless_folder, max_num_seqs=1, max_queue=1)


def samples(body: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(body)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (44100, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def test_a_sentence_stops_by_itself_as_a_complete_wav(served: Served) -> None:
    answers = [served.speak(model=NATIVE, input="Hello, how are you?", voice="default", seed=seed) for seed in range(20)]
    assert {answer.status_code for answer in answers} == {200}
    stopped = [answer for answer in answers if answer.headers["X-Finish-Reason"] == "stop"]
    assert len(stopped) > 10
    for answer in stopped:
        wav = samples(answer.content)
        assert len(wav) % 2048 == 0
        assert len(wav) > 0
        assert float(answer.headers["X-Audio-Duration"]) == pytest.approx(len(wav) / 44100, abs=1e-3)
        assert answer.headers["Content-Type"] == "audio/wav"
        assert len(answer.content) == int(answer.headers["Content-Length"]) == 44 + 2 * len(wav)


def request_of(index: int) -> dict[str, Any]:
    """Different texts, seeds and sampling; some with a reference, some streamed."""
    fields: dict[str, Any] = {
        "input": TEXTS[index % len(TEXTS)], "seed": index, "temperature": 0.6 + 0.1 * (index % 5),
        "response_format": "pcm", "max_new_tokens": 10 + 5 * (index % 6),
    }  # fmt: skip
    if index % 4 == 0:
        encoded = base64.b64encode(clip("control_pcm16.wav")).decode()
        fields |= {"ref_audio": encoded, "ref_text": REF_TEXT}
    if index % 3 == 0:
        fields["stream_format"] = "audio"
    return fields


@pytest.mark.parametrize("count", [2, 8, 32])
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


def test_without_a_seed_every_answer_differs_and_can_be_had_again(served: Served) -> None:
    first, second = (served.speak(input="One two three.") for _ in range(2))
    seeds = [answer.headers["X-Seed"] for answer in (first, second)]
    assert seeds[0] != seeds[1]
    assert first.content != second.content
    assert served.speak(input="One two three.", seed=int(seeds[0])).content == first.content


@pytest.mark.parametrize("row", clips(), ids=lambda row: Path(row["file"]).name)
def test_every_clip_has_its_outcome(served: Served, row: dict[str, Any]) -> None:
    name = Path(row["file"]).name
    encoded = base64.b64encode(clip(name)).decode()
    answer = served.speak(input="Hi.", seed=1, ref_audio=f"data:audio/wav;base64,{encoded}", ref_text=REF_TEXT)
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


@pytest.mark.parametrize("name", ["mp3", "opus", "flac", "aac"])
def test_each_format_lasts_as_long_as_the_wav_of_the_same_seed(served: Served, name: str) -> None:
    fields = {"input": "Hello, how are you?", "seed": 7}
    wav = samples(served.speak(**fields).content)
    answers = [served.speak(**fields, response_format=name, stream_format=way).content for way in (None, "audio")]
    heard, rate = hear(answers[0])
    assert len(heard) / rate == pytest.approx(len(wav) / 44100, abs=0.06)
    assert answers[0] == answers[1]


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
        ({"input": "stop <|im_end|> now"}, "unsupported_control_token", "input"),
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
    before = served.synthesizer.stats()["steps"]
    answer = served.speak(**fields)
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, field)
    assert served.synthesizer.stats()["steps"] == before


def test_a_speaker_tag_is_spoken_of_not_refused(served: Served) -> None:
    assert served.speak(input="<|speaker:1|>Hi there.", seed=1).status_code == 200


def test_leaving_frees_the_engine(endless: Served) -> None:
    fields = {"input": "A long one.", "max_new_tokens": 900, "response_format": "pcm", "stream_format": "audio"}
    for _ in range(3):
        with endless.http.stream("POST", "/v1/audio/speech", json=fields) as answer:
            next(answer.iter_raw())
        endless.settled()
    assert endless.synthesizer.stats()["finished"]["aborted"] == 3
    assert endless.speak(input="Hi.", max_new_tokens=2).status_code == 200


def test_a_full_line_is_429_with_a_time(endless: Served) -> None:
    long = {"input": "A long one.", "max_new_tokens": 150}
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(endless.speak, **long) for _ in range(2)]
        wait_until(lambda: endless.synthesizer.stats()["open"] == 2)
        answer = endless.speak(input="Hi.")
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert [future.result().status_code for future in running] == [200, 200]


def test_a_deadline_is_504(endless: Served) -> None:
    answer = endless.speak(input="A long one.", max_new_tokens=900, timeout=0.2)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    endless.settled()


def test_the_openai_client_speaks(served: Served, tmp_path: Path) -> None:
    client = openai.OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0)
    with client.audio.speech.with_streaming_response.create(
        model=NATIVE, voice="default", input="Hello there.", response_format="wav", extra_body={"seed": 4}
    ) as answer:
        answer.stream_to_file(tmp_path / "out.wav")
    assert samples((tmp_path / "out.wav").read_bytes()).size
    with pytest.raises(openai.BadRequestError) as refusal:
        client.audio.speech.create(model=NATIVE, voice="default", input="...", response_format="wav")
    assert refusal.value.code == "nothing_to_speak"
    client.close()
