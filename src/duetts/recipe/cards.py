"""The hardware that recipes know, by data sheets, and which of it this machine has. Only the H200's speeds are measured."""

from __future__ import annotations

from dataclasses import dataclass

from duetts.machine import Gpu
from duetts.roofline import H200, Card

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


def _sheet(
    name: str, gpus: int, memory_gb: float, bandwidth: float, flops: float, brand: str = "nvidia", fp8: bool = True
) -> Hardware:
    """From TB/s and dense 16-bit TFLOP/s."""
    card = Card(name, REACHED_BANDWIDTH * bandwidth * 1e12, REACHED_FLOPS * flops * 1e12, REACHED_CODEC * flops * 1e12)
    return Hardware(card, gpus, memory_gb, brand, fp8)


HARDWARE: dict[str, Hardware] = {
    "h100": _sheet("H100", 8, 80, 3.35, 989),
    "h200": Hardware(H200, 8, 141),
    "b200": _sheet("B200", 8, 180, 8.0, 2250),
    "gb200": _sheet("GB200", 4, 192, 8.0, 2500),
    "b300": _sheet("B300", 8, 268, 8.0, 2250),
    "gb300": _sheet("GB300", 4, 288, 8.0, 2500),
    "mi300x": _sheet("MI300X", 8, 192, 5.3, 1307, "amd", fp8=False),
    "mi325x": _sheet("MI325X", 8, 256, 6.0, 1307, "amd", fp8=False),
    "mi350x": _sheet("MI350X", 8, 288, 8.0, 2300, "amd", fp8=False),
    "mi355x": _sheet("MI355X", 8, 288, 8.0, 2500, "amd", fp8=False),
    "rtx_3090": _sheet("RTX 3090", 1, 24, 0.936, 71, fp8=False),
    "rtx_4090": _sheet("RTX 4090", 1, 24, 1.008, 165),
    "rtx_5080": _sheet("RTX 5080", 1, 16, 0.96, 112),
    "rtx_5090": _sheet("RTX 5090", 1, 32, 1.792, 210),
    "l4": _sheet("L4", 1, 24, 0.3, 121),
    "l40s": _sheet("L40S", 1, 48, 0.864, 362),
    "a100": _sheet("A100 80 GB", 8, 80, 2.039, 312, fp8=False),
    "a800": _sheet("A800 80 GB", 8, 80, 2.039, 312, fp8=False),
    "rtx_pro_6000": _sheet("RTX PRO 6000", 1, 96, 1.792, 503),
    "dgx_spark": _sheet("DGX Spark", 1, 128, 0.273, 125),
    "cpu": Hardware(Card("CPU", 40e9, 0.5e12, 0.2e12), 0, 0, "cpu", fp8=False),
}


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
