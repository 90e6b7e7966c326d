"""From a manifest's row to a finished clip: silence trimmed, pauses set, levels equal, 44.1 kHz, with phoneme labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import soxr

from training.data.manifest import Row
from training.data.phonemes import labels
from training.data.teachers import Heart, Spoken, Teacher
from training.recipe import FRAME, SAMPLE_RATE

PEAK = 0.7
EDGE_S = (0.06, 0.12)
PAUSE_S = (0.15, 0.35)
MIN_S, MAX_S = 0.5, 16.0
QUIET = 0.015  # of the peak: below this a sample counts as silence


@dataclass(frozen=True, slots=True)
class Clip:
    """int16 samples, a whole number of frames; one label per `LABEL_HOP` samples; what was said, as text and as symbols."""

    samples: np.ndarray
    labels: np.ndarray
    row: Row
    symbols: str
    ends_s: np.ndarray


@dataclass(slots=True)
class Piece:
    """One sentence at 44.1 kHz with its symbol ends."""

    wave: np.ndarray
    symbols: str
    ends_s: np.ndarray


def prepare(spoken: Spoken) -> Piece:
    wave = soxr.resample(spoken.wave, spoken.rate, SAMPLE_RATE)
    peak = float(np.abs(wave).max()) if len(wave) else 0.0
    if not peak > 1e-3:
        raise ValueError("a teacher's sentence is silent")
    return Piece(wave * np.float32(PEAK / peak), spoken.symbols, spoken.ends_s)


def keep(piece: Piece, lead_s: float, tail_s: float) -> Piece:
    """The piece with that much quiet before and after its speech, as far as the teacher left any."""
    loud = np.flatnonzero(np.abs(piece.wave) > QUIET * PEAK)
    start = max(0, loud[0] - round(lead_s * SAMPLE_RATE))
    stop = min(len(piece.wave), loud[-1] + round(tail_s * SAMPLE_RATE))
    wave = piece.wave[start:stop].copy()
    ramp = min(220, len(wave))
    wave[:ramp] *= np.linspace(0, 1, ramp, dtype=np.float32)
    wave[-ramp:] *= np.linspace(1, 0, ramp, dtype=np.float32)
    ends = np.clip(piece.ends_s - start / SAMPLE_RATE, 0, len(wave) / SAMPLE_RATE)
    return Piece(wave, piece.symbols, ends)


def join(pieces: list[Piece], rng: np.random.Generator) -> Piece:
    """All sentences in a row, a pause between each two, a short edge at both ends."""
    pauses = [float(rng.uniform(*PAUSE_S)) / 2 for _ in pieces[1:]]
    leads = [float(rng.uniform(*EDGE_S)), *pauses]
    tails = [*pauses, float(rng.uniform(*EDGE_S))]
    kept = [keep(piece, lead, tail) for piece, lead, tail in zip(pieces, leads, tails, strict=True)]
    starts = np.cumsum([0, *(len(piece.wave) for piece in kept)]) / SAMPLE_RATE
    ends = np.concatenate([piece.ends_s + start for piece, start in zip(kept, starts, strict=False)])
    return Piece(np.concatenate([piece.wave for piece in kept]), "".join(piece.symbols for piece in kept), ends)


def make_clip(row: Row, front: Heart, teacher: Teacher) -> Clip:
    """Speaks a row. Raises `ValueError` when the result is no usable clip."""
    rng = np.random.default_rng(row.seed)
    parts = [part for text in row.texts for part in front.phonemize(text)]
    joined = join([prepare(teacher.speak(part, row.speaker, row.seed + i)) for i, part in enumerate(parts)], rng)
    seconds = len(joined.wave) / SAMPLE_RATE
    if not MIN_S <= seconds <= MAX_S:
        raise ValueError(f"a clip of {seconds:.1f} s")
    wave = np.pad(joined.wave, (0, -len(joined.wave) % FRAME))
    samples = np.round(np.clip(wave, -1, 1) * 32767).astype(np.int16)
    return Clip(samples, labels(joined.symbols, joined.ends_s, len(samples)), row, joined.symbols, joined.ends_s)
