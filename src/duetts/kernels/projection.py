"""Weight-streaming products of few rows: product, gated pair, product + residual, 16- or 8-bit weights, and the norm before.

The file is not called linear.py because `duetts.kernels.linear` is a function.

What is fused: scale, bias, SiLU gate and residual after a product. A layer of S2 Pro is norm, qkv, attention, wo+add, norm,
gate, w2+add: seven kernels, and `reduce` after each product that is split along K.

Bytes per layer in bf16 (8-bit: half; all else is under 3 % at 16 rows), and the time at 4.3 TB/s:
    qkv    6144 x 2560   31.5 MB   7.3 us        gate  2 x 9728 x 2560   99.6 MB   23.2 us
    wo     2560 x 4096   21.0 MB   4.9 us        w2        2560 x 9728   49.8 MB   11.6 us
36 slow layers and 9 passes of 4 fast layers: 72 x 201.9 MB = 14.5 GB, 3.38 ms a frame. Heads: 21.0 + 9 x 5.2 MB.

How: every program holds a tile of the weight as the left operand of the matrix unit (64 rows, the least that Hopper's
warpgroup instruction takes) and all rows of x, padded to 16, 32, 64 or 128, as the right one, so that weights go from
memory through shared memory into the unit and never through registers. All programs are resident at once and have equal
work, so none waits for a second wave. On Hopper a kernel starts while the one before still runs (programmatic dependent
launch), asks its first weights into L2, and only then waits for its input.

A row's result does not depend on how many rows share its call, within 1..16, 17..32 and 33..64 rows (8-bit: 65..128 too).

Measured on an H200, one row: qkv 11.9 us, wo 7.2, gate 36.5, w2 14.1 before tiles began at different steps; 64 rows: gate 29.5
(80 % of the bandwidth, beside other work). Norms fused into the products made a frame of one row 1.4 ms longer. Weights through
the tensor copy engine, larger requests to L2, and asking ahead in the loop gained about 1 %: they are gone.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from duetts.kernels import streaming


class Config(NamedTuple):
    """How one product is cut into programs: each reads `block_n` rows of the weight, `step` bytes of each at a time."""

    block_n: int
    step: int
    programs: int  # where the weight's rows give fewer, K is split about so often, and `reduce` adds the parts
    warps: int
    stages: int
    prefetch: int  # steps asked into L2 before the kernel before has ended
    dependent: bool = True  # programmatic dependent launch
    spread: bool = True  # whether tiles begin at different steps


# ---- choice of configurations

REDUCED = 512  # columns of a program of `reduce`
FEW_ROWS = 64  # above, 16-bit weights are cuBLAS's: x is read once per tile, and L2 becomes the limit
MOST_ROWS = 128  # of a program; more are cut

# (kind, rows at most) -> config; benchmarks/kernel_products.py has the arithmetic. 8-bit weights become 16-bit in registers,
# which takes many warps: more and smaller programs, and no warpgroup instruction up to 16 rows.
CONFIGS: dict[tuple[str, int], Config] = {
    ("gate", 16): Config(64, 128, 1, 4, 5, 8),
    ("gate", 32): Config(64, 128, 1, 4, 5, 8),
    ("gate", 64): Config(64, 128, 1, 4, 5, 2),
    ("wide", 16): Config(64, 256, 1, 4, 6, 8),
    ("wide", 32): Config(64, 256, 1, 4, 7, 8),
    ("wide", 64): Config(64, 256, 1, 4, 6, 8),
    ("narrow", 16): Config(64, 128, 130, 4, 12, 4),
    ("narrow", 32): Config(64, 256, 130, 4, 6, 8),
    ("narrow", 64): Config(64, 256, 130, 4, 6, 8),
    ("gate", 128): Config(64, 128, 1, 4, 4, 8),
    ("wide", 128): Config(128, 256, 96, 8, 3, 8),
    ("narrow", 128): Config(128, 256, 130, 8, 3, 8),
    ("gate 8-bit", 16): Config(32, 128, 1, 2, 6, 8),
    ("gate 8-bit", 32): Config(64, 128, 1, 4, 5, 8),
    ("gate 8-bit", 64): Config(64, 128, 1, 4, 4, 8),
    ("wide 8-bit", 16): Config(32, 128, 384, 2, 8, 8),
    ("wide 8-bit", 32): Config(64, 128, 190, 4, 6, 8),
    ("wide 8-bit", 64): Config(64, 128, 190, 4, 4, 8),
    ("narrow 8-bit", 16): Config(32, 128, 400, 2, 6, 8),
    ("narrow 8-bit", 32): Config(64, 128, 240, 4, 6, 8),
    ("narrow 8-bit", 64): Config(64, 128, 240, 4, 4, 8),
    ("gate 8-bit", 128): Config(128, 64, 1, 8, 6, 8),
    ("wide 8-bit", 128): Config(128, 128, 96, 8, 4, 8),
    ("narrow 8-bit", 128): Config(128, 128, 130, 8, 4, 8),
}
EIGHT_BIT = {torch.int8, torch.float8_e4m3fn}
EARLY_START = True  # the switch for programmatic dependent launch as a whole
KEPT_SHARED = 4096  # bytes of shared memory that a program needs beside its stages, and the system for it


class Device(NamedTuple):
    """What a GPU has, in bytes where it is memory."""

    capability: tuple[int, int]
    multiprocessors: int
    shared: int  # of a multiprocessor


def row_class(num_rows: int) -> int:
    """Rows that a call is padded to; more than 128 are cut into blocks of so many."""
    return next((most for most in (16, 32, 64) if num_rows <= most), MOST_ROWS)


def choose(num_rows: int, weight: Tensor, *, gated: bool = False) -> Config:
    """The configuration of a product of so many rows with such a weight [N, K]."""
    kind = "gate" if gated else "wide" if weight.shape[0] >= 5120 else "narrow"
    return CONFIGS[kind + (" 8-bit" if weight.dtype in EIGHT_BIT else ""), row_class(num_rows)]


@cache
def _properties(index: int) -> Device:
    has = torch.cuda.get_device_properties(index)
    return Device((has.major, has.minor), has.multi_processor_count, has.shared_memory_per_multiprocessor)


def device_of(x: Tensor) -> Device | None:
    """None outside a GPU, where Triton's interpreter takes any configuration."""
    return _properties(x.device.index) if x.is_cuda else None


