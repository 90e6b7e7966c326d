"""Which byte of the text is spoken in which frame, from the teachers' phoneme times.

Phoneme strings keep spaces between words, so words of text and words of phonemes are paired first: one to one where the
counts agree, else by the cheapest way to give every written word its spoken ones ("43.8" has three). Inside a word
phonemes and letters run evenly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from training.recipe import FRAME, SAMPLE_RATE

STRESS = re.compile("[ˈˌː]")
WORD = re.compile(r"[^ |]+")
LETTERS_PER_SOUND = 1.15
WORDS_PER_DIGIT = 1.3
MISFIT = 3.0  # cost of a plain written word that is not exactly one spoken word
MISFIT_SPELLED = 0.5  # the same for words like "pH" and "TV"
SPELLED = re.compile("[A-Za-z][A-Z]")
MOST_WORDS = 14

Span = tuple[int, int]


def spans(text: str) -> list[Span]:
    """Start and end of every run without spaces (and without the pads of phoneme strings)."""
    return [match.span() for match in WORD.finditer(text)]


def cost(written: str, spoken: Sequence[str]) -> float:
    """How badly a written word fits so many spoken ones."""
    count = len(spoken)
    digits = sum(character.isdigit() for character in written)
    if digits or not written.isascii():
        return 0.3 * abs(count - WORDS_PER_DIGIT * digits) + (MISFIT if count == 0 else 0.0)
    letters = sum(character.isalpha() for character in written)
    sounds = sum(len(STRESS.sub("", word)) for word in spoken)
    misfit = MISFIT_SPELLED if SPELLED.search(written) else MISFIT
    return 0.2 * abs(letters - LETTERS_PER_SOUND * sounds) + misfit * abs(count - 1)


def match_words(written: Sequence[str], spoken: Sequence[str]) -> list[int]:
    """How many of the spoken words each written word takes, in order."""
    if len(written) == len(spoken):
        return [1] * len(written)
    best = np.full((len(written) + 1, len(spoken) + 1), np.inf)
    taken = np.zeros(best.shape, np.int64)
    best[0, 0] = 0
    for row, word in enumerate(written):
        most = MOST_WORDS if any(map(str.isdigit, word)) or not word.isascii() else 3
        for start in np.flatnonzero(np.isfinite(best[row])):
            for count in range(min(most, len(spoken) - start) + 1):
                total = best[row, start] + cost(word, spoken[start : start + count])
                if total < best[row + 1, start + count]:
                    best[row + 1, start + count], taken[row + 1, start + count] = total, count
    if not np.isfinite(best[-1, -1]):
        raise ValueError(f"{len(spoken)} spoken words do not fit {len(written)} written ones")
    counts: list[int] = []
    column = len(spoken)
    for row in range(len(written), 0, -1):
        counts.append(int(taken[row, column]))
        column -= counts[-1]
    return counts[::-1]


def symbol_places(text: str, symbols: str) -> np.ndarray:
    """The character of `text` that each phoneme symbol stands for. Never decreases."""
    words, sounds = spans(text), spans(symbols)
    counts = match_words([text[a:b] for a, b in words], [symbols[a:b] for a, b in sounds])
    places = np.full(len(symbols), -1, np.int64)
    used = 0
    for (start, end), count in zip(words, counts, strict=True):
        if count == 0:
            continue
        first, last = sounds[used][0], sounds[used + count - 1][1]
        used += count
        steps = (np.arange(last - first) + 0.5) / (last - first)
        places[first:last] = start + (steps * (end - start)).astype(np.int64)
    known = places >= 0
    if not known.any():
        raise ValueError("no word is spoken")
    filled = np.maximum.accumulate(places)
    return np.where(filled < 0, places[known][0], filled)


def frame_bytes(text: str, symbols: str, ends_s: np.ndarray, num_frames: int) -> np.ndarray:
    """int16 [frames]: the byte of the UTF-8 text that is spoken in the middle of each frame."""
    places = symbol_places(text, symbols)
    centers = (np.arange(num_frames) + 0.5) * (FRAME / SAMPLE_RATE)
    owner = np.minimum(np.searchsorted(ends_s, centers, side="right"), len(symbols) - 1)
    offsets = np.cumsum([0, *(len(character.encode()) for character in text)])
    return offsets[places[owner]].astype(np.int16)
