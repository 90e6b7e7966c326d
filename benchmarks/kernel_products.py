"""Cases of kernels/projection.py at S2 Pro's shapes, and the configurations that its sweep tries, with their arithmetic.

What a configuration must do on an H200 (132 multiprocessors of 228 KB shared memory, 4.3 TB/s, L2 of about 6 TB/s):

1. Bytes in flight. Memory answers in about 0.9 us under load, so 4.3e12 x 0.9e-6 = 3.9 MB must be on their way at any time,
   30 KB a multiprocessor; 64 KB (8.4 MB) leaves a margin. A program has (stages - 1) tiles of block_n x step bytes under way.
2. One wave. All programs run at once and have equal work; then memory is shared evenly and all end together, wherever they sit.
   133 programs of which one waits would take twice the time. So programs <= 132 x floor(228 KB / shared memory of one), which
   `projection.stages` sees to by lowering the stages:
       gate   152 programs of 2 x 64 rows: 2 a multiprocessor, 110 KB each: 5 stages of 20 KB (step 128), 9.7 MB in flight
       qkv     96 programs of 64 rows: 1 a multiprocessor: 6 stages of 24 KB, 7.9 MB; or 192 of 32 rows (no warpgroup unit)
       wo, w2  40 tiles of 64 rows: K in 3 parts, 120 programs, 6 stages of 20 KB, 9.8 MB; or in 4, 160 programs, 2 at once
       head    65 tiles (4,097 rows): K in 2 parts, 130 programs
       fast head  16 tiles: K in 7 parts, 112 programs of 3 steps, all 5.2 MB in flight at once
3. x costs L2 bandwidth: every tile of block_n rows reads all of x, tiles x M x K x 2 bytes. qkv,
   tiles of 64 rows: M = 16: 7.9 MB beside 31.5 MB of weights, fine; M = 64: 31.5 MB, together 63 MB = 10.5 us at 6 TB/s, more
   than the 7.3 us from memory. So tiles of 128 rows are tried for 32 and 64 rows.
4. Parts of K cost 4 bytes x parts x M x N written and read (M = 16, wo, 3 parts: 1 MB) and one more kernel, about 1 us.
5. Rows of a tile lie 5 to 19 KB apart; a step of 256 bytes is two lines of memory of each, 128 one, 512 four.
6. 8-bit weights halve the bytes; the same step in bytes holds twice the columns, so tiles of x double. 4.3 TB/s are 18.6
   weights a cycle and multiprocessor. With two warps on a tile of 64 rows x 128 columns each thread spends 429 instructions
   (read off the assembly of fp8 to bf16; int8 432): 2 x 429 / 8192 x 18.6 = 1.95 instructions a cycle of at most 4, so it
   takes 8 or more warps a multiprocessor to hide their latencies: 300 to 560 programs of 2 warps. The warpgroup instruction
   (4 warps, 470 instructions for 64 x 256; int8 695) needs 2.1 (3.2), and Triton 3.6 waits for each of them, 16 times a
   step.
7. From 65 rows on the matrix unit counts too: gate at 128 rows is 12.7 GFLOP, 21 us at 600 TFLOP/s, beside 23 us of weights.
   cuBLAS needs about 34 us; whether 128 rows in one tile beat it, a sweep with --rows 128 tells (`projection.FEW_ROWS`).
8. Overlap: what is asked into L2 before the wait for the input is limited by L2 (50 MB) and by the bandwidth that the kernel
   before leaves: 8 steps of 256 bytes x 64 rows x 120 programs = 15.7 MB, 3.7 us.

A sweep times the tiles first, then changes one other field at a time of the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.kernel_case import Case, Setup
from torch import Tensor

from duetts.kernels import projection, reference
from duetts.kernels.projection import Config

EPS = 1e-6
Quantised = tuple[Tensor, Tensor | None]

# use -> rows of the weight (N), columns (K)
SHAPES = {"qkv": (6144, 2560), "wo": (2560, 4096), "w2": (2560, 9728), "head": (4097, 2560), "fast head": (1024, 2560)}
GATE = (9728, 2560)


def _weights(setup: Setup, width: int, inner: int, eight_bit: str | None) -> Quantised:
    if setup.device.type == "meta" and eight_bit:
        kind = torch.int8 if eight_bit == "int8" else torch.float8_e4m3fn
        return setup.draw(width, inner, dtype=kind), setup.draw(width, dtype=torch.float32)
    weight = setup.draw(width, inner, std=inner**-0.5)
    return reference.quantize_rows(weight, "int8" if eight_bit == "int8" else "fp8") if eight_bit else (weight, None)


def _size(setup: Setup, width: int, inner: int) -> tuple[int, int]:
    return (width // 64 + 3, inner // 40) if setup.tiny else (width, inner)


# block_n, step, programs, warps, stages; stages are lowered where not all programs would fit at once. Two warps, and tiles
# under 64 rows, take the older matrix instruction, whose operand passes through registers.
GATE_TILES = [
    (64, 128, 1, 4, 5), (64, 128, 1, 4, 4), (64, 256, 1, 4, 3), (64, 64, 1, 4, 10), (128, 128, 1, 8, 6), (128, 128, 1, 8, 4),
    (128, 256, 1, 8, 3), (32, 128, 1, 4, 6), (32, 256, 1, 4, 3), (32, 128, 1, 2, 6), (32, 256, 1, 2, 3),
]  # fmt: skip
WIDE_TILES = [
    (64, 256, 1, 4, 4), (64, 256, 1, 4, 6), (64, 256, 1, 4, 8), (64, 512, 1, 4, 3), (64, 512, 1, 4, 4), (64, 128, 1, 4, 12),
    (64, 256, 190, 4, 4), (64, 128, 190, 4, 8), (32, 256, 1, 4, 6), (32, 256, 1, 2, 6), (32, 512, 1, 2, 4), (32, 128, 1, 2, 10),
    (128, 256, 1, 8, 6), (128, 256, 130, 8, 4), (128, 128, 130, 8, 8), (128, 256, 96, 8, 3), (128, 128, 96, 8, 6),
]  # fmt: skip
NARROW_TILES = [
    *((64, 256, programs, 4, stages) for programs in (120, 160, 240) for stages in (4, 6, 8)),
    (64, 128, 120, 4, 12), (64, 128, 160, 4, 8), (64, 512, 120, 4, 4), (32, 256, 160, 4, 6), (32, 256, 160, 2, 6),
    (32, 512, 1, 2, 6), (32, 256, 1, 4, 12), (16, 512, 1, 2, 6), (16, 1024, 1, 2, 3), (128, 256, 120, 8, 4),
    (128, 128, 120, 8, 8),
]  # fmt: skip
EIGHT_BIT_GATE_TILES = [
    (32, 128, 1, 2, 6), (32, 128, 1, 4, 6), (32, 256, 1, 2, 4), (16, 128, 1, 1, 8), (16, 256, 1, 1, 4), (16, 256, 1, 2, 4),
    (64, 128, 1, 2, 5), (64, 128, 1, 4, 5), (64, 64, 1, 4, 8), (128, 128, 1, 8, 3), (128, 64, 1, 8, 6),
]  # fmt: skip
EIGHT_BIT_TILES = [
    *((32, 128, programs, 2, 8) for programs in (190, 384, 560)), (32, 256, 384, 2, 4), (32, 128, 384, 4, 8),
    (16, 256, 384, 1, 6), (16, 128, 560, 1, 8), *((64, 128, programs, 4, 6) for programs in (120, 190, 260, 384)),
    (64, 128, 260, 2, 6), (64, 256, 190, 4, 4), (128, 128, 130, 8, 6), (128, 128, 260, 8, 4),
]  # fmt: skip


def _configs(rows: int, use: str, eight_bit: str | None) -> Iterator[Config]:
    """Tiles only; the other fields are as one would guess, and `neighbours` changes them."""
    if eight_bit:
        tiles = EIGHT_BIT_GATE_TILES if use == "gate" else EIGHT_BIT_TILES
    else:
        tiles = {"gate": GATE_TILES, "qkv": WIDE_TILES}.get(use, NARROW_TILES)
    for tile in tiles:
        if rows <= 16 or tile[0] >= 64:  # x is read once per tile: too often for narrow ones
            yield Config(*tile, prefetch=8)


def neighbours(config: Config) -> Iterator[Config]:
    """Changes of one field that a tile does not decide."""
    for prefetch in (0, 2, 4, 16):
        yield config._replace(prefetch=prefetch)
    yield config._replace(dependent=False, prefetch=0)
    yield config._replace(spread=not config.spread)
    yield config._replace(warps=config.warps * 2)


def label(config: Config) -> str:
    return " ".join(f"{name}={int(value)}" for name, value in config._asdict().items())


def _config(text: str) -> Config:
    """The configuration of a label."""
    values = [int(word.split("=")[1]) for word in text.split()]
    return Config(*values[:6], *map(bool, values[6:]))


def _labelled(configs: Iterator[Config], run: Callable[..., Any]) -> dict[str, Callable[[int], Any]]:
    return {label(config): partial(run, config=config) for config in configs}


def _case(
    setup: Setup, use: str, rows: int, eight_bit: str | None, run: Callable[..., Any], twin: Callable[[int], Any],
    torch_run: Callable[[int], Any], num_bytes: int, sets: int, configs: Iterator[Config],
) -> Case:  # fmt: skip
    return Case(
        use.split(":")[0], use.split(":")[1] + (f" {eight_bit}" if eight_bit else ""), rows, num_bytes, sets, run, twin,
        torch=None if eight_bit else torch_run, tolerance=1e-5 if setup.dtype == torch.float32 else 1e-2,
        variants=_labelled(configs, run), neighbours=lambda text: _labelled(neighbours(_config(text)), run),
    )  # fmt: skip


def gates(setup: Setup, eight_bit: str | None = None) -> Iterator[Case]:
    """norm_gate: both weights of the MLP's first half."""
    width, inner = _size(setup, *GATE)
    bytes_once = 2 * width * inner * (1 if eight_bit else setup.dtype.itemsize)
    sets = setup.num_sets(bytes_once)
    pairs = [(_weights(setup, width, inner, eight_bit), _weights(setup, width, inner, eight_bit)) for _ in range(sets)]
    gain = setup.draw(inner)
    for rows in setup.rows:
        x = setup.draw(rows, inner)

        def call(module: Any, index: int, x: Tensor = x, **config: Any) -> Tensor:
            (w1, s1), (w3, s3) = pairs[index]
            result: Tensor = module.norm_gate(x, gain, EPS, w1, w3, s1, s3, **config)
            return result

        num_bytes = bytes_once + (x.numel() + rows * width) * setup.dtype.itemsize
        twin = partial(call, reference)
        yield _case(setup, "norm_gate:w1 w3", rows, eight_bit, partial(call, projection), twin, twin, num_bytes, sets,
                    _configs(rows, "gate", eight_bit))  # fmt: skip


