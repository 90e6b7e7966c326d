"""Keys and values that a decoder has already seen, in pages. Who has which page is decided elsewhere (`engine/pages.py`).

Two ways to attend, equal up to rounding: by the kernels over tables in device memory (a GPU), or row by row over exactly the
row's own length (a CPU), where a row's result must not depend, not even in the last bit, on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from duetts import kernels
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

    def __init__(self, config: DecoderConfig, pages: int, page: int, *, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_layers, pages + 1, config.num_kv_heads, page, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.page = page
        self.scratch = pages


class SeparateRows:
    """Rows attended to one after another, each over its own length: row i adds `count` positions from `starts[i]` to the pages
    `tables[i]`. A row without pages is padding."""

    def __init__(self, cache: KVCache, tables: Sequence[Sequence[int]], starts: Sequence[int], count: int) -> None:
        steps = torch.arange(count)
        self.positions = torch.tensor(starts)[:, None] + steps
        self._cache = cache
        self._live: list[tuple[int, Tensor, Tensor, int, Tensor | None]] = []
        for row, (table, start) in enumerate(zip(tables, starts, strict=True)):
            if not table:
                continue
            end = start + count
            assert end <= len(table) * cache.page, f"position {end - 1} is beyond {len(table)} pages"
            pages = torch.tensor(table[: -(-end // cache.page)])
            mask = None if count == 1 else torch.arange(end) <= start + steps[:, None]
            self._live.append((row, pages, pages[self.positions[row] // cache.page], end, mask))
        self._offsets = self.positions % cache.page

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


class DecodeRows:
    """All rows in one call, each with one new position: row i is at `positions[i]` (int64 [batch]) of the pages in
    `tables[slots[i]]` (int32 [slots, width], int64 [batch]), all in device memory."""

    def __init__(self, cache: KVCache, tables: Tensor, slots: Tensor, positions: Tensor) -> None:
        self.positions = positions[:, None]
        self._cache = cache
        self._where = tables, slots, positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `CacheRows` says; what padding rows get has no meaning."""
        memory = self._cache.keys[layer], self._cache.values[layer]
        return kernels.decode_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], *memory, *self._where)[:, :, None]


class BlockRows:
    """One sequence that adds `count` positions from `start` (int64 [1]) to the pages in `table` (int32 [width]), both in device
    memory. Some at the end may be padding: the positions that are read later overwrite them before anybody looks, and from
    `longest` on, which no sequence reaches, they need not be right.
    """

    def __init__(self, cache: KVCache, table: Tensor, start: Tensor, count: int, longest: int) -> None:
        self.positions = (start + torch.arange(count, device=start.device))[None].clamp(max=longest - 1)
        self._cache = cache
        self._where = table, start

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `CacheRows` says."""
        memory = self._cache.keys[layer], self._cache.values[layer]
        q, k, v = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)
        return kernels.prefill_attention(q, k, v, *memory, *self._where).transpose(0, 1)[None]


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
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return kernels.frame_attention(q, k, v, self.keys[layer], self.values[layer], start).transpose(1, 2)
