"""Which clip is made from what: a function from a row's number to its texts, speaker and seed.

Nothing is stored: the same lines and the same number give the same row, so audio can be made again anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from training.data.speakers import HELD_OUT, Speaker, blend_speakers, heart_speakers
from training.data.texts import Lines

DEFAULT_SHARE = 0.2  # of the heart clips, spoken by the default voice
MAX_CHARS = 200  # about 14 s of speech
STRIDE = 4  # lines set aside for a row


@dataclass(frozen=True, slots=True)
class Row:
    """One clip: sentences said in a row by one speaker."""

    number: int
    texts: tuple[str, ...]
    speaker: Speaker
    seed: int


class Manifest:
    """Rows of one kind: "heart" (default teacher), "blend" (second teacher) or "held-heart" and "held-blend"."""

    def __init__(self, lines: Lines, kind: str) -> None:
        self.kind = kind
        self.held_out = kind.startswith("held")
        self.lines = lines.held_out if self.held_out else lines.train
        self.salt = ("heart", "blend", "held-heart", "held-blend").index(kind)

    @cached_property
    def speakers(self) -> list[Speaker]:
        if self.held_out:
            return [speaker for speaker in HELD_OUT if speaker.is_heart == (self.kind == "held-heart")]
        return heart_speakers() if self.kind == "heart" else blend_speakers()

    @cached_property
    def _order(self) -> np.ndarray:
        return np.random.default_rng([97, self.salt]).permutation(len(self.lines))

    def row(self, number: int) -> Row:
        rng = np.random.default_rng([self.salt, number])
        wanted = int(rng.choice(STRIDE, p=(0.35, 0.35, 0.2, 0.1))) + 1
        start = number * STRIDE
        texts: list[str] = []
        for index in range(start, start + wanted):
            line = self.lines[self._order[index % len(self.lines)]]
            if texts and sum(map(len, texts)) + len(line) > MAX_CHARS:
                break
            texts.append(line)
        return Row(number, tuple(texts), self._speaker(rng, number), int(rng.integers(1 << 31)))

    def _speaker(self, rng: np.random.Generator, number: int) -> Speaker:
        if self.held_out:
            return self.speakers[number % len(self.speakers)]
        if self.kind == "heart" and rng.random() < DEFAULT_SHARE:
            return self.speakers[0]
        return self.speakers[int(rng.integers(len(self.speakers)))]
