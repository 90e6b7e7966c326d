"""The hardware that recipes know, by data sheets, and which of it this machine has. Only the H200's speeds are measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duetts.machine import Gpu
from duetts.roofline import H200, Card
from duetts.settings.files import load

DEFAULT = "h200"
REACHED_BANDWIDTH, REACHED_FLOPS, REACHED_CODEC = 0.9, 0.8, 0.2  # of a data sheet's numbers; as on the H200
OTHER_NAMES = {"gb10": "dgx_spark"}  # what drivers call them


@dataclass(frozen=True, slots=True)
class Hardware:
    """A card, how many of it a usual machine has, and the memory of each in GB. `brand` is nvidia, amd or cpu."""

    card: Card
    gpus: int
    memory_gb: float
    brand: str = "nvidia"
    fp8: bool = True

    @property
    def measured(self) -> bool:
        """Whether its speeds are; all other numbers come from data sheets."""
        return self.card is H200


def _hardware(name: str, bandwidth: float, flops: float, **more: Any) -> Hardware:
    """From TB/s and TFLOP/s of a data sheet."""
    reached = Card(name, REACHED_BANDWIDTH * bandwidth * 1e12, REACHED_FLOPS * flops * 1e12, REACHED_CODEC * flops * 1e12)
    return Hardware(H200 if name == H200.name else reached, **more)


HARDWARE = {name: _hardware(**values) for name, values in load(Path(__file__).parent / "cards.yaml").items()}


def recognise(gpus: list[Gpu] | None) -> tuple[str | None, int]:
    """The hardware id of this machine's GPUs, as of the first of them, and how many there are. None if it is no known one."""
    if gpus is None:
        return None, 0
    if not gpus:
        return "cpu", 0
    name = gpus[0].name.lower().replace("-", " ")
    known = {**{key.replace("_", " "): key for key in HARDWARE}, **OTHER_NAMES}
    words = next((words for words in sorted(known, key=len, reverse=True) if words in name), None)
    return known[words] if words else None, len(gpus)
