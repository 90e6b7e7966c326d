"""Compiles kernels for an H200 on any machine: no GPU is asked, and nothing is launched.

What Triton, its assembler or the card's shared memory would refuse shows here, and Triton's cache is filled for the run that
times.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SHARED_BYTES = 227 * 1024
CAPABILITY, MULTIPROCESSORS = (9, 0), 132


class Card:
    """What Triton asks of a driver before it compiles, answered for an H200."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, which hold what did not fit in registers."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _record_instead_of_launching() -> list[Any]:
    """Every launch of a Triton function compiles it, appends it here, and returns."""
    import triton
    from triton.runtime.jit import JITFunction

    from duetts.kernels import projection

    triton.runtime.driver.set_active(Card())
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        compiled.append((self.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    card = projection.Device(CAPABILITY, MULTIPROCESSORS, 228 * 1024)
    projection.device_of = lambda x: card
    return compiled


def _todo(
    arguments: argparse.Namespace, dtype: str, wanted: dict[str, list[str]] | None
) -> list[tuple[str, Callable[[int], Any]]]:
    """All cases, and all variants if a sweep is meant; or of each case in `wanted` the neighbours with these labels."""
    import torch
    from benchmarks.kernel_case import Setup
    from benchmarks.kernels import cases_of

    todo: list[tuple[str, Callable[[int], Any]]] = []
    for case in cases_of(arguments, Setup(torch.device("meta"), getattr(torch, dtype), tuple(arguments.rows))):
        if wanted is None:
            todo += [
                (case.name, case.run),
                *((f"{case.name} {label}", run) for label, run in case.variants.items() if arguments.sweep),
            ]
        else:
            for label in wanted.get(case.name, []):
                run = case.neighbours(label).get(label)  # a card without memory offers fewer
                todo += [(f"{case.name} {label}", run)] if run else []
    return todo


def _share(
    arguments: argparse.Namespace, dtype: str, wanted: dict[str, list[str]] | None, worker: int, workers: int
) -> list[dict[str, Any]]:
    """Compiles every `workers`-th case or variant, on tensors without memory."""
    import torch

    torch.set_num_threads(1)
    compiled = _record_instead_of_launching()
    todo = _todo(arguments, dtype, wanted)
    rows: dict[str, dict[str, Any]] = {}
    for name, run in todo[worker::workers]:
        compiled.clear()
        try:
            with torch.inference_mode():
                run(0)
        except Exception as failure:  # the others are still of interest
            rows[name] = {"case": name, "failed": f"{type(failure).__name__}: {failure}"[:300]}
        for function, kernel in compiled:
            if kernel.hash not in rows:
                registers, stack = resources(kernel.asm["cubin"])
                rows[kernel.hash] = {"case": name, "function": function, "registers": registers, "stack": stack,
                                     "shared": kernel.metadata.shared}  # fmt: skip
    return list(rows.values())


def compile_all(arguments: argparse.Namespace, dtype: str, wanted: dict[str, list[str]] | None = None) -> int:
    """Prints what is unusual; returns 1 if something cannot run on the card."""
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        shares = pool.map(_share, *zip(*((arguments, dtype, wanted, index, workers) for index in range(workers)), strict=True))
        rows = [row for share in shares for row in share]
    bad = [row for row in rows if "failed" in row or row["shared"] > SHARED_BYTES]
    for row in rows:
        if row in bad or row["stack"] > 0:
            print(row)
    fine = [row for row in rows if "failed" not in row]
    registers, shared = (max((row[what] for row in fine), default=0) for what in ("registers", "shared"))
    spilling = sum(row["stack"] > 0 for row in fine)
    print(f"{len(fine)} programs compiled, {len(bad)} cannot run, {spilling} spill")
    print(f"most registers {registers}, most shared memory {shared}")
    return 1 if bad or not fine else 0
