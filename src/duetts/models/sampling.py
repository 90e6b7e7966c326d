"""Drawing tokens: filter, temperature, repetition awareness, and random numbers that belong to a request.

The order is the reference's: candidates are cut by top-p and top-k at temperature 1, then the survivors are tempered,
then one is drawn by an exponential race, argmax(p / -log u). A number u is a function of (seed, frame, draw, rank), so
what a row draws depends on nothing but its own request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from duetts.models.blocks import upcast
from duetts.types import Sampling

REPEAT_WINDOW = 10  # main tokens that a new one is compared with (repetition-aware sampling)
PENALTY_WINDOW = 16  # main tokens that the repetition penalty looks back on
MAX_RANKS = 1 << 20  # more than any model has choices
NARROW = 64  # candidates kept unless a row's top_k asks for more

Noise = Callable[[int, Tensor], Tensor]

_GAMMA = -7046029254386353131  # odd 64-bit constant of the golden ratio, as a signed number
_MIX_1, _MIX_2 = -4658895280553007687, -7723592293110705685  # multipliers of the splitmix64 finaliser


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64, whose products wrap around and whose shifts are made logical by masks."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniforms(seed: Tensor, frame: Tensor, draws: int, ranks: int) -> Tensor:
    """Numbers in (0, 1): seed and frame int64 [batch] -> float32 [batch, draws, ranks], each the same for any other sizes."""
    lanes = torch.arange(draws, device=seed.device)[:, None] * MAX_RANKS + torch.arange(ranks, device=seed.device)
    key = _mix(_mix(seed * _GAMMA) + frame * _GAMMA)
    # 23 bits: with 24 the largest would round to 1.0, whose logarithm is 0, and the race would go to a dropped candidate.
    bits = (_mix(key[:, None, None] + (lanes + 1) * _GAMMA) >> 41) & 0x7FFFFF
    return (bits.float() + 0.5) * 2.0**-23


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling values, one entry a row, and what a batch of rows needs altogether."""

    temperature: Tensor
    residual_temperature: Tensor
    top_p: Tensor
    top_k: Tensor  # 0 is no limit
    penalty: Tensor
    seed: Tensor
    ranks: int  # candidates to keep: enough for every row
    penalised: bool  # whether any row has a penalty other than 1

    @classmethod
    def of(cls, rows: Sequence[Sampling], seeds: Sequence[int], device: torch.device) -> SamplingRows:
        """Gathers values; seeds are any 64-bit integers."""

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device, dtype=torch.float32)

        return cls(
            temperature=column([r.temperature for r in rows]),
            residual_temperature=column([_residual_temperature(r) for r in rows]),
            top_p=column([r.top_p for r in rows]),
            top_k=torch.tensor([r.top_k for r in rows], device=device),
            penalty=column([r.repetition_penalty for r in rows]),
            seed=torch.tensor(list(seeds), device=device, dtype=torch.int64),
            ranks=enough_ranks(rows),
            penalised=any(r.repetition_penalty != 1.0 for r in rows),
        )

    def put(self, row: int, sampling: Sampling, seed: int) -> None:
        """Replaces one row's values."""
        self.temperature[row] = sampling.temperature
        self.residual_temperature[row] = _residual_temperature(sampling)
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.penalty[row] = sampling.repetition_penalty
        self.seed[row] = seed

    def at(self, index: Tensor, rows: Sequence[Sampling]) -> SamplingRows:
        """The values of some rows, int64 [batch], which `rows` are the ones to be served of; others are padding."""
        return SamplingRows(
            temperature=self.temperature[index],
            residual_temperature=self.residual_temperature[index],
            top_p=self.top_p[index],
            top_k=self.top_k[index],
            penalty=self.penalty[index],
            seed=self.seed[index],
            ranks=enough_ranks(rows),
            penalised=any(r.repetition_penalty != 1.0 for r in rows),
        )


def enough_ranks(rows: Sequence[Sampling]) -> int:
    """How many candidates serve all of the rows; 0 is all there are."""
    return NARROW if all(0 < r.top_k <= NARROW for r in rows) else 0


def _residual_temperature(sampling: Sampling) -> float:
    return sampling.temperature if sampling.residual_temperature is None else sampling.residual_temperature


