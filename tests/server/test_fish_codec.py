"""The codec by itself over HTTP: clips to codes, codes to sound, and everything that is neither."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ormsgpack
import pytest

from duetts.errors import Overloaded
from tests.audio.listening import hear
from tests.inputs import clip
from tests.server.conftest import Door
from tests.server.real import Served, serve
from tests.server.sine import FRAME, RATE, Knobs
from tests.server.test_fish import fish_error

CLIP = clip("control_pcm16.wav")
FRAMES = -(-int(4.027 * RATE) // FRAME)
PACKED = {"Content-Type": "application/msgpack"}


def encode(http: httpx.Client, *clips: bytes) -> list[Any]:
    answer = http.post("/v1/vqgan/encode", content=ormsgpack.packb({"audios": list(clips)}), headers=PACKED)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/msgpack"
    return list(ormsgpack.unpackb(answer.content)["tokens"])


def decode(http: httpx.Client, tokens: Any, query: str = "") -> list[bytes]:
    answer = http.post(f"/v1/vqgan/decode{query}", content=ormsgpack.packb({"tokens": tokens}), headers=PACKED)
    assert answer.status_code == 200, answer.text
    return list(ormsgpack.unpackb(answer.content)["audios"])


def test_clips_become_codes_however_they_come(door: Door) -> None:
    (tokens,) = encode(door.http, CLIP)
    assert np.array(tokens).shape == (4, FRAMES)
    as_json = door.http.post("/v1/vqgan/encode?format=json", json={"audios": [base64.b64encode(CLIP).decode()] * 2})
    assert as_json.json() == {"tokens": [tokens, tokens]}
    two = [("audios", CLIP), ("audios", CLIP)]
    form = door.http.post("/v1/vqgan/encode", files=two, headers={"Accept": "application/json"})
    assert form.json() == {"tokens": [tokens, tokens]}
    one = door.http.post("/v1/vqgan/encode?format=json", files={"audios": CLIP})
    assert one.json() == {"tokens": [tokens]}


def test_codes_become_sound_in_four_ways(door: Door) -> None:
    tokens = [[[3, 700], [0, 0], [0, 0], [0, 0]]]
    expected = np.repeat(np.array([3, 700], np.int16), FRAME)
    (raw,) = decode(door.http, tokens, "?dtype=s16")
    assert np.array_equal(np.frombuffer(raw, "<i2"), expected)
    (half,) = decode(door.http, tokens)
    assert np.array_equal(np.frombuffer(half, "<f2"), (expected / 32768).astype(np.float16))
    (full,) = decode(door.http, tokens, "?dtype=f32")
    assert np.array_equal(np.frombuffer(full, "<f4"), (expected / 32768).astype(np.float32))
    (wav,) = decode(door.http, tokens, "?dtype=wav")
    heard, rate = hear(wav)
    assert (len(heard), rate) == (2 * FRAME, RATE)
    as_json = door.http.post("/v1/vqgan/decode?dtype=s16&format=json", json={"tokens": tokens * 3})
    assert [base64.b64decode(audio) for audio in as_json.json()["audios"]] == [raw] * 3


@pytest.mark.parametrize(
    ("path", "body", "code", "words"),
    [
        ("encode", {}, "missing_field", "audios is missing"),
        ("encode", {"audios": 5}, "invalid_type", "audios must be a list"),
        ("encode", {"audios": []}, "out_of_range", "between 1 and 32"),
        ("encode", {"audios": ["AAAA"] * 33}, "out_of_range", "33 entries"),
        ("encode", {"audios": ["AAAA", 5]}, "invalid_type", "audios.1"),
        ("encode", {"audios": ["AAAA", "AAAA"]}, "reference_undecodable", "audios.0"),
        ("encode", {"audios": [5]}, "invalid_type", "audios.0"),
        ("encode", {"audios": ["%%%%"]}, "invalid_value", "audios.0"),
        ("encode", {"audios": [b"no sound"]}, "reference_undecodable", "audios.0"),
        ("decode", {}, "missing_field", "tokens is missing"),
        ("decode", {"tokens": {}}, "invalid_type", "tokens must be a list"),
        ("decode", {"tokens": [[]]}, "invalid_type", "tokens.0"),
        ("decode", {"tokens": [[1, 2]]}, "invalid_type", "tokens.0"),
        ("decode", {"tokens": [[[1, 2], [1]]]}, "invalid_type", "one length"),
        ("decode", {"tokens": [[[1]] * 4, [[1.5]] * 4]}, "invalid_type", "tokens.1 must hold integers"),
        ("decode", {"tokens": [[[True]] * 4]}, "invalid_type", "integers"),
        ("decode", {"tokens": [[[2**40]] * 4]}, "invalid_type", "integers"),
        ("decode", {"tokens": [[[1]] * 3]}, "invalid_value", "tokens.0"),
        ("decode", {"tokens": [[[5000]] * 4]}, "invalid_value", "tokens.0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_neither_is_refused_by_name(door: Door, path: str, body: dict[str, Any], code: str, words: str) -> None:
    answer = door.http.post(f"/v1/vqgan/{path}", content=ormsgpack.packb(body), headers=PACKED)
    assert words in fish_error(answer, 400 if code != "local_media_forbidden" else 403, code)
    assert len(encode(door.http, CLIP)) == 1


def test_other_refusals(door: Door) -> None:
    assert "f16, s16" in fish_error(door.http.post("/v1/vqgan/decode?dtype=f64", json={"tokens": []}), 400, "invalid_value")
    fish_error(door.http.get("/v1/vqgan/decode"), 405, "method_not_allowed")
    too_long = clip("one_hour_small_file.flac")
    message = fish_error(door.http.post("/v1/vqgan/encode", files={"audios": too_long}), 400, "reference_too_long")
    assert "60" in message


def test_leaving_ends_the_work(door: Door) -> None:
    door.service.knobs = Knobs(chunk_wait_s=0.2)
    with pytest.raises(httpx.ReadTimeout):
        door.http.post("/v1/vqgan/decode", json={"tokens": [[[1]] * 4] * 30}, timeout=0.3)
    loop = door.service.loop
    assert loop is None or loop.is_running()
    door.service.reset()
    assert decode(door.http, [[[1]] * 4])


# -- the real codec --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tiny_folder: Path) -> Iterator[Served]:
    yield from serve(tiny_folder, max_num_seqs=2, max_queue=2)


def test_the_real_codec_there_and_back(real: Served) -> None:
    (tokens,) = encode(real.http, CLIP)
    assert np.array(tokens).shape == (4, FRAMES)
    (pcm,) = decode(real.http, [tokens], "?dtype=s16")
    assert len(pcm) == 2 * FRAME * FRAMES
    head = [row[:10] for row in tokens]
    first, second, again = decode(real.http, [head, tokens, head], "?dtype=s16")
    assert first == again == pcm[: 2 * FRAME * 10]  # the codec looks back only
    assert second == pcm
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: decode(real.http, [head], "?dtype=s16"), range(3))) == [[first]] * 3
    real.settled()


@pytest.mark.parametrize(
    ("tokens", "code", "words"),
    [
        ([[64]] + [[0]] * 3, "out_of_range", "codebook 0; 0..63"),
        ([[0]] + [[0]] * 2 + [[32]], "out_of_range", "codebook 3; 0..31"),
        ([[-1]] + [[0]] * 3, "out_of_range", "-1..-1"),
        ([[0]] * 5, "invalid_value", "5 codebooks; the model has 4"),
        ([[0] * 2000] * 4, "out_of_range", "2000 frames"),
        ([[]] * 4, "out_of_range", "0 frames"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_codes_that_the_model_does_not_have(real: Served, tokens: Any, code: str, words: str) -> None:
    steps = real.synthesizer.stats()["frames"]
    answer = real.http.post("/v1/vqgan/decode", json={"tokens": [tokens]})
    assert words in fish_error(answer, 400, code)
    assert real.synthesizer.stats()["frames"] == steps
    real.settled()


def test_a_full_engine_says_so(real: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(utterance: Any) -> Any:
        raise Overloaded("full", retry_after_s=3)

    monkeypatch.setattr(real.synthesizer._speaker, "speak", full)
    answer = real.http.post("/v1/vqgan/decode", json={"tokens": [[[0]] * 4]})
    fish_error(answer, 429, "queue_full")
    assert answer.headers["retry-after"] == "3"
