"""Keys and values that a decoder has already seen. Slots belong to sequences; their owner decides who has which.

Two ways to attend, equal up to rounding: one call for all rows (a GPU), or row by row over exactly the row's own
length (a CPU), where a row's result must not depend, not even in the last bit, on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duetts.model_config import DecoderConfig
from duetts.models.blocks import grouped_attention


class KVCache:
    """Memory of every layer: [layers, slots, kv_heads, length, head_dim], twice."""

    def __init__(
        self, config: DecoderConfig, slots: int, length: int, *, device: torch.device, dtype: torch.dtype, row_by_row: bool
    ) -> None:  # fmt: skip
        shape = (config.num_layers, slots, config.num_kv_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = length
        self.row_by_row = row_by_row

    def rows(self, slots: Sequence[int | None], starts: Sequence[int], count: int) -> CacheRows:
        """A batch: row i adds `count` positions from `starts[i]` to `slots[i]`. A row of None is padding."""
        return CacheRows(self, slots, starts, count)


class CacheRows:
    """One call's batch of sequences, each at its own position."""

    def __init__(self, cache: KVCache, slots: Sequence[int | None], starts: Sequence[int], count: int) -> None:
        device = cache.keys.device
        longest = max(starts) + count
        assert longest <= cache.length, f"position {longest} is beyond the cache of {cache.length}"
        self._cache = cache
        self._live = [(row, slot, starts[row]) for row, slot in enumerate(slots) if slot is not None]
        self._count = count
        steps = torch.arange(count, device=device)
        self.positions = torch.tensor(starts, device=device)[:, None] + steps  # [batch, count]
        if cache.row_by_row:
            keys = torch.arange(longest, device=device)
            self._masks = [
                None if count == 1 else keys[: start + count] <= start + steps[:, None] for _, _, start in self._live
            ]
        else:
            self._index = torch.tensor([slot for _, slot, _ in self._live], device=device)
            self._batch = torch.tensor([row for row, _, _ in self._live], device=device)
            self._own = self.positions[self._batch]
            self._longest = longest
            self._mask = (torch.arange(longest, device=device) <= self._own[:, :, None])[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v [batch, kv_heads, count, d], then attends with q [batch, heads, count, d] to all of the row."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        out = torch.zeros_like(q)
        if self._cache.row_by_row:
            for (row, slot, start), mask in zip(self._live, self._masks, strict=True):
                end = start + self._count
                keys[slot, :, start:end] = k[row]
                values[slot, :, start:end] = v[row]
                out[row] = _attend_alone(q[row], keys[slot, :, :end], values[slot, :, :end], mask)
            return out
        rows, slots = self._batch, self._index
        keys[slots[:, None], :, self._own] = k[rows].transpose(1, 2)
        values[slots[:, None], :, self._own] = v[rows].transpose(1, 2)
        past = (keys[slots, :, : self._longest], values[slots, :, : self._longest])
        out[rows] = grouped_attention(q[rows], *past, self._mask)
        return out


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