def _starts_early(x: Tensor) -> bool:
    """Whether a kernel may start before the one it depends on has ended: Hopper, and Blackwell of data centres.

    Left out is Blackwell of desktops, where others saw CUDA graphs refuse such launches (sgl-project/sglang, pull 18596).
    """
    device = device_of(x)
    return EARLY_START and device is not None and (9, 0) <= device.capability < (12, 0)


def supported(
    x: Tensor, weights: tuple[Tensor, ...], scales: tuple[Tensor | None, ...], vectors: tuple[Tensor | None, ...]
) -> bool:
    """Whether these kernels may serve a call: types, layouts and the device. `vectors` share the type of x."""
    device = device_of(x)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or x.numel() == 0:
        return False
    if device is None or device.capability < (8, 0):
        return False
    kind = weights[0].dtype if weights else x.dtype
    if kind == torch.float8_e4m3fn and device.capability < (8, 9):
        return False
    return (
        all(weight.dtype == kind and weight.is_contiguous() for weight in weights)
        and all((scale is not None) == (kind in EIGHT_BIT) for scale in scales)
        and (kind in EIGHT_BIT or kind == x.dtype)
        and all(vector is None or (vector.dtype == x.dtype and vector.is_contiguous()) for vector in vectors)
    )


def _dependent(x: Tensor, config: Config | None = None) -> dict[str, bool]:
    on = _starts_early(x) and (config is None or config.dependent)
    return {"DEPENDENT": on, "launch_pdl": True} if on else {"DEPENDENT": False}


