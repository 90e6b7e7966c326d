"""Who speaks: styles of two teachers, each at a pitch ratio r, and the cells that are held out for judging cloning.

A style is a blend of voice packs. A speaker at ratio r is asked to talk at speed 1 / r and played r times faster, which
moves pitch and formants and keeps the pace. Everything is drawn from a fixed seed: a speaker's number says it all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HEART = "af_heart"
PURE = ("jm_kumo", "jf_alpha", "jf_gongitsune")
BLENDED = (*PURE, "jf_tebukuro", "jf_nezumi")
RATIO_LOW, RATIO_HIGH = 0.80, 1.22
NUM_HEART = 140
NUM_BLENDS = 260
RATIO_MARGIN = 0.015
STYLE_MARGIN = 0.2


@dataclass(frozen=True, slots=True)
class Speaker:
    """A name, a blend of packs (weights sum to 1) and the pitch ratio."""

    name: str
    style: tuple[tuple[str, float], ...]
    ratio: float

    @property
    def is_heart(self) -> bool:
        return self.style[0][0] == HEART

    def is_near(self, other: Speaker) -> bool:
        """True when the two cannot be told apart safely, so that one must not train if the other judges."""
        if abs(self.ratio - other.ratio) > RATIO_MARGIN:
            return False
        mine, theirs = dict(self.style), dict(other.style)
        return sum(abs(mine.get(k, 0.0) - theirs.get(k, 0.0)) for k in mine | theirs) < STYLE_MARGIN


DEFAULT = Speaker("heart", ((HEART, 1.0),), 1.0)
HELD_OUT = (
    Speaker("held-heart-low", ((HEART, 1.0),), 0.87),
    Speaker("held-heart-high", ((HEART, 1.0),), 1.12),
    Speaker("held-kumo", (("jm_kumo", 1.0),), 0.96),
    Speaker("held-kumo-high", (("jm_kumo", 1.0),), 1.15),
    Speaker("held-alpha", (("jf_alpha", 1.0),), 0.92),
    Speaker("held-gongitsune", (("jf_gongitsune", 1.0),), 1.04),
    Speaker("held-kumo-alpha", (("jm_kumo", 0.5), ("jf_alpha", 0.5)), 1.0),
    Speaker("held-gongitsune-kumo", (("jf_gongitsune", 0.6), ("jm_kumo", 0.4)), 0.9),
)


def _may_train(speaker: Speaker) -> bool:
    return not any(speaker.is_near(held) for held in HELD_OUT)


def heart_speakers() -> list[Speaker]:
    """The default voice, then the same style over the range of ratios."""
    ratios = np.linspace(RATIO_LOW, RATIO_HIGH, NUM_HEART)
    others = [Speaker(f"heart-{ratio:.3f}", ((HEART, 1.0),), round(float(ratio), 3)) for ratio in ratios]
    return [DEFAULT, *(speaker for speaker in others if _may_train(speaker))]


def blend_speakers(seed: int = 11) -> list[Speaker]:
    """One third pure packs at random ratios, the others blends of up to five."""
    rng = np.random.default_rng(seed)
    speakers: list[Speaker] = []
    while len(speakers) < NUM_BLENDS:
        ratio = round(float(rng.uniform(RATIO_LOW, RATIO_HIGH)), 3)
        weights = rng.dirichlet([0.6] * len(BLENDED))
        weights[3:] = np.minimum(weights[3:], 0.35)
        if len(speakers) % 3 == 0:
            style = ((PURE[int(rng.integers(len(PURE)))], 1.0),)
        else:
            weights = np.round(weights / weights.sum(), 3)
            style = tuple((name, float(w)) for name, w in zip(BLENDED, weights, strict=True) if w > 0.02)
        speaker = Speaker(f"blend-{len(speakers)}", style, ratio)
        if _may_train(speaker):
            speakers.append(speaker)
    return speakers
