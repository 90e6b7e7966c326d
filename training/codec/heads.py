"""Two small readers of phonemes that exist in training only: one reads book 0, the other reads the decoded sound."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from training.codec.spectra import LogMel
from training.data.phonemes import NUM_CLASSES, OPEN
from training.recipe import LABEL_HOP


class SemanticHead(nn.Module):
    """Book-0 values [batch, dim, frames] -> phoneme logits at twice the frame rate [batch, classes, 2 * frames]."""

    def __init__(self, dim: int, width: int = 256) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(dim, width, 5, padding=2), nn.GELU(),
            nn.Conv1d(width, width, 5, padding=2), nn.GELU(),
            nn.Conv1d(width, 2 * NUM_CLASSES, 1),
        )  # fmt: skip

    def forward(self, values: Tensor) -> Tensor:
        logits = self.net(values)  # [batch, 2 * classes, frames]
        return logits.unflatten(1, (NUM_CLASSES, 2)).transpose(2, 3).flatten(2)


class Recogniser(nn.Module):
    """A wave [batch, samples] -> phoneme logits, one per `LABEL_HOP` samples [batch, classes, labels]."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.mel = LogMel(4 * LABEL_HOP, 80)
        self.net = nn.Sequential(
            nn.Conv1d(80, width, 5, padding=2), nn.GELU(),
            nn.Conv1d(width, width, 5, padding=2), nn.GELU(),
            nn.Conv1d(width, width, 5, padding=4, dilation=2), nn.GELU(),
            nn.Conv1d(width, NUM_CLASSES, 1),
        )  # fmt: skip

    def forward(self, wave: Tensor) -> Tensor:
        num_labels = wave.shape[-1] // LABEL_HOP
        with torch.autocast(wave.device.type, enabled=False):
            mel = self.mel(wave.float())
        return self.net(mel[..., :num_labels] / 2 + 1)

    def judge(self, wave: Tensor) -> Tensor:
        """The same logits, but only the wave gets a gradient: the reader must not learn from what it reads here."""
        frozen = {name: value.detach() for name, value in self.named_parameters()}
        logits: Tensor = functional_call(self, frozen, (wave,))
        return logits


def phoneme_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over the labelled stretches. `labels` are uint8 at four per frame; logits may be coarser."""
    step = labels.shape[-1] // logits.shape[-1]
    wanted = labels[:, step // 2 :: step].long()
    return F.cross_entropy(logits.float(), wanted.masked_fill(wanted == OPEN, -100), ignore_index=-100)


def phoneme_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of labelled stretches of speech (not silence) whose best class is right."""
    step = labels.shape[-1] // logits.shape[-1]
    wanted = labels[:, step // 2 :: step].long()
    spoken = (wanted != OPEN) & (wanted != 0)
    return ((logits.argmax(1) == wanted) & spoken).sum() / spoken.sum().clamp(min=1)
