"""Reads a fixture file and notes which of its arrays a test has used, so that none can be forgotten."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Arrays:
    """The arrays of one npz file. `given` hands out an input, `compare` holds a result against an output."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self._values = {name: file[name] for name in file.files}
        self.used: set[str] = set()

    @property
    def names(self) -> set[str]:
        return set(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def given(self, name: str) -> Tensor:
        self.used.add(name)
        value = torch.from_numpy(self._values[name])
        return value.long() if value.dtype == torch.int32 else value

    def prefixes(self, suffix: str) -> list[str]:
        return sorted(name.removesuffix(suffix) for name in self._values if name.endswith(suffix))

    def compare(self, name: str, actual: Tensor, atol: float = 0.0) -> None:
        expected = self.given(name)
        assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)} for {tuple(expected.shape)}"
        assert torch.isfinite(actual.double()).all(), f"{name}: not finite"
        worst = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
        assert worst <= atol, f"{name}: off by {worst:.3g}, allowed {atol:g}"
