"""Attention within documents that share rows: positions see earlier positions of their own document.

Two ways with equal results: one mask for everything (any device), or flash attention over documents of varying length
(a GPU), which skips what no document sees. A GPU's first use compares and times them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from duetts.models.blocks import grouped_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch: calling it then fails, and the mask is used
    varlen_attn = None

TensorBatch = dict[str, Tensor]
Core = Callable[[Tensor, Tensor, Tensor, TensorBatch], Tensor]
ERRORS = (RuntimeError, TypeError, ValueError, ImportError, AttributeError, AssertionError, NotImplementedError)
TOLERANCE = 0.03  # of values near 1 in bf16


def visible(document: Tensor) -> Tensor:
    """Document numbers [rows, n] -> bool [rows, n, n]: whether query i sees key j."""
    steps = torch.arange(document.shape[1], device=document.device)
    return (document[:, :, None] == document[:, None, :]) & (steps[:, None] >= steps)


def masked(q: Tensor, k: Tensor, v: Tensor, batch: TensorBatch) -> Tensor:
    """q [rows, heads, n, d], k and v [rows, kv_heads, n, d] -> [rows, heads, n, d]."""
    return grouped_attention(q, k, v, batch["visible"][:, None])


def varying(q: Tensor, k: Tensor, v: Tensor, batch: TensorBatch) -> Tensor:
    """As `masked`, by flash attention: needs half precision and a GPU."""
    rows, heads, length, dim = q.shape
    groups = heads // k.shape[1]
    flat = [
        x.transpose(1, 2).reshape(rows * length, -1, dim).to(torch.bfloat16)
        for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    ]
    starts = batch["starts"]
    out = varlen_attn(*flat, starts, starts, length, length, window_size=(-1, 0))
    return out.view(rows, length, heads, dim).transpose(1, 2).to(q.dtype)


def timed(core: Core, inputs: list[Tensor], batch: TensorBatch) -> tuple[float, list[Tensor]]:
    """Seconds of forward and backward, the output and the gradients."""
    found: list[Tensor] = []
    started = 0.0
    for attempt in range(4):
        if attempt == 1:
            torch.cuda.synchronize()
            started = time.monotonic()
        leaves = [value.detach().requires_grad_() for value in inputs]
        out = core(*leaves, batch)
        out.square().sum().backward()
        found = [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    torch.cuda.synchronize()
    return (time.monotonic() - started) / 3, found


def choose(batch: TensorBatch, heads: int, kv_heads: int, dim: int) -> tuple[Core, str]:
    """The faster way that is right on this machine, and a line that says why."""
    document = batch["document"]
    if document.device.type != "cuda":
        return masked, "attention by mask"
    shapes = [(document.shape[0], count, document.shape[1], dim) for count in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, device=document.device, dtype=torch.bfloat16) for shape in shapes]
    plain_s, wanted = timed(masked, inputs, batch)
    try:
        fast_s, found = timed(varying, inputs, batch)
    except ERRORS as error:
        return masked, f"attention by mask, since flash attention failed: {type(error).__name__}: {str(error)[:200]}"
    worst = max(((a - b).float().norm() / b.float().norm()).item() for a, b in zip(found, wanted, strict=True))
    times = f"{plain_s * 1e3:.1f} ms by mask, {fast_s * 1e3:.1f} ms by flash attention, difference {worst:.4f}"
    if worst < TOLERANCE and fast_s < plain_s:
        return varying, f"attention takes {times}: flash attention"
    return masked, f"attention takes {times}: mask"
