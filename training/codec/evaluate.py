"""Numbers on held-out speech: how close the sound is, how well phonemes survive, how much of each book is used."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.codec.heads import phoneme_accuracy
from training.codec.model import CodecTrainee
from training.codec.pool import Pool
from training.codec.quantising import books, perplexity
from training.recipe import CROP_FRAMES

BATCH = 16


@dataclass(frozen=True, slots=True)
class Scores:
    """Means over held-out crops; `used` is every book's perplexity."""

    mel: float
    magnitude: float
    loudness: float
    level_db: float
    book0_phonemes: float
    heard_phonemes: float
    real_phonemes: float
    used: list[float]

    def line(self) -> str:
        used = " ".join(f"{value:.0f}" for value in self.used)
        return (
            f"mel {self.mel:.3f}  magnitude {self.magnitude:.3f}  loudness {self.loudness:.3f}  "
            f"level {self.level_db:+.1f} dB  phonemes from book 0 {self.book0_phonemes:.1%}, "
            f"from decoded sound {self.heard_phonemes:.1%}, from the original {self.real_phonemes:.1%}  books used {used}"
        )


def level_db(wave: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How much louder, by root mean square, signal by signal."""
    power = [value.square().mean(-1) + 1e-12 for value in (wave, target)]
    return 10 * (power[0] / power[1]).log10().mean()


@torch.no_grad()
def evaluate(trainee: CodecTrainee, pool: Pool, most: int = 96) -> Scores:
    """The same crops each time: the start of the longest clips first come first."""
    count = min(most, len(pool))
    sums = torch.zeros(7, device=pool.device)
    codes: list[list[torch.Tensor]] = []
    for first in range(0, count, BATCH):
        clip = torch.arange(first, min(first + BATCH, count), device=pool.device)
        wave, labels = pool.cut(clip, torch.zeros_like(clip), CROP_FRAMES)
        step = trainee(wave, labels, None, amp=False)
        scores = (
            step.parts["mel"],
            step.parts["magnitude"],
            step.parts["loudness"],
            level_db(step.decoded, wave),
            phoneme_accuracy(trainee.semantic_head(step.found.semantic), labels),
            phoneme_accuracy(trainee.recogniser(step.decoded), labels),
            phoneme_accuracy(trainee.recogniser(wave), labels),
        )
        sums += torch.stack(scores) * (len(clip) / count)
        codes.append(step.found.codes)
    sizes = [book.codebook.num_embeddings for book in books(trainee.codec.quantizer)]
    used = [perplexity(torch.cat([part[i] for part in codes]), size) for i, size in enumerate(sizes)]
    return Scores(*sums.tolist(), used)