def products(setup: Setup, eight_bit: str | None = None) -> Iterator[Case]:
    """norm_linear for qkv, linear_add for wo and w2, linear for the heads."""
    for use, shape in SHAPES.items():
        width, inner = _size(setup, *shape)
        bytes_once = width * inner * (1 if eight_bit else setup.dtype.itemsize)
        sets = setup.num_sets(bytes_once)
        weights = [_weights(setup, width, inner, eight_bit) for _ in range(sets)]
        gain = setup.draw(inner)
        for rows in setup.rows:
            x, residual = setup.draw(rows, inner), setup.draw(rows, width)
            operands = (weights, gain, x, residual)
            op = "norm_linear" if use == "qkv" else "linear" if "head" in use else "linear_add"
            num_bytes = bytes_once + (x.numel() + rows * width * (2 if op == "linear_add" else 1)) * setup.dtype.itemsize
            run, twin = (partial(_product, module, op, *operands) for module in (projection, reference))
            yield _case(setup, f"{op}:{use}", rows, eight_bit, run, twin, twin, num_bytes, sets,
                        _configs(rows, use, eight_bit))  # fmt: skip


def _product(
    module: Any, op: str, weights: list[Quantised], gain: Tensor, x: Tensor, residual: Tensor, index: int, **config: Any
) -> Tensor:
    weight, scale = weights[index]
    if op == "norm_linear":
        result: Tensor = module.norm_linear(x, gain, EPS, weight, scale, **config)
    elif op == "linear_add":
        result = module.linear_add(x, weight, residual, scale, **config)
    else:
        result = module.linear(x, weight, scale, **config)
    return result


