"""What comes back: bytes, headers, whole bodies and streams, through httpx and through OpenAI's own client."""

import io
import struct
import threading
import wave

import pytest

from duetts.audio.encode import wav_header
from tests.server.conftest import NATIVE, Door
from tests.server.sine import FRAME, RATE, hum


def test_a_whole_wav(door: Door) -> None:
    answer = door.speak(seed=11)
    assert answer.status_code == 200
    pcm = b"".join(hum(11, index) for index in range(3))
    assert answer.content == wav_header(RATE, len(pcm)) + pcm
    with wave.open(io.BytesIO(answer.content)) as reader:
        assert reader.getparams()[:4] == (1, 2, RATE, 3 * FRAME)
    headers = answer.headers
    expected = {
        "content-type": "audio/wav",
        "content-length": str(len(answer.content)),
        "content-disposition": 'inline; filename="speech.wav"',
        "cache-control": "no-store",
        "x-sample-rate": "44100",
        "x-channels": "1",
        "x-bit-depth": "16",
        "x-model": NATIVE,
        "x-seed": "11",
        "x-input-tokens": "7",
        "x-output-tokens": "3",
        "x-finish-reason": "stop",
        "server-timing": "queue;dur=1.0, prefill;dur=2.0, ttfa;dur=3.0, total;dur=4.0",
    }
    assert {name: headers[name] for name in expected} == expected
    assert float(headers["x-audio-duration"]) == pytest.approx(3 * FRAME / RATE, abs=1e-5)
    assert float(headers["x-rtf"]) == pytest.approx(0.004 / (3 * FRAME / RATE), rel=0.01)
    assert headers["x-speech-id"] == headers["x-request-id"] == door.service.requests[0].request_id
    assert "x-ignored-fields" not in headers


def test_whole_pcm(door: Door) -> None:
    answer = door.speak(seed=1, response_format="pcm")
    assert answer.headers["content-type"] == "audio/pcm; rate=44100; channels=1"
    assert answer.headers["content-disposition"] == 'inline; filename="speech.pcm"'
    assert answer.content == b"".join(hum(1, index) for index in range(3))


@pytest.mark.parametrize("response_format", ["wav", "pcm"])
def test_a_stream_has_the_samples_of_the_whole_body(door: Door, response_format: str) -> None:
    whole = door.speak(seed=7, response_format=response_format)
    streamed = door.speak(seed=7, response_format=response_format, stream_format="audio")
    assert streamed.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in streamed.headers
    assert streamed.headers["x-accel-buffering"] == "no"
    assert streamed.headers["server-timing"].startswith("ttfa;dur=")
    header = 44 if response_format == "wav" else 0
    assert streamed.content[header:] == whole.content[header:]
    if header:
        assert struct.unpack_from("<I", streamed.content, 4) == struct.unpack_from("<I", streamed.content, 40) == (0xFFFFFFFF,)


def test_a_stream_comes_as_it_is_made(door: Door) -> None:
    door.service.knobs.held_at = 2
    body = {"input": "Hello.", "stream_format": "audio", "response_format": "pcm"}
    with door.http.stream("POST", "/v1/audio/speech", json=body) as answer:
        parts = answer.iter_raw()
        early = next(parts) + next(parts)  # while the third chunk is not made
        door.service.knobs.held_at = -1
        assert (len(early), len(b"".join(parts))) == (4 * FRAME, 2 * FRAME)


def test_a_seed_fixes_the_bytes_alone_and_among_others(door: Door) -> None:
    alone = door.speak(seed=42).content
    assert door.speak(seed=42).content == alone
    answers: dict[int, bytes] = {}

    def speak(seed: int) -> None:
        answers[seed] = door.speak(seed=seed).content

    threads = [threading.Thread(target=speak, args=(seed,)) for seed in range(40, 48)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[42] == alone
    assert len(set(answers.values())) == 8


def test_numbers_reach_the_service_as_they_are(door: Door) -> None:
    door.speak(temperature=0, top_p=0.5, top_k=20, repetition_penalty=1.1, seed=-5, max_new_tokens=9, timeout=2.5)
    request = door.service.requests[0]
    assert (request.text, request.temperature, request.top_p, request.top_k) == ("Hello there.", 0, 0.5, 20)
    assert (request.repetition_penalty, request.seed, request.max_new_tokens, request.timeout_s) == (1.1, -5, 9, 2.5)
