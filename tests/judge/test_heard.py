"""duetts-mini speaks, Whisper writes down, and the words are counted. Only where it is trained and the judge can be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from examples.demo import SECOND, SENTENCE
from training.judge.story import missing_sentences
from training.judge.wer import BASE, TINY, Listener, missing_packages
from training.judge.words import differ, word_error_rate

from duetts.embedded import is_trained
from duetts.tts import TTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not is_trained(), reason="duetts-mini is not trained yet: it speaks noise"),
    pytest.mark.skipif(
        bool(missing_packages(BASE) + missing_packages(TINY)),
        reason="the judge's packages cannot be installed here (pip install 'duetts[judge]')",
    ),
    pytest.mark.filterwarnings("ignore"),  # the judge's libraries' own
]

PROJECT = Path(__file__).parents[2]
STORY = PROJECT / "tests" / "data" / "story.txt"
THREE = (  # as plain as what it learned from, and not among that
    "The old man sat near the window and watched the rain.",
    "We will meet at the station when the last train comes in.",
    "Nobody knows how the small boat came back to the harbor.",
)


@pytest.fixture(scope="module")
def small() -> Listener:
    return Listener(TINY)


@pytest.fixture(scope="module")
def large() -> Listener:
    return Listener(BASE)


def run(*command: str | Path, **options: str) -> None:
    subprocess.run([sys.executable, *map(str, command)], check=True, timeout=1000, text=True, **options)


def test_three_sentences_are_heard_as_they_were_written(small: Listener, tmp_path: Path) -> None:
    found = []
    with TTS(device="cpu", cpu_threads=1) as tts:
        for seed, text in enumerate(THREE):
            path = tmp_path / f"{seed}.wav"
            tts.say(text, seed=seed).save(path)
            heard = small.write_down(path)
            print(f"{text}\n{heard}")
            found.append(differ(text, heard))
    assert word_error_rate(found) <= 0.10


def test_the_demo_has_no_wrong_word(large: Listener, tmp_path: Path) -> None:
    run(PROJECT / "examples" / "demo.py", "--output", tmp_path / "demo.wav")
    for name, text in {"demo": SENTENCE, "demo-voice": SECOND}.items():
        heard = large.write_down(tmp_path / f"{name}.wav")
        assert differ(text, heard).wrong == 0, heard


def test_a_story_has_all_its_sentences(large: Listener, tmp_path: Path) -> None:
    text = STORY.read_text(encoding="utf-8")
    assert 1900 <= len(text) <= 2100
    path = tmp_path / "story.wav"
    run("-m", "duetts", "say", "-", "--seed", "1", "--output", path, input=text)
    heard = large.write_down(path)
    assert missing_sentences(text, heard) == []
    assert word_error_rate([differ(text, heard)]) <= 0.12
