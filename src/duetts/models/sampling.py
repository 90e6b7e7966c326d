"""Drawing tokens for a batch of rows, each with its own values, seed and frame number. The arithmetic is the kernels room's.

The order is the reference's: candidates are cut by top-p and top-k at temperature 1, then the survivors are tempered,
then one is drawn by an exponential race, argmax(p / -log u). A number u is a function of (seed, frame, draw, rank), so
what a row draws depends on nothing but its own request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duetts import kernels
from duetts.types import Sampling

PENALTY_WINDOW = 16  # main tokens that the repetition penalty looks back on


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What rows draw with. fractions: float32 [4, rows], temperature, that of residual books, top-p, penalty.
    numbers: int64 [2, rows], top-k (0 is no limit) and seed."""

    fractions: Tensor
    numbers: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sampling], seeds: Sequence[int], device: torch.device) -> SamplingRows:
        """Gathers values; seeds are any 64-bit integers."""
        fractions = torch.tensor([fractions_of(row) for row in rows], dtype=torch.float32).T.contiguous()
        numbers = torch.tensor([[row.top_k for row in rows], list(seeds)], dtype=torch.int64)
        return cls(fractions.to(device), numbers.to(device))

    def at(self, index: Tensor) -> SamplingRows:
        """The values of some rows, int64 [batch]."""
        return SamplingRows(self.fractions[:, index], self.numbers[:, index])


def fractions_of(sampling: Sampling) -> tuple[float, float, float, float]:
    """One row's `fractions`."""
    residual = sampling.temperature if sampling.residual_temperature is None else sampling.residual_temperature
    return sampling.temperature, residual, sampling.top_p, sampling.repetition_penalty


class RowSampler:
    """Draws one frame of every row.

    frame: int64 [batch], the index of the frame being drawn. recent: int64 [batch, PENALTY_WINDOW], earlier main choices,
    newest last, -1 where there was none. end: the main choice that is neither penalised by repetition nor drawn again.
    """

    def __init__(self, rows: SamplingRows, frame: Tensor, recent: Tensor, end: int) -> None:
        self._temperature, self._residual_temperature, self._top_p, self._penalty = rows.fractions.unbind(0)
        self._top_k, self._seed = rows.numbers.unbind(0)
        self._frame = frame
        self._recent = recent
        self._end = end
        self.sound = torch.ones_like(frame, dtype=torch.bool)  # rows whose logits were finite in every draw so far

    def main(self, logits: Tensor) -> Tensor:
        """Repetition-aware: `kernels.sample_main`."""
        choice, sound = kernels.sample_main(
            logits, self._recent, self._frame, self._seed, self._temperature, self._top_p, self._top_k, self._penalty, self._end
        )
        self.sound = self.sound & sound
        return choice

    def residual(self, book: int, logits: Tensor) -> Tensor:
        """No repetition rule and no penalty here, as in the reference: `kernels.sample_residual`."""
        code, sound = kernels.sample_residual(
            book, logits, self._frame, self._seed, self._residual_temperature, self._top_p, self._top_k
        )
        self.sound = self.sound & sound
        return code
