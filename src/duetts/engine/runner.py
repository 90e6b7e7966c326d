"""Tensors of the language model: caches, the last column of every slot, and the two things that are run, prefill and step.

On a CPU every step has the same number of rows, padded if need be, and attention runs row by row; prompts are read in
fixed blocks. A row's numbers then depend on its own request only, to the last bit (`docs/architecture.md`).
"""

from __future__ import annotations

import numpy as np
import torch

from duetts.config import EngineConfig
from duetts.engine.sequence import Sequence
from duetts.models.dual_ar import DualAR
from duetts.models.kv_cache import FrameCache, KVCache
from duetts.models.sampling import PENALTY_WINDOW, RowSampler, SamplingRows
from duetts.types import Int32, Sampling


class Runner:
    """Owns the device memory of `max_num_seqs` slots."""

    def __init__(self, model: DualAR, config: EngineConfig, max_model_len: int) -> None:
        weight = model.slow.embeddings.weight
        device, dtype = weight.device, weight.dtype
        slots = config.max_num_seqs
        self._model = model
        self._device = device
        self._fixed = device.type == "cpu"
        self._block = config.prefill_block
        self.rows = config.rows if self._fixed else slots  # also with fewer slots: bytes must not depend on them
        self._cache = KVCache(model.config.slow, slots, max_model_len, device=device, dtype=dtype, row_by_row=self._fixed)
        self._frame_cache = FrameCache(model.config.fast, self.rows, device=device, dtype=dtype)
        # One more than slots: padding rows read and write the last.
        self._columns = torch.zeros(slots + 1, 1 + model.config.num_codebooks, dtype=torch.int64, device=device)
        self._recent = torch.full((slots + 1, PENALTY_WINDOW), -1, dtype=torch.int64, device=device)
        self._group: tuple[Sequence, ...] = ()
        self._sampling: SamplingRows | None = None

    @torch.inference_mode()
    def prefill(self, sequence: Sequence) -> None:
        """Reads the next block of a prompt into the cache; after the last one the slot is ready to step."""
        assert sequence.slot is not None
        start = sequence.prefilled
        count = min(self._block, sequence.to_prefill)
        part = torch.from_numpy(sequence.utterance.prompt[:, start : start + count].astype(np.int64))
        rows = self._cache.rows([sequence.slot], [start], count)
        self._model.prefill(part.to(self._device)[None], rows)
        sequence.prefilled += count
        if sequence.to_prefill == 0:
            last = torch.from_numpy(sequence.utterance.prompt[:, -1].astype(np.int64))
            self._columns[sequence.slot] = last.to(self._device)
            self._recent[sequence.slot] = -1

    @torch.inference_mode()
    def step(self, group: list[Sequence]) -> Int32:
        """Draws the next frame of each sequence -> int32 [len(group), 1 + codebooks], the token first."""
        model = self._model
        padding = self.rows - len(group) if self._fixed else 0
        slots = [sequence.slot for sequence in group] + [None] * padding
        index = torch.tensor([slot if slot is not None else len(self._columns) - 1 for slot in slots], device=self._device)
        frame = torch.tensor([sequence.num_frames for sequence in group] + [0] * padding, device=self._device)
        sampler = RowSampler(
            self._rows_of(group, padding), frame, self._recent[index], model.config.num_codebooks, model.config.num_semantic + 1
        )
        rows = self._cache.rows(slots, [sequence.position for sequence in group] + [0] * padding, 1)
        columns = model.next_frame(self._columns[index], rows, self._frame_cache, sampler)
        self._columns[index] = columns
        main = (columns[:, :1] - model.config.semantic_start).where(columns[:, :1] != model.config.end_id, -1)
        self._recent[index] = torch.cat((self._recent[index][:, 1:], main), dim=1)
        return columns[: len(group)].to("cpu", torch.int32).numpy()

    def _rows_of(self, group: list[Sequence], padding: int) -> SamplingRows:
        if self._sampling is None or self._group != tuple(group):
            utterances = [sequence.utterance for sequence in group]
            self._group = tuple(group)
            self._sampling = SamplingRows.of(
                [utterance.sampling for utterance in utterances] + [Sampling()] * padding,
                [utterance.seed for utterance in utterances] + [0] * padding,
                self._device,
            )
        return self._sampling