def candidates(logits: Tensor, top_p: Tensor, top_k: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Sorted logits [batch, ranks] with dropped ones at -inf, and their ids. Cut at temperature 1, rank 0 always stays.

    A rank is dropped once the cumulative probability *including it* exceeds top_p (the common rule keeps that one).
    """
    ordered, ids = upcast(logits).sort(dim=-1, descending=True, stable=True)
    # A softmax of all ranks, as the reference takes it: with top_p near 1 the rounding of these sums decides who stays.
    probabilities = ordered.softmax(-1)
    if ranks:
        ordered, ids, probabilities = ordered[:, :ranks], ids[:, :ranks], probabilities[:, :ranks]
    reached = probabilities.cumsum(-1)
    rank = torch.arange(ordered.shape[1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    dropped = ((reached > top_p[:, None]) | (rank >= limit)) & (rank > 0)
    return ordered.masked_fill(dropped, -torch.inf), ids


def draw(ordered: Tensor, ids: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """One id per row [batch] from sorted, filtered logits, by uniform `noise` [batch, ranks]; temperature 0 takes rank 0."""
    # Unnormalised probabilities: a common factor decides no race, and a sum would depend on how many ranks are kept.
    weights = ((ordered - ordered[:, :1]) / temperature.clamp(min=1e-5)[:, None]).exp()
    winner = (weights / -noise.log()).argmax(-1)
    winner = torch.where(temperature > 0, winner, 0)
    return ids.gather(1, winner[:, None])[:, 0]


def penalise(logits: Tensor, recent: Tensor, penalty: Tensor) -> Tensor:
    """Logits of the choices in `recent` [batch, n] (-1 is none) divided by the penalty if positive, else multiplied."""
    slots = recent.clamp(min=0)
    seen = logits.gather(1, slots)
    lowered = torch.where(seen > 0, seen / penalty[:, None], seen * penalty[:, None]).to(logits.dtype)
    return logits.scatter(1, slots, torch.where(recent >= 0, lowered, seen))


class RowSampler:
    """Draws one frame of every row.

    frame: int64 [batch], the index of the frame being drawn. recent: int64 [batch, PENALTY_WINDOW], earlier main choices,
    newest last, -1 where there was none. noise: uniforms [batch, ranks] for (draw, ids [batch, ranks]) with draw 0 and 1 for
    the main token and 1 + k for book k; None takes the requests' own numbers.
    """

    def __init__(
        self,
        rows: SamplingRows,
        frame: Tensor,
        recent: Tensor,
        num_codebooks: int,
        num_choices: int,
        noise: Noise | None = None,
    ) -> None:
        self._rows = rows
        self._frame = frame
        self._recent = recent
        self._end = num_choices - 1
        if noise is None:
            table = uniforms(rows.seed, frame, num_codebooks + 1, rows.ranks or num_choices)
            noise = partial(_ranked_noise, table)
        self._noise = noise
        self.sound = torch.ones_like(frame, dtype=torch.bool)  # rows whose logits were finite in every draw so far

    def main(self, logits: Tensor) -> Tensor:
        """Repetition-aware: if the first draw occurred lately, a second one at temperature 1 and top-p 0.9 replaces it.

        As in the reference the very first frame never counts as an occurrence, and the second draw may repeat too.
        """
        rows = self._rows
        if rows.penalised:
            logits = penalise(logits, self._recent, rows.penalty)
        first = self._draw(0, logits, rows.top_p, rows.temperature)
        second = self._draw(1, logits, torch.full_like(rows.top_p, 0.9), torch.ones_like(rows.temperature))
        ages = torch.arange(-REPEAT_WINDOW, 0, device=first.device)
        counted = (self._frame[:, None] + ages) > 0
        repeated = ((self._recent[:, -REPEAT_WINDOW:] == first[:, None]) & counted).any(-1)
        return torch.where(repeated & (first != self._end) & (rows.temperature > 0), second, first)

    def residual(self, book: int, logits: Tensor) -> Tensor:
        """No repetition rule and no penalty here, as in the reference."""
        return self._draw(book + 1, logits, self._rows.top_p, self._rows.residual_temperature)

    def _draw(self, index: int, logits: Tensor, top_p: Tensor, temperature: Tensor) -> Tensor:
        self.sound = self.sound & logits.sum(-1).isfinite()
        ordered, ids = candidates(logits, top_p, self._rows.top_k, self._rows.ranks)
        return draw(ordered, ids, temperature, self._noise(index, ids))


def _ranked_noise(table: Tensor, index: int, ids: Tensor) -> Tensor:
    return table[:, index, : ids.shape[1]]
