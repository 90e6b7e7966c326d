"""Torch twins of the kernels: the same names, arguments and rounding, for any device and for training.

On a CPU they are what runs. Their arithmetic is the models' definition: golden tests compare every bit of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- linear: norms, projections and the gated MLP


def _upcast(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [..., K] / rms(x) * gain [K]. The quotient is rounded to the activation type before the product."""
    wide = _upcast(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * gain


def linear(x: Tensor, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] -> [..., N]; an 8-bit weight has a float32 `scale` [N] per row."""
    if scale is None:
        return F.linear(x, weight, bias)
    wide = _upcast(x)
    product = F.linear(wide, weight.to(wide.dtype)) * scale
    return (product if bias is None else product + bias).to(x.dtype)


def norm_linear(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """`linear` of `rms_norm`: x [..., K] -> [..., N]."""
    return linear(rms_norm(x, gain, eps), weight, scale, bias)


def norm_gate(
    x: Tensor, gain: Tensor, eps: float, w1: Tensor, w3: Tensor, scale1: Tensor | None = None, scale3: Tensor | None = None
) -> Tensor:
    """silu(w1 n) * (w3 n) of n = rms_norm(x): x [..., K], w1 and w3 [F, K] -> [..., F]."""
    normed = rms_norm(x, gain, eps)
    return F.silu(linear(normed, w1, scale1)) * linear(normed, w3, scale3)


def linear_add(y: Tensor, weight: Tensor, residual: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """residual [..., N] + linear(y [..., K])."""
    return residual + linear(y, weight, scale, bias)