def layers(setup: Setup, eight_bit: str | None = None) -> Iterator[Case]:
    """A decoder layer without its attention, for whose result something else stands: four products and their 202 MB."""
    shapes = {use: _size(setup, *SHAPES[use]) for use in ("qkv", "wo", "w2")}
    inner = shapes["qkv"][1]
    shapes = {"qkv": (inner * 2 + 6, inner), "wo": (inner, inner + 2), "w2": (inner, inner * 3)} if setup.tiny else shapes
    shapes["w1"] = shapes["w3"] = (shapes["w2"][1], inner)
    bytes_once = sum(width * k for width, k in shapes.values()) * (1 if eight_bit else setup.dtype.itemsize)
    sets = setup.num_sets(bytes_once)
    weights = [{use: _weights(setup, *shape, eight_bit) for use, shape in shapes.items()} for _ in range(sets)]
    gain = setup.draw(inner)
    for rows in setup.rows:
        x, heads = setup.draw(rows, inner), setup.draw(rows, shapes["wo"][1])

        def call(module: Any, index: int, x: Tensor = x, heads: Tensor = heads) -> tuple[Tensor, Tensor]:
            (qkv, wo, w2, w1, w3) = (weights[index][use] for use in ("qkv", "wo", "w2", "w1", "w3"))
            queries = module.norm_linear(x, gain, EPS, *qkv)
            middle = module.linear_add(heads, wo[0], x, wo[1])
            gated = module.norm_gate(middle, gain, EPS, w1[0], w3[0], w1[1], w3[1])
            return queries, module.linear_add(gated, w2[0], middle, w2[1])

        twin = partial(call, reference)
        yield _case(setup, "layer:products", rows, eight_bit, partial(call, projection), twin, twin, bytes_once, sets, iter(()))


def norms(setup: Setup) -> Iterator[Case]:
    """rms_norm alone, as it stands before cuBLAS's products; latency, not bandwidth."""
    inner = 100 if setup.tiny else 2560
    gain = setup.draw(inner)
    for rows in setup.rows:
        x = setup.draw(rows, inner)
        run = partial(_norm, projection, x, gain)
        twin = partial(_norm, reference, x, gain)
        yield Case("rms_norm", "dim", rows, 2 * x.numel() * setup.dtype.itemsize, 1, run, twin)


def _norm(module: Any, x: Tensor, gain: Tensor, index: int) -> Tensor:
    result: Tensor = module.rms_norm(x, gain, EPS)
    return result
