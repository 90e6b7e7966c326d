"""Phonemes as the teachers spell them, their durations, and the label that each short stretch of a clip gets.

Teachers give every symbol of a phoneme string a number of frames. Stress marks count with the sound that follows,
spaces between words are left open (`OPEN`: no label), punctuation and the ends of a clip are silence.
"""

from __future__ import annotations

import numpy as np

from training.recipe import LABEL_HOP, SAMPLE_RATE

SOUNDS = "AIOQSTWYᵊabdefhijklmnoprstuvwzæðŋɐɑɔəɚɛɜɡɪɹɾʃʊʌʒʔʤʧˈˌːθᵻ".replace("ˈ", "").replace("ˌ", "")
STRESS = "ˈˌː"
SILENCE = 0
OPEN = 255
CLASSES = {symbol: index for index, symbol in enumerate(SOUNDS, start=1)}
NUM_CLASSES = len(CLASSES) + 1


def symbol_class(symbol: str) -> int:
    """The label of one symbol: a sound's class, `OPEN` between words and for rare sounds, else silence."""
    if symbol in CLASSES:
        return CLASSES[symbol]
    return OPEN if symbol == " " or symbol.isalpha() else SILENCE


def labels(symbols: str, ends_s: np.ndarray, num_samples: int) -> np.ndarray:
    """One label per `LABEL_HOP` samples of a clip whose symbol i ends at `ends_s[i]` seconds: uint8."""
    classes = [symbol_class(symbol) for symbol in symbols]
    for index in range(len(symbols) - 2, -1, -1):
        if symbols[index] in STRESS:
            classes[index] = classes[index + 1]
    centers = (np.arange(-(-num_samples // LABEL_HOP)) + 0.5) * (LABEL_HOP / SAMPLE_RATE)
    owner = np.searchsorted(ends_s, centers, side="right")
    table = np.array([*classes, SILENCE], np.uint8)
    return table[np.minimum(owner, len(symbols))]
