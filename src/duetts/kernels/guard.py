"""What the attention kernels take, whether decode may use its own, and how often it did. Knows no Triton."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_DIM = 256
LEAST_CAPABILITY = (8, 0)  # asynchronous copies and bfloat16 products


@dataclass(slots=True)
class DecodeUse:
    """The decode attention of this process. Calls are counted when they are launched, or recorded into a graph, not per replay:
    `short` where one kernel does it all, `long` where the positions of a row are shared out and folded by a second one."""

    enabled: bool = True
    required: bool = False
    short: int = 0
    long: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def refuse(self, reason: str) -> None:
        """Counts a call that plain torch serves. Raises RuntimeError where that is not allowed."""
        self.fallbacks[reason] += 1
        if self.required:
            raise RuntimeError(f"decode attention must run its kernel, but {reason}")


DECODE = DecodeUse()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """What a CUDA device can do; asked once, as every layer of every step wants to know."""
    return torch.cuda.get_device_capability(device)


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def refusal(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> str:
    """Why the kernels cannot take these queries [..., H, D], new keys and values [..., KV, D] and memory [.., KV, .., D]; "" if
    they can."""
    dim = q.shape[-1]
    if q.is_cuda and capability(q.device) < LEAST_CAPABILITY:
        return "compute capability is below 8.0"
    if q.dtype not in FLOATS:
        return f"{q.dtype} is not bfloat16, float16 or float32"
    if any(tensor.dtype != q.dtype for tensor in (k, v, keys, values)):
        return f"the cache has {keys.dtype}, the queries {q.dtype}"
    if not _power_of_two(dim) or not 16 <= dim <= LARGEST_DIM:
        return f"a head has {dim} elements, not a power of two from 16 to {LARGEST_DIM}"
    if q.shape[-2] % keys.shape[1]:
        return f"{q.shape[-2]} query heads are no multiple of {keys.shape[1]}"
    if not (keys.is_contiguous() and values.is_contiguous()):
        return "the cache is not contiguous"
    if any(tensor.stride()[-2:] != (dim, 1) for tensor in (q, k, v)):
        return "the heads of a position are not side by side"
    return ""


def page_refusal(keys: Tensor, table: Tensor, *numbers: Tensor) -> str:
    """The same of pages [pages, KV, PAGE, D], of a table of them, and of slots, positions or starts."""
    if not _power_of_two(keys.shape[2]):
        return f"a page has {keys.shape[2]} positions, not a power of two"
    if table.dtype != torch.int32 or table.stride(-1) != 1:
        return "the page table is not contiguous int32"
    if any(each.dtype != torch.int64 or not each.is_contiguous() for each in numbers):
        return "slots or positions are not contiguous int64"
    return ""
