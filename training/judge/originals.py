"""What the teachers say, once: `python -m training.judge.originals LINES --out DIR` where both teachers are installed.

`DIR/heart` has every sentence of `sentences.txt` in the default voice: the ceiling of words, and what the codec's round trip
starts from. `DIR/references` has one clip of each held-out voice: what is cloned (the same clips are committed as small Opus
files beside this module). `DIR/presets` has the clips of the voices that ship with the model. `DIR/voices` has the sentences
of the cloning gate in the held-out voices: the ceiling of similarity. A clip that is there is not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from training.data.clips import make_clip
from training.data.manifest import Row
from training.data.speakers import DEFAULT, HELD_OUT, Speaker, heart_speakers
from training.data.teachers import Blends, Heart, Teacher
from training.data.texts import read_lines
from training.judge.round_trip import write_wave
from training.judge.sentences import clean, read_sentences
from training.judge.sets import ORIGINAL, Line, write_lines
from training.report import say

HEART, VOICES, REFERENCES, PRESETS = "heart", "voices", "references", "presets"
PER_VOICE = 10
LEAST_WORDS = 6  # below this a clip is too short to tell a voice
REFERENCE_CHARS = (60, 95)  # 4 to 6 s
PRESET_TEXTS = (
    "The morning train was late again, so we walked along the canal instead.",
    "He keeps an old radio in the kitchen and listens to it while he cooks.",
    "We found a quiet table near the window and ordered a large pot of tea.",
    "The road climbs slowly through the forest and ends beside a small lake.",
    "My grandfather built this house with his brothers, one summer at a time.",
    "She opened the letter, read it twice, and put it back into the drawer.",
    "After the storm, the children ran outside to look for broken branches.",
    "In the evening the market closes, and the whole street becomes silent.",
)


def cloning_lines(sentences: list[str]) -> list[Line]:
    """Ten sentences for every held-out voice, the voices one after another through the long enough ones."""
    long = [text for text in sentences if len(text.split()) >= LEAST_WORDS]
    return [
        Line(f"{speaker.name}-{index}", long[(PER_VOICE * number + index) % len(long)], speaker.name)
        for number, speaker in enumerate(HELD_OUT)
        for index in range(PER_VOICE)
    ]


def reference_lines(lines: Path, sentences: list[str]) -> list[Line]:
    """A held-out line of 4 to 6 seconds for each held-out voice, none of them among the sentences."""
    low, high = REFERENCE_CHARS
    plain = clean(read_lines(lines), known_lines=1)
    fitting = [text for text in plain if low <= len(text) <= high and text not in sentences][: len(HELD_OUT)]
    return [Line(speaker.name, text, speaker.name) for speaker, text in zip(HELD_OUT, fitting, strict=True)]


def preset_lines() -> list[Line]:
    return [Line(name, text, speaker.name) for (name, speaker), text in zip(presets().items(), PRESET_TEXTS, strict=True)]


def presets() -> dict[str, Speaker]:
    """The voices that ship: of those that train, by name. The first is the default voice. All are the first teacher's: clips of
    the second are not followed yet (G3 of the model's card)."""
    hearts = heart_speakers()
    ratios = {"deep": 0.80, "low": 0.845, "mellow": 0.90, "calm": 0.95, "bright": 1.06, "high": 1.16, "child": 1.22}
    near = {name: min(hearts, key=lambda speaker: abs(speaker.ratio - ratio)) for name, ratio in ratios.items()}
    return {"heart": DEFAULT, **{f"heart-{name}": speaker for name, speaker in near.items()}}


class Studio:
    """Both teachers; the slow one is opened when it is first asked for."""

    def __init__(self) -> None:
        self.front = Heart()
        self.blends: Teacher | None = None

    def teacher(self, speaker: Speaker) -> Teacher:
        if speaker.is_heart:
            return self.front
        self.blends = self.blends or Blends()
        return self.blends

    def record(self, folder: Path, lines: list[Line], first_number: int) -> None:
        """Speaks the lines that are not there yet."""
        folder.mkdir(parents=True, exist_ok=True)
        write_lines(folder, lines)
        speakers = {speaker.name: speaker for speaker in (DEFAULT, *HELD_OUT, *presets().values())}
        for number, line in enumerate(lines, first_number):
            path = folder / f"{line.name}-{ORIGINAL}.wav"
            if not path.exists():
                speaker = speakers[line.speaker]
                row = Row(number, (line.text,), speaker, 5000 + number)
                write_wave(path, make_clip(row, self.front, self.teacher(speaker)).samples / 32768)
        say(f"{folder.name}: {len(lines)} clips")


def sets(lines: Path) -> Iterator[tuple[str, list[Line]]]:
    sentences = read_sentences()
    yield HEART, [Line(f"{number:03d}", text, DEFAULT.name) for number, text in enumerate(sentences)]
    yield REFERENCES, reference_lines(lines, sentences)
    yield PRESETS, preset_lines()
    yield VOICES, cloning_lines(sentences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", type=Path, help="file written by training.data.texts")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    studio = Studio()
    for index, (name, lines) in enumerate(sets(options.lines)):
        studio.record(options.out / name, lines, 1000 * index)


if __name__ == "__main__":
    main()