def stages(config: Config, device: Device | None, size: int, programs: int) -> int:
    """As many stages of `size` bytes as leave room for all programs at once, for up to four on a multiprocessor."""
    if device is None:
        return config.stages
    together = min(4, -(-programs // device.multiprocessors))
    return max(2, min(config.stages, (device.shared // together - KEPT_SHARED) // size))


def stage_bytes(config: Config, block_m: int, block_k: int, item_bytes: int, *, gated: bool) -> int:
    """Shared memory of one stage: tiles of the weights and of x."""
    return (2 if gated else 1) * config.block_n * config.step + block_m * block_k * item_bytes


# ---- launches


def _cut(config: Config, weight: Tensor, num_rows: int) -> tuple[int, int, int]:
    """Columns per step, steps along K, and programs along K: none is left without a step, and all but the last have as many."""
    block_k = config.step // weight.element_size()
    steps = triton.cdiv(weight.shape[1], block_k)
    wanted = round(config.programs / triton.cdiv(weight.shape[0], config.block_n)) if num_rows <= MOST_ROWS else 1
    return block_k, steps, triton.cdiv(steps, triton.cdiv(steps, max(1, min(wanted, steps // 2))))


def _ahead(config: Config, x: Tensor, weight: Tensor, block_k: int, steps: int, split: int) -> int:
    """Steps that may be asked into L2: whole ones, aligned, of the shortest program, a power of two; and only on Hopper."""
    if weight.shape[1] % block_k or weight.data_ptr() % 16 or not _starts_early(x):
        return 0
    most = min(config.prefetch, steps - triton.cdiv(steps, split) * (split - 1))
    return 1 << most.bit_length() - 1 if most else 0


def _product(
    x: Tensor, weight: Tensor, config: Config, *, other: Tensor | None = None, scale: Tensor | None = None,
    other_scale: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] through `stream`, and `reduce` if K is split."""
    num_rows, inner = x.shape
    width = weight.shape[0]
    block_m = row_class(num_rows)
    block_k, steps, split = _cut(config, weight, num_rows)
    ahead = _ahead(config, x, weight, block_k, steps, split)
    grid = (triton.cdiv(num_rows, block_m), triton.cdiv(width, config.block_n), split)
    size = stage_bytes(config, block_m, block_k, x.element_size(), gated=other is not None)
    num_stages = stages(config, device_of(x), size, grid[0] * grid[1] * grid[2])
    out = x.new_empty(num_rows, width)
    sums = out if split == 1 else x.new_empty(split, num_rows, width, dtype=torch.float32)
    end = (scale, bias, residual)
    streaming.stream[grid](
        x, weight, other, scale if split == 1 else None, other_scale, *(end[1:] if split == 1 else (None, None)),
        sums, num_rows, width, steps,
        K=inner, BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=block_k, SPLIT=split,
        PREFETCH=ahead, SPREAD=config.spread,
        num_warps=config.warps, num_stages=num_stages, **_dependent(x, config),
    )  # fmt: skip
    if split > 1:
        streaming.reduce[(num_rows, triton.cdiv(width, REDUCED))](
            sums, *end, out, num_rows, width, SPLIT=split, BLOCK=REDUCED, num_warps=4, **_dependent(x, config)
        )
    return out


def _streams(x: Tensor, weight: Tensor, config: Config | None) -> bool:
    """Few rows, or 8-bit weights, which cuBLAS does not take beside 16-bit rows, or whoever names a configuration."""
    return x.shape[0] <= FEW_ROWS or weight.dtype in EIGHT_BIT or config is not None


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    rows = x.contiguous()
    out = torch.empty_like(rows)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    streaming.norm[(rows.numel() // width,)](
        rows, gain, out, eps, K=width, BLOCK=block, num_warps=min(8, max(1, block // 256)), **_dependent(x)
    )
    return out


def linear(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None, config: Config | None = None
) -> Tensor:
    rows = _flat(x)
    if not _streams(rows, weight, config):
        return F.linear(x, weight, bias)
    chosen = config or choose(rows.shape[0], weight)
    return _product(rows, weight, chosen, scale=scale, bias=bias).view(*x.shape[:-1], -1)


def norm_linear(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    return linear(rms_norm(x, gain, eps), weight, scale, bias, config)


def norm_gate(
    x: Tensor, gain: Tensor, eps: float, w1: Tensor, w3: Tensor, scale1: Tensor | None = None, scale3: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    rows = rms_norm(_flat(x), gain, eps)
    if not _streams(rows, w1, config):
        return gate(F.linear(rows, w1), F.linear(rows, w3)).view(*x.shape[:-1], -1)
    chosen = config or choose(rows.shape[0], w1, gated=True)
    out = _product(rows, w1, chosen._replace(programs=1), other=w3, scale=scale1, other_scale=scale3)
    return out.view(*x.shape[:-1], -1)


def gate(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b of contiguous tensors of one shape."""
    out = torch.empty_like(a)
    streaming.gate[(triton.cdiv(a.numel(), 1024),)](a, b, out, a.numel(), BLOCK=1024, num_warps=4, **_dependent(a))
    return out


def linear_add(
    y: Tensor, weight: Tensor, residual: Tensor, scale: Tensor | None = None, bias: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    rows = _flat(y)
    if not _streams(rows, weight, config):
        return residual + F.linear(y, weight, bias)
    chosen = config or choose(rows.shape[0], weight)
    out = _product(rows, weight, chosen, scale=scale, bias=bias, residual=_flat(residual))
    return out.view(*y.shape[:-1], -1)
