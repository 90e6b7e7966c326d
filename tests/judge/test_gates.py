"""What was said and found becomes a table: from made up files of known content, without any judge."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from training.data.texts import Lines, digest
from training.judge.gates import GATES, judge, table
from training.judge.originals import PER_VOICE, cloning_lines
from training.judge.references import FOLDER, clip_path
from training.judge.sentences import COUNT, KNOWN_LINES, RANGES, choose, clean, read_sentences
from training.judge.sets import SPOKEN, Line, findings, read_lines, takes, write_json, write_lines
from training.judge.similarity import against_originals, against_references
from training.judge.speak import claim


def put(folder: Path, lines: list[Line], take: str = SPOKEN) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder, lines)
    for line in lines:
        with wave.open(str(folder / f"{line.name}-{take}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(b"\0\0" * 80)


def found(folder: Path, name: str, look: Callable[[Path], object]) -> None:
    findings(folder, name, look)


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    """A model that says 20 sentences of five words: one word wrong, one sentence cut, one run away; 8 clones in two voices."""
    lines = [Line(f"{number:03d}", "one two three four five", "default") for number in range(20)]
    put(tmp_path / "default", lines)
    heard = {"000-spoken.wav": "one two three four nine", "001-spoken.wav": "one"}
    found(tmp_path / "default", "heard-base", lambda path: heard.get(path.name, "One, two, three, four, five."))
    found(tmp_path / "default", "heard-tiny", lambda path: "one two three four five")
    found(tmp_path / "default", "quality", lambda path: {"overall": 3.0 if path.name < "01" else 3.2})
    answers = {f"{line.name}-spoken.wav": {"finish": "length" if line.name == "002" else "stop"} for line in lines}
    write_json(tmp_path / "default" / "answers.json", answers)
    entries = {f"{index}": {"voice": "a", "own": 0.7 + index / 100, "nearest": "a" if index else "b"} for index in range(8)}
    (tmp_path / "clones").mkdir()
    write_json(tmp_path / "clones" / "similarity.json", {"originals": {}, "references": entries})
    write_json(tmp_path / "speed.json", {"rtf": 0.5, "first_audio_ms": 301.0})
    write_json(tmp_path / "model.json", {"weights_bytes": 44_150_000})
    return tmp_path


def test_every_value_is_read_from_where_it_was_written(judged: Path) -> None:
    values = {(row.gate, row.measure): row for row in judge(judged, None)}
    shown = {name: (row.value, row.passed) for name, row in values.items() if row.value is not None}
    assert shown == {
        ("G2", "WER of the default voice, Whisper base"): (pytest.approx(5.0), True),
        ("G2", "WER of the default voice, tiny.en"): (0, True),
        ("G3", "similarity to the clip, 8 held-out voices"): (pytest.approx(0.735), False),
        ("G3", "right voice nearest of 8"): (87.5, True),
        ("G4", "DNSMOS overall"): (pytest.approx(3.1), True),
        ("G5", "RTF, one stream"): (0.5, True),
        ("G5", "first audio, one stream"): (301.0, False),
        ("G6", "weights on disk"): (44.15, True),
        ("G7", "sentences that run away, skip or repeat"): (10.0, False),
    }


def test_what_was_not_measured_has_not_passed(tmp_path: Path) -> None:
    rows = judge(tmp_path, tmp_path)
    assert len(rows) == len(GATES)
    assert not any(row.passed or row.value is not None or row.teacher is not None for row in rows)
    assert table(rows).count("not measured") == len(GATES)


def test_a_teacher_is_judged_beside(judged: Path, tmp_path: Path) -> None:
    originals = tmp_path / "originals"
    put(originals / "heart", [Line("000", "one two three four", "heart")], "original")
    found(originals / "heart", "heard-base", lambda path: "one two three for")
    rows = {row.measure: row for row in judge(judged, originals)}
    assert rows["WER of the default voice, Whisper base"].teacher == 25
    assert "| 25 |" in table(list(rows.values()))


def test_a_file_is_looked_at_once_and_again_when_it_changes(tmp_path: Path) -> None:
    put(tmp_path, [Line("a", "x", "v"), Line("b", "x", "v")])
    seen: list[str] = []

    def look(path: Path) -> int:
        seen.append(path.name)
        return len(seen)

    assert findings(tmp_path, "n", look) == {"a-spoken.wav": 1, "b-spoken.wav": 2}
    assert findings(tmp_path, "n", look) == {"a-spoken.wav": 1, "b-spoken.wav": 2}
    (tmp_path / "b-spoken.wav").write_bytes(b"else")
    assert findings(tmp_path, "n", look) == {"a-spoken.wav": 1, "b-spoken.wav": 3}
    assert seen == ["a-spoken.wav", "b-spoken.wav", "b-spoken.wav"]


def test_a_take_belongs_to_the_line_of_its_whole_name(tmp_path: Path) -> None:
    lines = [Line("kumo", "x", "v"), Line("kumo-high", "x", "v")]
    put(tmp_path, lines)
    assert [path.name for path in takes(tmp_path, lines[0]).values()] == ["kumo-spoken.wav"]
    assert read_lines(tmp_path) == lines


def test_voices_are_compared_with_all_clips(tmp_path: Path) -> None:
    lines = [Line("1", "x", "a"), Line("2", "x", "a")]
    put(tmp_path, lines)
    clips = {"a": np.array([1.0, 0.0]), "b": np.array([0.0, 1.0])}
    vectors = {"1-spoken.wav": np.array([0.8, 0.6]), "2-spoken.wav": np.array([0.6, 0.8])}
    assert against_references(tmp_path, lines, vectors, clips) == {
        "1-spoken.wav": {"voice": "a", "own": 0.8, "nearest": "a"},
        "2-spoken.wav": {"voice": "a", "own": 0.6, "nearest": "b"},
    }
    assert against_originals(tmp_path, lines, vectors) == {}
    put(tmp_path, lines[:1], "original")
    assert against_originals(tmp_path, lines[:1], vectors | {"1-original.wav": clips["a"]}) == {"1-spoken.wav": 0.8}


def test_a_folder_belongs_to_one_model(tmp_path: Path) -> None:
    claim(tmp_path / "model.json", {"codec_id": "a", "weights": "trained"})
    claim(tmp_path / "model.json", {"codec_id": "a", "weights": "trained"})
    with pytest.raises(SystemExit, match="another model"):
        claim(tmp_path / "model.json", {"codec_id": "b", "weights": "trained"})


# -- the sentences and clips that are committed


def test_the_committed_sentences_follow_the_rule() -> None:
    sentences = read_sentences()
    assert len(sentences) == len(set(sentences)) == COUNT
    assert all(3 <= len(text.split()) <= 35 for text in sentences)
    again = choose(Lines(sentences * KNOWN_LINES, sorted(sentences, key=digest)))
    assert sorted(again) == sorted(sentences)
    for least, most in RANGES:
        assert sum(least <= len(text.split()) <= most for text in sentences) >= 20


def test_the_rule_leaves_out_what_can_be_written_in_two_ways() -> None:
    plain = "The old dog sleeps."
    held = [
        plain,
        "In 1998 the dog.",
        "The dog, e.g. a hound.",
        "The Dog sleeps.",
        "The well-kept dog.",
        "The rare quokka sleeps.",
    ]
    assert clean(Lines([plain] * KNOWN_LINES, held)) == [plain]
    with pytest.raises(ValueError, match="99 of 100"):
        choose(Lines([plain] * KNOWN_LINES, held))


def test_every_held_out_voice_has_a_clip_and_ten_sentences() -> None:
    references = read_lines(FOLDER)
    lines = cloning_lines(read_sentences())
    assert {line.speaker for line in lines} == {line.speaker for line in references}
    assert len(lines) == len(references) * PER_VOICE == 80
    assert len({(line.speaker, line.text) for line in lines}) == 80
    assert not {line.text for line in references} & set(read_sentences())
    sizes = [clip_path(line.name).stat().st_size for line in references]
    assert min(sizes) > 5000
    assert sum(sizes) < 1_000_000
