"""All audio in the device's memory as int16, and random crops of it without a trip to the host."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from training.data.shards import list_shards, read_shard
from training.recipe import FRAME, LABEL_HOP, SAMPLE_RATE

GAIN_DB = (-9.0, 3.0)


class Pool:
    """Clips of one or more kinds. `room_hours` is reserved at once; shards beyond it are left out.

    `shares` of kinds: how often a crop is of that kind as soon as there are clips of it, however few. The rest is drawn
    evenly from the other kinds. With `only`, shards of other kinds are passed over.
    """

    def __init__(
        self, device: torch.device, room_hours: float, shares: dict[str, float] | None = None, only: str | None = None
    ) -> None:
        self.device = device
        room = int(room_hours * 3600 * SAMPLE_RATE)
        self.samples = torch.zeros(room, dtype=torch.int16, device=device)
        self.labels = torch.zeros(room // LABEL_HOP + 1, dtype=torch.uint8, device=device)
        self.used = 0
        self.shares, self.only = shares or {}, only
        self._seen: set[str] = set()
        self._clips: list[tuple[int, int, str]] = []  # start, length, kind
        self._lengths: dict[str, int] = {}

    @property
    def hours(self) -> float:
        return self.used / 3600 / SAMPLE_RATE

    def hours_of(self, kind: str) -> float:
        return self._lengths.get(kind, 0) / 3600 / SAMPLE_RATE

    def __len__(self) -> int:
        return len(self._clips)

    def load(self, folder: Path, most: int = 1 << 30) -> int:
        """Takes in up to `most` shards that were not there before; returns how many."""
        new = [path for path in list_shards(folder) if path.name not in self._seen][:most]
        taken = sum(self._take(path) for path in new)
        if taken:
            self._index()
        return taken

    def _take(self, path: Path) -> bool:
        self._seen.add(path.name)
        kind = path.name.rsplit("-", 1)[0]
        if self.only not in (None, kind):
            return False
        shard = read_shard(path)
        start, size = self.used, len(shard.samples)
        if start + size > len(self.samples):
            return False
        self.samples[start : start + size] = torch.from_numpy(shard.samples.copy()).to(self.device)
        first = start // LABEL_HOP
        self.labels[first : first + len(shard.labels)] = torch.from_numpy(shard.labels.copy()).to(self.device)
        self._clips += [(start + clip["start"], clip["length"], kind) for clip in shard.clips]
        self._lengths[kind] = self._lengths.get(kind, 0) + sum(clip["length"] for clip in shard.clips)
        self.used = start + size
        return True

    def _index(self) -> None:
        table = torch.tensor([(*clip[:2], self._weight(clip[2])) for clip in self._clips], dtype=torch.float64)
        self.starts = table[:, 0].long().to(self.device)
        self.lengths = table[:, 1].long().to(self.device)
        self.chances = (table[:, 1] * table[:, 2]).cumsum(0).to(self.device)

    def _weight(self, kind: str) -> float:
        """Of a sample of that kind, so that the kinds come in their shares."""
        fixed = {name: share for name, share in self.shares.items() if name in self._lengths}
        rest = sum(length for name, length in self._lengths.items() if name not in fixed)
        if kind in fixed:
            return fixed[kind] / self._lengths[kind] if rest else 1.0
        return (1 - sum(fixed.values())) / rest

    def crops(self, batch: int, frames: int) -> tuple[Tensor, Tensor]:
        """Waves [batch, samples] at random levels and labels [batch, 4 per frame]; past a clip's end there is silence."""
        draw = torch.rand(batch, device=self.device, dtype=torch.float64) * self.chances[-1]
        clip = torch.searchsorted(self.chances, draw).clamp(max=len(self) - 1)
        slack = (self.lengths[clip] - frames * FRAME).clamp(min=0)
        offset = (torch.rand(batch, device=self.device, dtype=torch.float64) * (slack + 1)).long()
        wave, labels = self.cut(clip, offset, frames)
        low, high = GAIN_DB
        gain = 10 ** ((torch.rand(batch, 1, device=self.device) * (high - low) + low) / 20)
        return wave * gain, labels

    def cut(self, clip: Tensor, offset: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """The stretch of `frames` from `offset` samples into each clip."""
        steps = torch.arange(frames * FRAME, device=self.device)
        place = offset[:, None] + steps
        inside = place < self.lengths[clip, None]
        where = (self.starts[clip, None] + place).clamp(max=len(self.samples) - 1)
        wave = self.samples[where].float() / 32768 * inside
        centers = slice(LABEL_HOP // 2, None, LABEL_HOP)
        labels = self.labels[where[:, centers] // LABEL_HOP].masked_fill(~inside[:, centers], 0)
        return wave, labels
