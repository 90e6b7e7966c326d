"""What every sequence goes on from, in device memory by slot: next input, position, frame number, how to draw, page table.

The host writes here when a sequence enters a slot and when it gets another page, all news of a step in one transfer;
everything else is a step's own work.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from duetts.engine.sequence import Sequence
from duetts.model_config import ModelConfig
from duetts.models.sampling import PENALTY_WINDOW, SamplingRows, fractions_of
from duetts.types import Sampling


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on the device. On a GPU nobody waits for it: it is put in line behind the work that was launched before."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class SlotMemory:
    """Memory of `slots` sequences, and of one more for padding rows, which is written and never read."""

    def __init__(self, config: ModelConfig, slots: int, table_pages: int, scratch_page: int, device: torch.device) -> None:
        count = slots + 1
        self.device = device
        self.padding = slots  # the slot of padding rows
        self.columns = torch.zeros(count, 1 + config.num_codebooks, dtype=torch.int64, device=device)
        self.recent = torch.full((count, PENALTY_WINDOW), -1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(count, dtype=torch.int64, device=device)
        self.frames = torch.zeros(count, dtype=torch.int64, device=device)
        self.sampling = SamplingRows.of([Sampling()] * count, [0] * count, device)
        self.tables = torch.full((count, table_pages), scratch_page, dtype=torch.int32, device=device)
        self._semantic_start = config.semantic_start
        # Whose state a slot holds, by arrival, and of which run. Not the sequence: what it has said must not outlive it here.
        self._occupants: list[tuple[int, int] | None] = [None] * slots
        self._num_pages = [0] * slots  # how many entries of a slot's table are right

    def occupy(self, rows: list[Sequence]) -> None:
        """Brings the rows' slots up to date: all of a slot where the sequence is new, else pages that were added."""
        entering = [sequence for sequence in rows if self._is_new(sequence)]
        if entering:
            self._enter(entering)
        added = [(row.slot, place, row.pages[place]) for row in rows for place in self._new_pages(row)]
        if added:
            slots, places, pages = upload(np.array(added, np.int64).T.copy(), self.device)
            self.tables[slots, places] = pages.to(torch.int32)
        for sequence in rows:
            assert sequence.slot is not None
            self._occupants[sequence.slot] = sequence.arrival, sequence.run
            self._num_pages[sequence.slot] = len(sequence.pages)

    def _is_new(self, sequence: Sequence) -> bool:
        assert sequence.slot is not None, "a row without a slot"
        assert sequence.is_read, "a row whose prompt is not read"
        return self._occupants[sequence.slot] != (sequence.arrival, sequence.run)

    def _new_pages(self, sequence: Sequence) -> range:
        assert sequence.slot is not None
        return range(0 if self._is_new(sequence) else self._num_pages[sequence.slot], len(sequence.pages))

    def _enter(self, sequences: list[Sequence]) -> None:
        """The state before the next frame: what was said before, the last column, and how to draw."""
        packed = upload(np.stack([self._packed(sequence) for sequence in sequences]), self.device)
        width = self.columns.shape[1]
        slots, positions, frames, top_k, seed = packed[:, :5].unbind(1)
        columns, recent, fractions = torch.split(packed[:, 5:], [width, PENALTY_WINDOW, 4], dim=1)
        self.columns[slots] = columns
        self.recent[slots] = recent
        self.positions[slots] = positions
        self.frames[slots] = frames
        self.sampling.numbers[:, slots] = torch.stack((top_k, seed))
        self.sampling.fractions[:, slots] = fractions.view(torch.float64).float().T

    def _packed(self, sequence: Sequence) -> npt.NDArray[np.int64]:
        """One sequence's state as numbers of 64 bits, fractions as the bits of doubles."""
        utterance, sampling = sequence.utterance, sequence.utterance.sampling
        said = sequence.frames[: sequence.launched]
        past = [int(frame[0]) - self._semantic_start for frame in said][-PENALTY_WINDOW:]
        last = said[-1] if said else utterance.prompt[:, -1]
        numbers = [
            sequence.slot, sequence.position, sequence.launched, sampling.top_k, utterance.seed, *last,
            *[-1] * (PENALTY_WINDOW - len(past)), *past,
        ]  # fmt: skip
        return np.concatenate((np.array(numbers, np.int64), np.array(fractions_of(sampling)).view(np.int64)))
