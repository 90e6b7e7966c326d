"""The judges' server and what is asked of it, over real HTTP with the tiny model."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.judge import speak as speaking
from training.judge.references import read_wave
from training.judge.serving import Server, served
from training.judge.sets import Line, read_json, write_lines
from training.judge.speak import claim, describe, measure_speed, speak_all, write_round_trips, write_set

from tests.server.real import Served

RATE, FRAME = 44100, 2048


@pytest.fixture
def server(tiny_served: Served) -> Iterator[Server]:
    with Server(tiny_served.base) as found:
        yield found


def write_original(folder: Path, seconds: float = 1.5) -> Line:
    line = Line("000", "Hello there.", "heart")
    folder.mkdir(parents=True)
    write_lines(folder, [line])
    with wave.open(str(folder / "000-original.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((8000 * np.sin(np.arange(int(seconds * RATE)) * 0.05)).astype("<i2").tobytes())
    return line


def test_a_set_is_asked_for_once(server: Server, tmp_path: Path) -> None:
    lines = [Line("a", "Hello.", "default"), Line("b", "Good morning.", "default")]
    asked: list[tuple[str, int]] = []

    def speak(line: Line, seed: int) -> tuple[bytes, dict[str, Any]]:
        asked.append((line.name, seed))
        return server.speak(line.text, seed)

    write_set(tmp_path / "set", lines, 70, speak)
    first = (tmp_path / "set" / "a-spoken.wav").read_bytes()
    answers = read_json(tmp_path / "set" / "answers.json")
    samples, rate = read_wave(tmp_path / "set" / "b-spoken.wav")
    assert rate == RATE
    assert len(samples) == answers["b-spoken.wav"]["frames"] * FRAME
    assert answers["a-spoken.wav"]["finish"] in ("stop", "length")
    assert (answers["a-spoken.wav"]["seed"], answers["b-spoken.wav"]["seed"]) == (70, 71)
    (tmp_path / "set" / "b-spoken.wav").unlink()
    write_set(tmp_path / "set", lines, 70, speak)
    assert asked == [("a", 70), ("b", 71), ("b", 71)]
    assert server.speak("Hello.", 70)[0] == first, "the same sentence and seed give the same file"


def test_the_codec_is_asked_over_http(server: Server, tmp_path: Path) -> None:
    line = write_original(tmp_path / "heart")
    write_round_trips(server, tmp_path / "codec", tmp_path / "heart")
    before, _ = read_wave(tmp_path / "codec" / f"{line.name}-original.wav")
    after, rate = read_wave(tmp_path / "codec" / f"{line.name}-round-trip.wav")
    assert rate == RATE
    assert 0 <= len(after) - len(before) < 4096


def test_speed_is_measured_once(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaking, "TIMED_REQUESTS", 2)
    measure_speed(server, tmp_path / "speed.json")
    found = read_json(tmp_path / "speed.json")
    assert 0 < found["first_audio_ms"] <= found["first_audio_ms_worst"]
    assert 0 < found["rtf"] <= found["rtf_worst"]
    monkeypatch.setattr(server, "stream", None)
    measure_speed(server, tmp_path / "speed.json")


def test_a_model_is_known_by_its_weights(server: Server, tiny_folder: Path, tmp_path: Path) -> None:
    found = describe(server, tiny_folder)
    assert found["weights"] == "untrained"
    assert found["weights_bytes"] == sum(path.stat().st_size for path in tiny_folder.glob("*.safetensors"))
    assert set(found["sha256"]) == {"model.safetensors", "codec.safetensors"}
    claim(tmp_path / "model.json", found)
    with pytest.raises(SystemExit, match="another model"):
        claim(tmp_path / "model.json", found | {"sha256": {}})


def test_a_refusal_ends_the_judging_with_what_the_server_said(server: Server) -> None:
    with pytest.raises(SystemExit, match=r"400 .*unknown_voice"):
        server.speak("Hello.", 1, voice="nobody")


@pytest.mark.slow
def test_a_server_of_its_own_says_everything(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_original(tmp_path / "originals" / "heart")
    few = speaking.read_sentences()[30:32]
    monkeypatch.setattr(speaking, "read_sentences", lambda: few)
    monkeypatch.setattr(speaking, "cloning_lines", lambda sentences: [Line("held-kumo-0", sentences[0], "held-kumo")])
    monkeypatch.setattr(speaking, "TIMED_REQUESTS", 1)
    story = tmp_path / "story.txt"
    story.write_text("It rained. It rained again.")
    monkeypatch.setattr(speaking, "STORY_FILE", story)
    out = tmp_path / "out"
    with served(tiny_folder, "--device", "cpu", "--cpu-threads", "1") as address, Server(address) as server:
        speak_all(server, out, tiny_folder, tmp_path / "originals")
    assert {path.relative_to(out).as_posix() for path in out.rglob("*.wav")} == {
        "default/000-spoken.wav", "default/001-spoken.wav", "clones/held-kumo-0-spoken.wav", "story/story-spoken.wav",
        "codec/000-original.wav", "codec/000-round-trip.wav",
    }  # fmt: skip
