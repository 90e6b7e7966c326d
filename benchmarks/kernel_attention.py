"""Cases of kernels/attention.py and kernels/frame.py at S2 Pro's shapes, and what the sweep of decode attention tries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.kernel_case import Case, Setup
from torch import Tensor

from duetts.kernels import attention, frame, reference, rotation

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
CONTEXTS = (500, 2000)
LONGEST = 8192  # positions that a page table has room for
EPS = 1e-6
TILES = [(programs, tile, stages) for programs in (0, 1, 2, 4, 8, 16, 32) for tile in (32, 64, 128) for stages in (3, 5, 7)]


def _sizes(setup: Setup) -> tuple[int, int, int]:
    return (4, 2, 16) if setup.tiny else (HEADS, KV_HEADS, DIM)


def _new(setup: Setup, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a model has them: parts of one tensor."""
    heads, kv_heads, dim = _sizes(setup)
    together = setup.draw(*shape, heads + 2 * kv_heads, dim)
    return together[..., :heads, :], together[..., heads:-kv_heads, :], together[..., -kv_heads:, :]


def _tolerance(setup: Setup) -> float:
    return 1e-5 if setup.dtype == torch.float32 else 2e-2


def _pages(setup: Setup, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and tables of rows that have `length` positions each; pages of a row are not neighbours."""
    _, kv_heads, dim = _sizes(setup)
    width = -(-(length + 1) // PAGE)
    shape = (rows * width + 1, kv_heads, PAGE, dim)
    longest = width + 2 if setup.tiny else LONGEST // PAGE
    tables = torch.full((rows, longest), rows * width, dtype=torch.int32, device=setup.device)
    tables[:, :width] = torch.arange(rows * width, device=setup.device).view(width, rows).T
    return setup.draw(*shape), setup.draw(*shape), tables


def decodes(setup: Setup) -> Iterator[Case]:
    """One layer's attention of a frame, every row at the same position."""
    for context in (40,) if setup.tiny else CONTEXTS:
        for rows in setup.rows:
            yield _decode(setup, context, rows)


def _decode(setup: Setup, context: int, rows: int) -> Case:
    heads, kv_heads, dim = _sizes(setup)
    item = setup.dtype.itemsize
    num_bytes = rows * (2 * (context + 1) * kv_heads + 2 * heads) * dim * item
    sets = setup.num_sets(num_bytes)
    new = _new(setup, rows)
    memory = [_pages(setup, rows, context) for _ in range(sets)]
    slots = torch.arange(rows, device=setup.device)
    positions = torch.full((rows,), context, device=setup.device)
    needed = -(-(context + 1) // PAGE)

    def run(index: int, **options: int) -> Tensor:
        keys, values, tables = memory[index]
        return attention.decode_attention(*new, keys, values, tables, slots, positions, **options)

    def twin(index: int) -> Tensor:
        keys, values, tables = memory[index]
        return reference.decode_attention(*new, keys, values, tables[:, :needed], slots, positions)

    variants = {
        f"programs={programs} tile={tile} stages={stages}": partial(run, programs=programs, tile=tile, stages=stages)
        for programs, tile, stages in TILES
        if programs in (0, 1) or programs * rows * kv_heads <= 4096
    }
    for programs in (4, 8, 16, 32, 64):
        variants[f"programs={programs} joined"] = partial(run, programs=programs, joined=True)
    return Case(
        "decode", f"c={context}", rows, num_bytes, sets, run, twin, tolerance=_tolerance(setup), variants=variants
    )  # fmt: skip


def prefills(setup: Setup) -> Iterator[Case]:
    """One layer's attention of a block of a prompt; rows are its positions."""
    heads, kv_heads, dim = _sizes(setup)
    for n, begin in ((5, 20),) if setup.tiny else ((32, 0), (256, 0), (512, 0), (512, 2000)):
        keys, values, tables = _pages(setup, 1, begin + n)
        new = _new(setup, n)
        start = torch.full((1,), begin, device=setup.device)
        needed = -(-(begin + n) // PAGE)
        num_bytes = (2 * (begin + n) * kv_heads + 2 * n * heads) * dim * setup.dtype.itemsize
        run = partial(_ignore, attention.prefill_attention, *new, keys, values, tables[0], start)
        twin = partial(_ignore, reference.prefill_attention, *new, keys, values, tables[0, :needed], start)
        yield Case("prefill", f"start={begin}", n, num_bytes, 1, run, twin, tolerance=_tolerance(setup))


def frames(setup: Setup) -> Iterator[Case]:
    """One layer's attention inside a frame, and the rotation before both decoders' attention; inputs are hot, as in a frame."""
    heads, kv_heads, dim = _sizes(setup)
    item = setup.dtype.itemsize
    for rows in setup.rows:
        keys, values = (setup.draw(rows, kv_heads, 11, dim) for _ in range(2))
        for start, n in ((0, 2), (9, 1)):
            new = _new(setup, rows, n)
            num_bytes = rows * (2 * (start + n) * kv_heads + 2 * n * heads) * dim * item
            run, twin = (partial(_ignore, room.frame_attention, *new, keys, values, start) for room in (attention, reference))
            yield Case("frame", f"start={start}", rows, num_bytes, 1, run, twin, tolerance=_tolerance(setup))
        qkv, gains = setup.draw(rows, 1, (heads + 2 * kv_heads) * dim), (setup.draw(dim), setup.draw(dim))
        rope = setup.draw(rows, 1, dim // 2, 2, dtype=torch.float32)
        run, twin = (
            partial(_ignore, room.norm_rotate, qkv, heads, kv_heads, *gains, EPS, rope) for room in (rotation, reference)
        )
        num_bytes = rows * 2 * (heads + kv_heads) * dim * item
        yield Case("rotate", "q k", rows, num_bytes, 1, run, twin, tolerance=_tolerance(setup))


def draws(setup: Setup) -> Iterator[Case]:
    """Embedding and draws. Chosen ids are not compared here, as sums that round otherwise may move a cut: tests do that."""
    choices, width, dim, codebooks = (70, 65, 40, 3) if setup.tiny else (4097, 1024, 2560, 10)
    size = 9 if setup.tiny else 4096
    embeddings, codes = setup.draw(2 * size, dim), setup.draw(codebooks * size, dim)
    for rows in setup.rows:
        logits = setup.draw(rows, choices, std=2.0)
        values = _sampling(setup, rows)
        recent, penalty = torch.full((rows, 16), -1, device=setup.device), torch.ones(rows, device=setup.device)
        item = setup.dtype.itemsize
        runs = [
            partial(_ignore, room.sample_main, logits, recent, *values, penalty, choices - 1) for room in (frame, reference)
        ]
        yield Case("main", f"{choices}", rows, rows * choices * item, 1, *runs, tolerance=float("inf"))
        runs = [partial(_ignore, room.sample_residual, 1, logits[:, :width], *values) for room in (frame, reference)]
        yield Case("residual", f"{width}", rows, rows * width * item, 1, *runs, tolerance=float("inf"))
        columns = torch.full((rows, 1 + codebooks), size - 1, device=setup.device)
        runs = [partial(_ignore, room.embed_frame, columns, embeddings, codes, 0, 2 * size, 3.3) for room in (frame, reference)]
        num_bytes = rows * (codebooks + 2) * dim * item
        yield Case("embed", "dim", rows, num_bytes, 1, *runs, tolerance=_tolerance(setup))


def _sampling(setup: Setup, rows: int) -> tuple[Tensor, ...]:
    """Frames, seeds, temperatures, top-p and top-k as requests have them by default."""
    numbers = torch.arange(rows, device=setup.device)
    like = partial(torch.full, (rows,), device=setup.device)
    return numbers, numbers * 12345, like(0.8), like(0.8), like(30, dtype=torch.int64)


def _ignore(function: Any, *arguments: Any) -> Any:
    """A call that has one set of inputs, whose index comes last."""
    return function(*arguments[:-1])
