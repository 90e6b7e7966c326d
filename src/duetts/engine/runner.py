"""The language model's side of the engine: blocks of prompts are read into the paged cache, frames are drawn from there.

All that a frame needs lies in device memory by slot; the host only says which slots take part. On a GPU a frame is one
replay of a recording for its number of rows, and so is a block. On a CPU every step has the same number of rows, padded
if need be, attention runs row by row and prompts are read in exact blocks: a row's numbers then depend on its own request
only, to the last bit.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from duetts.engine.pages import PAGE, Block, pages_for
from duetts.engine.parts import UNSOUND, Drawn, Result
from duetts.engine.recordings import Recordings
from duetts.engine.sequence import Sequence
from duetts.engine.slots import SlotMemory
from duetts.models.dual_ar import DualAR
from duetts.models.kv_cache import BlockRows, CacheRows, DecodeRows, FrameCache, KVCache, SeparateRows
from duetts.models.sampling import RowSampler
from duetts.types import Int32

# Sizes that are recorded. Weights are read once a frame whatever its rows, so that padding costs little time; a block's time
# grows with its positions (on an H200 2.9 ms for 64, 7.4 ms for 512).
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BLOCKS = (16, 32, 64, 128, 192, 256, 320, 384, 512)
ON_THE_WAY = 3  # steps whose columns may be on the way to the host: one more than can be under way


class Runner:
    """Owns the device memory of `slots` sequences and of the pages they share; steps have at most `rows` rows, blocks at most
    `block` positions.

    `fixed` says whether shapes are (see above); None is as the device is. Tests run the other way on a CPU too.
    """

    def __init__(
        self, model: DualAR, *, slots: int, rows: int, pages: int, max_model_len: int, block: int = 512,
        fixed: bool | None = None,
    ) -> None:  # fmt: skip
        weight = model.slow.embeddings.weight
        config, device = model.config, weight.device
        on_cpu = device.type == "cpu"
        self._model = model
        self._device = device
        self._fixed = on_cpu if fixed is None else fixed
        self.lag = 0 if self._fixed else 1
        self._rows = rows
        self._longest = max_model_len
        self._cache = KVCache(config.slow, pages, PAGE, device=device, dtype=weight.dtype)
        self._frame_cache = FrameCache(config.fast, rows, device=device, dtype=weight.dtype)
        # A block is padded to a size that is recorded, beyond the longest sequence too: what is there goes to scratch.
        width = pages_for(max_model_len) + pages_for(block) + 1
        self._slots = SlotMemory(config, slots, width, pages, device)
        sizes = [size for size in ROWS if size < rows] + [rows]
        blocks = [size for size in BLOCKS if size < block] + [block]
        self._steps = Recordings(self._step, sizes, self._blank_rows, device, replayed=not on_cpu)
        self._reads = Recordings(self._read_block, blocks, self._blank_block, device, replayed=not on_cpu)
        self._lane: AbstractContextManager[object] = nullcontext()
        if not on_cpu:
            # Of higher priority than the codec's: its work fills what frames leave of the device.
            stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._lane = torch.cuda.stream(stream)
        self._ways = deque([_Way(rows, 1 + config.num_codebooks) for _ in range(0 if on_cpu else ON_THE_WAY)])

    @torch.inference_mode()
    def prepare(self) -> None:
        """Records all sizes, so that no request waits for it."""
        with self._lane:
            self._steps.record_all()
            self._reads.record_all()

    @torch.inference_mode()
    def read(self, sequence: Sequence, block: Block) -> None:
        """A block of known columns into the cache, alone."""
        count = block.end - block.start
        columns = sequence.columns()[:, block.start : block.end].astype(np.int64)
        if self._fixed:
            rows = SeparateRows(self._cache, [sequence.pages], [block.start], count)
            self._model.prefill(torch.from_numpy(columns)[None], rows)
            return
        size = self._reads.size_for(count)
        padded, table, start = inputs = self._blank_block(size)
        padded[:, :count] = torch.from_numpy(columns)
        table[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
        start[0] = block.start
        with self._lane:
            self._reads(size, inputs)

    @torch.inference_mode()
    def launch(self, rows: list[Sequence]) -> Result:
        """The next frame of each row. Slots move on together, at the end: a step that raises can be tried again."""
        with self._lane:
            return self._launch(rows)

    def _launch(self, rows: list[Sequence]) -> Result:
        self._slots.occupy(rows)
        count = self._rows if self._fixed else self._steps.size_for(len(rows))
        padding = count - len(rows)
        slots = np.array([sequence.slot for sequence in rows] + [self._slots.padding] * padding, np.int64)
        if self._fixed:
            tables: list[list[int]] = [sequence.pages for sequence in rows] + [[]] * padding
            starts = [sequence.position for sequence in rows] + [0] * padding
            columns = self._draw(torch.from_numpy(slots), SeparateRows(self._cache, tables, starts, 1))
        else:
            columns = self._steps(count, (self._pinned(torch.from_numpy(slots)),))
        if self._device.type != "cpu":
            self._ways.rotate(-1)
            return self._ways[0].start(columns, len(rows))
        return Drawn(columns[: len(rows)].numpy())

    def _step(self, slots: Tensor) -> Tensor:
        return self._draw(slots, DecodeRows(self._cache, self._slots.tables, slots, self._slots.positions[slots]))

    def _draw(self, slots: Tensor, rows: CacheRows) -> Tensor:
        """Draws for `slots` and moves them on -> columns int32 [batch, 1 + codebooks]. Nothing here asks the host."""
        config, memory = self._model.config, self._slots
        frames, recent, positions = memory.frames[slots], memory.recent[slots], memory.positions[slots]
        sampler = RowSampler(memory.sampling.at(slots), frames, recent, config.num_semantic)
        columns = self._model.next_frame(memory.columns[slots], rows, self._frame_cache, sampler)
        main = (columns[:, :1] - config.semantic_start).where(columns[:, :1] != config.end_id, -1)
        memory.recent[slots] = torch.cat((recent[:, 1:], main), dim=1)
        memory.columns[slots] = columns
        memory.positions[slots] = (positions + 1) * (slots != memory.padding)  # padding rows have no past to read
        memory.frames[slots] = frames + 1
        return torch.cat((columns[:, :1].where(sampler.sound[:, None], UNSOUND), columns[:, 1:]), dim=1).to(torch.int32)

    def _read_block(self, columns: Tensor, table: Tensor, start: Tensor) -> Tensor:
        return self._model.prefill(columns[None], BlockRows(self._cache, table, start, columns.shape[1], self._longest))

    def _blank_rows(self, size: int) -> tuple[Tensor, ...]:
        return (self._pinned(torch.full((size,), self._slots.padding)),)

    def _blank_block(self, size: int) -> tuple[Tensor, ...]:
        """Columns, page table and start of a block that touches no page but the scratch one."""
        columns = torch.zeros(1 + self._model.config.num_codebooks, size, dtype=torch.int64)
        table = torch.full((self._slots.tables.shape[1],), self._cache.scratch, dtype=torch.int32)
        return self._pinned(columns), self._pinned(table), self._pinned(torch.zeros(1, dtype=torch.int64))

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor if self._device.type == "cpu" else tensor.pin_memory()


class _Way:
    """Page-locked memory that a step's columns travel to, beside what the device does next."""

    def __init__(self, rows: int, width: int) -> None:
        self._host = torch.empty(rows, width, dtype=torch.int32, pin_memory=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self, columns: Tensor, count: int) -> Result:
        self._host[: len(columns)].copy_(columns, non_blocking=True)
        self._arrived.record()
        return _Arrival(self._host[:count], self._arrived)


class _Arrival:
    """Columns that are on their way: read them before the way serves another step."""

    def __init__(self, host: Tensor, arrived: torch.cuda.Event) -> None:
        self._host = host
        self._arrived = arrived

    def ready(self) -> bool:
        try:
            return bool(self._arrived.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # the device has failed: a call says how
            return True

    def __call__(self) -> Int32:
        self._arrived.synchronize()
        found: Int32 = self._host.numpy().copy()  # the memory is for a later step
        return found
