"""Fused operations of the models. Each call picks its Triton kernel, or its torch twin in `reference`.

The kernels run on a GPU outside training; everything else, a CPU above all, is the twin. Knows no model and no engine.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from duetts.kernels import reference


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def _triton(x: Tensor) -> bool:
    """Whether kernels may serve this call: they know no gradients, and only GPUs."""
    return x.is_cuda and not torch.is_grad_enabled() and _installed()


# ---- linear: norms, projections and the gated MLP


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [..., K] / rms(x) * gain [K]. The quotient is rounded to the activation type before the product."""
    return reference.rms_norm(x, gain, eps)


def linear(x: Tensor, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] -> [..., N]; an 8-bit weight has a float32 `scale` [N] per row."""
    return reference.linear(x, weight, scale, bias)


def norm_linear(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """`linear` of `rms_norm`: x [..., K] -> [..., N]."""
    return reference.norm_linear(x, gain, eps, weight, scale, bias)


def norm_gate(
    x: Tensor, gain: Tensor, eps: float, w1: Tensor, w3: Tensor, scale1: Tensor | None = None, scale3: Tensor | None = None
) -> Tensor:
    """silu(w1 n) * (w3 n) of n = rms_norm(x): x [..., K], w1 and w3 [F, K] -> [..., F]."""
    return reference.norm_gate(x, gain, eps, w1, w3, scale1, scale3)


def linear_add(y: Tensor, weight: Tensor, residual: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """residual [..., N] + linear(y [..., K])."""
    return reference.linear_add(y, weight, residual, scale, bias)
