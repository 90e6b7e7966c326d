"""The memory of a stream, decoded or encoded: convolution tails, sliding windows of keys and values, and its position.

A `StreamState` holds fixed slots, one per stream; its owner resets a slot before a new stream uses it. A `StreamView`
is a batch of slots for one call: several streams, each at its own position, advance by the same number of frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StreamState:
    """Slots of memory. `tails[i]` is [slots, channels, past], `windows[i]` a pair of [slots, heads, window - 1, d]."""

    def __init__(
        self, slots: int, tails: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int, int]],
        *, device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.num_slots = slots
        self.tails = [torch.zeros(slots, channels, past, device=device, dtype=dtype) for channels, past in tails]
        self.windows = [
            (
                torch.zeros(slots, heads, length, dim, device=device, dtype=dtype),
                torch.zeros(slots, heads, length, dim, device=device, dtype=dtype),
            )
            for heads, length, dim in windows
        ]
        self.position = torch.zeros(slots, device=device, dtype=torch.int64)

    def reset(self, slot: int) -> None:
        """Makes a slot a stream that has not begun."""
        for tail in self.tails:
            tail[slot].zero_()
        for keys, values in self.windows:
            keys[slot].zero_()
            values[slot].zero_()
        self.position[slot].zero_()  # assigning a number would wait for the device

    def view(self, slots: Sequence[int], *, keep: bool = True) -> StreamView:
        """The given slots, in the order of a batch's rows. Without `keep` the streams stay where they were."""
        return StreamView(self, torch.tensor(slots, device=self.position.device), keep)


class StreamView:
    """One call's batch of streams. Layers read their past here and leave the new one."""

    def __init__(self, state: StreamState, rows: Tensor, keep: bool = True) -> None:
        self._state = state
        self._rows = rows
        self._keep = keep

    def positions(self) -> Tensor:
        """Frames done so far, int64 [batch]."""
        return self._state.position[self._rows]

    def extend(self, slot: int, x: Tensor) -> Tensor:
        """x [batch, channels, n] with its past on the left; keeps the new past."""
        tail = self._state.tails[slot]
        past = tail.shape[-1]
        if past == 0:
            return x
        x = torch.cat((tail[self._rows], x), dim=-1)
        if self._keep:
            tail[self._rows] = x[..., -past:]
        return x

    def extend_window(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, n, d] with the window before them; keeps the new window."""
        keys, values = self._state.windows[slot]
        length = keys.shape[2]
        k = torch.cat((keys[self._rows], k), dim=2)
        v = torch.cat((values[self._rows], v), dim=2)
        if self._keep:
            keys[self._rows] = k[:, :, k.shape[2] - length :]
            values[self._rows] = v[:, :, v.shape[2] - length :]
        return k, v

    def advance(self, frames: int) -> None:
        """Counts frames as done, after all layers have run."""
        if self._keep:
            self._state.position[self._rows] += frames
