"""What is asked: lengths from one table, texts and clips that never repeat, bodies as each server wants them."""

from __future__ import annotations

import base64
import io
import json
import math
import wave

import numpy as np
import pytest

from duetts.bench.workloads import (
    DIALECTS,
    LONGEST,
    REFERENCE_S,
    SHORTEST,
    TEXT_CHARS,
    WORKLOADS,
    Asker,
    Row,
    clip,
    mean_frames,
    table,
    text,
)
from duetts.errors import ConfigError

ROW = Row(150, 3, 100)


def test_the_table_is_the_same_for_everybody() -> None:
    """The first rows are written down: a change of the table makes earlier measurements incomparable."""
    rows = table()
    assert rows[:3] == (Row(400, 30, 187), Row(60, 3, 263), Row(150, 30, 151))
    assert {row.text_chars for row in rows} == set(TEXT_CHARS)
    assert {row.reference_s for row in rows} == set(REFERENCE_S)
    frames = [row.frames for row in rows]
    assert (min(frames), max(frames)) == (SHORTEST, LONGEST)
    assert abs(math.log(float(np.median(frames)) / math.sqrt(SHORTEST * LONGEST))) < 0.05
    assert 230 < mean_frames() < 260


@pytest.mark.parametrize("chars", TEXT_CHARS)
def test_texts_have_their_length_and_never_repeat(chars: int) -> None:
    texts = [text(number, chars) for number in range(2000)]
    assert {len(one) for one in texts} == {chars}
    assert len(set(texts)) == len(texts)
    assert all(one.endswith(".") and one.isascii() and one[0].isupper() for one in texts)
    assert texts[7] == text(7, chars)


def test_clips_sound_and_are_all_different() -> None:
    clips = [clip(3, number) for number in (*range(200), 1 << 40)]
    assert len(set(clips)) == len(clips)
    with wave.open(io.BytesIO(clips[5])) as file:
        assert file.getnframes() == 3 * file.getframerate()
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(float)
    assert 2000 < np.abs(samples).max() < 20000
    assert samples.std() > 200
    quiet = np.sort(samples[: 3 * 24000].reshape(-1, 480).std(axis=1))  # syllables and pauses
    assert quiet[-15:].mean() > 5 * quiet[:15].mean()


def body(workload: str, number: int, streaming: bool = True, **more: object) -> dict[str, object]:
    data, seconds = Asker(**more).body(WORKLOADS[workload], ROW, number, 43, streaming)  # type: ignore[arg-type]
    found: dict[str, object] = json.loads(data)
    assert ("ref_audio" in found) == (seconds > 0)
    return found


def test_a_body_says_what_makes_engines_comparable() -> None:
    found = body("T", 1, model="m", fields={"seed": 3, "chunk_length": None})
    assert found == {
        "model": "m", "input": text(1, 150), "response_format": "pcm", "max_new_tokens": 43, "temperature": 0.8, "top_k": 30,
        "stream_format": "audio", "seed": 3,
    }  # fmt: skip
    assert "stream_format" not in body("T", 1, streaming=False)
    assert body("T", 1)["chunk_length"] == 1000
    assert body("T", 1, dialect="vllm-omni")["extra_params"] == {"temperature": 0.8, "top_k": 30}
    assert body("T", 1, dialect="sglang-omni")["stream"] is True
    assert set(DIALECTS) == {"duetts", "vllm-omni", "sglang-omni", "openai"}
    with pytest.raises(ConfigError, match="duetts, vllm-omni"):
        Asker("latin")


def test_voices_are_reused_or_never_heard_before() -> None:
    def clips(workload: str) -> list[object]:
        return [(found["ref_audio"], found["ref_text"]) for found in (body(workload, number) for number in range(24))]

    assert len(set(clips("L1"))) == 1
    assert len(set(clips("L2"))) == len(set(clips("C1"))) == 24
    assert len(set(clips("C2"))) == 8
    assert not set(clips("C1")) & set(clips("C2"))
    assert "ref_audio" not in body("T", 0)
    audio = str(body("L1", 0)["ref_audio"]).removeprefix("data:audio/wav;base64,")
    with wave.open(io.BytesIO(base64.b64decode(audio))) as file:
        assert file.getnframes() == 10 * file.getframerate()
