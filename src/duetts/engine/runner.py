"""Tensors of the language model: the paged cache, the state of every slot, and the two things that are run, read and step.

All that a step needs lies in device memory by slot (next input, position, frame number, sampling values, page table); the host
only says which slots take part. On a CPU every step has the same number of rows, padded if need be, attention runs row by row
and prompts are read in fixed blocks: a row's numbers then depend on its own request only, to the last bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from duetts.engine.pages import PAGE, Block, pages_for
from duetts.engine.parts import UNSOUND, Result
from duetts.engine.sequence import Sequence
from duetts.models.dual_ar import DualAR
from duetts.models.kv_cache import CacheRows, FrameCache, JointRows, KVCache
from duetts.models.sampling import PENALTY_WINDOW, RowSampler, SamplingRows
from duetts.types import Int32, Sampling


class Runner:
    """Owns the device memory of `slots` sequences and of the pages they share; steps have at most `rows` rows.

    `fixed` says whether shapes are (see above); None is as the device is. Tests run the other way on a CPU too.
    """

    def __init__(
        self, model: DualAR, *, slots: int, rows: int, pages: int, max_model_len: int, fixed: bool | None = None
    ) -> None:  # fmt: skip
        weight = model.slow.embeddings.weight
        config, device = model.config, weight.device
        self._model = model
        self._device = device
        self._fixed = device.type == "cpu" if fixed is None else fixed
        self.lag = 0 if self._fixed else 1
        self._rows = rows
        self._cache = KVCache(config.slow, pages, PAGE, device=device, dtype=weight.dtype, row_by_row=self._fixed)
        self._frame_cache = FrameCache(config.fast, rows, device=device, dtype=weight.dtype)
        # Everything by slot, and one more for padding rows, which is written and never read.
        self._columns = torch.zeros(slots + 1, 1 + config.num_codebooks, dtype=torch.int64, device=device)
        self._positions = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._frames = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._recent = torch.full((slots + 1, PENALTY_WINDOW), -1, dtype=torch.int64, device=device)
        self._sampling = SamplingRows.of([Sampling()] * (slots + 1), [0] * (slots + 1), device)
        self._tables = torch.full((slots + 1, pages_for(max_model_len)), pages, dtype=torch.int64, device=device)
        self._table_pages = [0] * slots  # how many entries of a slot's table are right
        # Whose state a slot holds, by arrival, and of which run. Not the sequence: what it has said must not outlive it here.
        self._occupant: list[tuple[int, int] | None] = [None] * slots

    @torch.inference_mode()
    def read(self, sequence: Sequence, block: Block) -> None:
        """A block of known columns into the cache, alone."""
        columns = sequence.columns()[:, block.start : block.end].astype(np.int64)
        rows = self._cache.rows([sequence.pages], [block.start], block.end - block.start)
        self._model.prefill(torch.from_numpy(columns).to(self._device)[None], rows)

    @torch.inference_mode()
    def launch(self, rows: list[Sequence]) -> Result:
        """The next frame of each row. Slots move on together, at the end: a step that raises can be tried again."""
        for sequence in rows:
            self._occupy(sequence)
        padding = self._rows - len(rows) if self._fixed else 0
        slots = [sequence.slot for sequence in rows] + [len(self._columns) - 1] * padding
        index = torch.tensor(slots, device=self._device)
        sampling = self._sampling.at(index, [sequence.utterance.sampling for sequence in rows])
        columns = self._step(index, self._cache_rows(rows, padding, index), sampling)[: len(rows)]
        if self._device.type == "cpu":
            found: Int32 = columns.to(torch.int32).numpy()
            return lambda: found
        return _copied(columns)

    def _step(self, index: Tensor, rows: CacheRows, sampling: SamplingRows) -> Tensor:
        """Draws for the slots `index` and moves them on -> columns [batch, 1 + codebooks]. Nothing here asks the host."""
        model = self._model
        config = model.config
        sampler = RowSampler(
            sampling, self._frames[index], self._recent[index], config.num_codebooks, config.num_semantic + 1
        )  # fmt: skip
        columns = model.next_frame(self._columns[index], rows, self._frame_cache, sampler)
        main = (columns[:, :1] - config.semantic_start).where(columns[:, :1] != config.end_id, -1)
        self._recent[index] = torch.cat((self._recent[index][:, 1:], main), dim=1)
        self._columns[index] = columns
        self._positions[index] += 1
        self._frames[index] += 1
        return torch.cat((columns[:, :1].where(sampler.sound[:, None], UNSOUND), columns[:, 1:]), dim=1)

    def _cache_rows(self, rows: list[Sequence], padding: int, index: Tensor) -> CacheRows:
        if self._fixed:
            tables: list[list[int]] = [sequence.pages for sequence in rows] + [[]] * padding
            return self._cache.rows(tables, [sequence.position for sequence in rows] + [0] * padding, 1)
        width = max(len(sequence.pages) for sequence in rows)
        return JointRows(self._cache, self._tables[index, :width], self._positions[index][:, None])

    def _occupy(self, sequence: Sequence) -> None:
        """Brings a slot's state up to date: all of it when the sequence is new there, else pages that were added."""
        slot = sequence.slot
        assert slot is not None, "a row without a slot"
        assert sequence.is_read, "a row whose prompt is not read"
        if self._occupant[slot] != (sequence.arrival, sequence.run):
            self._enter(sequence, slot)
            self._occupant[slot] = (sequence.arrival, sequence.run)
            self._table_pages[slot] = 0
        known = self._table_pages[slot]
        if not self._fixed and known < len(sequence.pages):
            self._tables[slot, known : len(sequence.pages)] = torch.tensor(sequence.pages[known:], device=self._device)
            self._table_pages[slot] = len(sequence.pages)

    def _enter(self, sequence: Sequence, slot: int) -> None:
        """The state before the next frame: what was said before, the last column, and how to draw."""
        config, utterance = self._model.config, sequence.utterance
        past = [int(frame[0]) - config.semantic_start for frame in sequence.frames[: sequence.launched]][-PENALTY_WINDOW:]
        recent = [-1] * (PENALTY_WINDOW - len(past)) + past
        self._recent[slot] = torch.tensor(recent, device=self._device)
        last = sequence.frames[sequence.launched - 1] if sequence.launched else utterance.prompt[:, -1]
        self._columns[slot] = torch.from_numpy(last.astype(np.int64)).to(self._device)
        self._positions[slot] = sequence.position
        self._frames[slot] = sequence.launched
        self._sampling.put(slot, utterance.sampling, utterance.seed)


def _copied(columns: Tensor) -> Result:
    """Starts the way of a step's columns to the host, beside what the device does next."""
    host = torch.empty(columns.shape, dtype=torch.int32, pin_memory=True)
    host.copy_(columns.to(torch.int32), non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> Int32:
        arrived.synchronize()
        found: Int32 = host.numpy().copy()  # pinned memory is for the next step
        return found

    return wait
