"""How much of S2 Pro fits into a GPU, known without torch: the sum of engine/memory.py, in numbers."""

from __future__ import annotations

WEIGHTS = {"none": 9.13e9, "fp8": 5.1e9, "int8": 5.1e9}  # bytes, by quantization
CODEC = 3.25e9  # bytes of the codec and of what is recorded for it,
CODEC_PLACE = 10.2e6  # and for each place
WORK_SPACE = 1e9
POSITION = 147_456  # bytes of keys and values
PLACE = 2048  # positions that are set aside for a place
SHARE = 0.9  # of a GPU that may be used, unless the settings say otherwise
ENGINES_OF_A_WORKER = 2  # H200s, whose audio one HTTP process carries with something to spare
QUEUE = 4  # requests that may wait, for each place


def fixed_bytes(quantization: str, *, codec: bool = True) -> float:
    """What is needed before the first place, with the codec or without."""
    return WEIGHTS[quantization] + (CODEC if codec else 0.0) + WORK_SPACE


def places(free: float, total: float, share: float, quantization: str, *, codec: bool = True) -> int:
    """Requests that can be spoken at the same time, each with keys and values of ordinary length. 0 if there is no room."""
    room = min(free, total * share) - fixed_bytes(quantization, codec=codec)
    return max(0, int(room // (PLACE * POSITION + (CODEC_PLACE if codec else 0.0))))
