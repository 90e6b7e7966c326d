"""Keys and values that a decoder has already seen, in pages. Who has which page is decided elsewhere (`engine/pages.py`).

Two ways to attend, equal up to rounding: one call for all rows over tables in device memory (a GPU), or row by row over exactly
the row's own length (a CPU), where a row's result must not depend, not even in the last bit, on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from duetts.model_config import DecoderConfig
from duetts.models.blocks import grouped_attention


class CacheRows(Protocol):
    """One call's batch of sequences, each at its own position."""

    positions: Tensor  # int64 [batch, count], where the new positions go

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v [batch, kv_heads, count, d], then attends with q [batch, heads, count, d] to all of the row."""
        ...


class KVCache:
    """Memory of every layer, twice [layers, pages + 1, kv_heads, page, head_dim]. The last page is scratch for padding rows."""

    def __init__(
        self, config: DecoderConfig, pages: int, page: int, *, device: torch.device, dtype: torch.dtype, row_by_row: bool
    ) -> None:  # fmt: skip
        shape = (config.num_layers, pages + 1, config.num_kv_heads, page, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.page = page
        self.scratch = pages
        self._row_by_row = row_by_row

    def rows(self, tables: Sequence[Sequence[int]], starts: Sequence[int], count: int) -> CacheRows:
        """A batch: row i adds `count` positions from `starts[i]` to the pages `tables[i]`. A row without pages is padding."""
        device = self.keys.device
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(count, device=device)
        if self._row_by_row:
            return SeparateRows(self, tables, starts, positions)
        width = max(map(len, tables))
        padded = [[*table, *[self.scratch] * (width - len(table))] for table in tables]
        return JointRows(self, torch.tensor(padded, device=device), positions)


class SeparateRows:
    """Rows attended to one after another, each over its own length."""

    def __init__(self, cache: KVCache, tables: Sequence[Sequence[int]], starts: Sequence[int], positions: Tensor) -> None:
        self.positions = positions
        self._cache = cache
        count = positions.shape[1]
        steps = torch.arange(count)
        self._live: list[tuple[int, Tensor, Tensor, int, Tensor | None]] = []
        for row, (table, start) in enumerate(zip(tables, starts, strict=True)):
            if not table:
                continue
            end = start + count
            assert end <= len(table) * cache.page, f"position {end - 1} is beyond {len(table)} pages"
            pages = torch.tensor(table[: -(-end // cache.page)])
            mask = None if count == 1 else torch.arange(end) <= start + steps[:, None]
            self._live.append((row, pages, pages[positions[row] // cache.page], end, mask))
        self._offsets = positions % cache.page

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `CacheRows` says; padding rows get zeros."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        out = torch.zeros_like(q)
        for row, pages, own, end, mask in self._live:
            offsets = self._offsets[row]
            keys[own, :, offsets] = k[row].transpose(0, 1)
            values[own, :, offsets] = v[row].transpose(0, 1)
            past_keys, past_values = (_joined(memory.index_select(0, pages))[:, :end] for memory in (keys, values))
            out[row] = _attend_alone(q[row], past_keys, past_values, mask)
        return out


class JointRows:
    """All rows in one call, from tables int64 [batch, pages] and positions int64 [batch, count] in device memory."""

    def __init__(self, cache: KVCache, tables: Tensor, positions: Tensor) -> None:
        self.positions = positions
        self._cache = cache
        self._tables = tables
        self._own = tables.gather(1, positions // cache.page)
        self._offsets = positions % cache.page
        length = tables.shape[1] * cache.page
        steps = torch.arange(length, device=positions.device)
        self._mask = (steps <= positions[:, :, None])[:, None]
        self._beyond = (steps > positions[:, -1:])[:, None, :, None]  # what earlier owners of the pages have left there

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `CacheRows` says; what padding rows get has no meaning."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._own, :, self._offsets] = k.transpose(1, 2)
        values[self._own, :, self._offsets] = v.transpose(1, 2)
        # Zeros beyond the row's end: a number left there that is not finite would survive the mask.
        past_keys, past_values = (_joined(memory[self._tables]).masked_fill(self._beyond, 0) for memory in (keys, values))
        return grouped_attention(q, past_keys, past_values, self._mask)


def _joined(pages: Tensor) -> Tensor:
    """Pages [..., n, kv_heads, page, d] as one run [..., kv_heads, n * page, d]."""
    return pages.transpose(-4, -3).flatten(-3, -2)


def _attend_alone(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """One row's q [heads, n, d] over its k and v [kv_heads, m, d]. Without mask n is 1, and the queries of a key-value head
    lie side by side as if they were positions, which spares repeating the keys."""
    side_by_side = q if mask is not None else q.reshape(k.shape[0], -1, q.shape[-1])
    return grouped_attention(side_by_side[None], k[None], v[None], mask)[0].reshape(q.shape)


class FrameCache:
    """The fast decoder's memory inside one frame: a few positions that every row shares, forgotten with the next frame."""

    def __init__(self, config: DecoderConfig, rows: int, *, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_layers, rows, config.num_kv_heads, config.max_positions, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def attend(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `CacheRows.attend`, every row at the same `start`. A batch smaller than the memory uses its first rows."""
        batch, end = q.shape[0], start + q.shape[2]
        keys, values = self.keys[layer, :batch], self.values[layer, :batch]
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        causal = start == 0 and end > 1
        assert causal or end - start == 1, "several positions at once only at the start of a frame"
        return grouped_attention(q, keys[:, :, :end], values[:, :, :end], None, causal=causal)
