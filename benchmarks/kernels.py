"""Times every kernel of duetts beside torch and writes JSON.

    python -m benchmarks.kernels [--ops layer gate ...] [--rows 1 8 16 ...] [--eight-bit fp8 int8] [--output FILE]
    python -m benchmarks.kernels --sweep OP [--rows 16] [--limit-s 300]   tries configurations, prints the best of each shape
    python -m benchmarks.kernels --compile [--sweep OP]                   compiles all for an H200, with or without a GPU
    python -m benchmarks.kernels --dry-run [--sweep OP]                   tiny shapes in Triton's interpreter, nothing timed

Each row of the table: the operation, its use in the model, rows (M), microseconds, gigabytes a second that this comes to,
the share of 4.3 TB/s, microseconds of the same in plain torch, and the relative error against the twin. `--compile` fills
Triton's cache with all processors at once: say it before a sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.kernel_case import Case, Setup

ROWS = (1, 8, 16, 32, 64, 128, 256)
RESULTS = Path(__file__).parent / "results" / "kernels.json"


def operations() -> dict[str, Callable[..., Iterator[Case]]]:
    """Name -> the function that yields its cases. Imported late: the interpreter is chosen before Triton is loaded."""
    from benchmarks import kernel_attention, kernel_products

    return {
        "layer": kernel_products.layers,
        "gate": kernel_products.gates,
        "product": kernel_products.products,
        "norm": kernel_products.norms,
        "decode": kernel_attention.decodes,
        "prefill": kernel_attention.prefills,
        "frame": kernel_attention.frames,
        "draw": kernel_attention.draws,
    }


def cases_of(arguments: argparse.Namespace, setup: Setup) -> Iterator[Case]:
    for name, cases in operations().items():
        if name not in ([arguments.sweep] if arguments.sweep else arguments.ops or operations()):
            continue
        yield from cases(setup)
        if name in ("layer", "gate", "product"):
            for kind in arguments.eight_bit:
                yield from cases(setup, kind)


def table_row(case: Case) -> dict[str, Any]:
    """Measures a case; the error comes first, so that nothing wrong is timed."""
    from benchmarks.kernel_case import BANDWIDTH, error_of, time_us

    row: dict[str, Any] = {"op": case.op, "shape": case.shape, "rows": case.rows, "bytes": case.num_bytes}
    row["error"] = error_of(case, case.run)
    if row["error"] > case.tolerance:
        return {**row, "failed": "error above tolerance"}
    row["us"] = time_us(case.run, case.sets)
    row["gb_s"] = case.num_bytes / row["us"] / 1e3
    row["share"] = case.num_bytes / (row["us"] * 1e-6) / BANDWIDTH
    row["torch_us"] = None if "8" in case.shape else time_us(case.torch or case.twin, case.sets)
    return row


def show(row: dict[str, Any]) -> None:
    name = f"{row['op']:<12} {row['shape']:<14} {row['rows']:>4}"
    if "us" not in row:
        print(f"{name}  error {row['error']:.1e}  {row.get('failed', '')}", flush=True)
        return
    torch_us = f"{row['torch_us']:8.2f}" if row["torch_us"] else "       -"
    speed = f"{row['us']:8.2f} us {row['gb_s']:7.0f} GB/s {row['share']:6.1%}"
    print(f"{name} {speed}  torch {torch_us} us  error {row['error']:.1e}", flush=True)


def attempt(case: Case, runs: dict[str, Callable[[int], Any]], found: dict[str, dict[str, Any]], deadline: float) -> None:
    """Times what is not in `found` yet, and puts it there, as long as there is time."""
    from benchmarks.kernel_case import error_of, time_us

    for name, run in runs.items():
        if name in found or time.monotonic() > deadline:
            continue
        try:
            error = error_of(case, run)
            us = time_us(run, case.sets, repeats=7) if error <= case.tolerance else None
            found[name] = {"config": name, "us": us, "error": error}
        except Exception as failure:  # a sweep goes on: what does not compile or fit is a result too
            found[name] = {"config": name, "us": None, "failed": f"{type(failure).__name__}: {failure}"[:200]}


def fastest(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    timed = [row for row in found.values() if row["us"] is not None]
    return sorted(timed, key=lambda row: row["us"]) + [row for row in found.values() if row["us"] is None]


def sweep(arguments: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """The variants of every case; then, compiled all at once, the neighbours of each case's best, and those of the new best."""
    from benchmarks.kernel_case import time_us
    from benchmarks.kernel_compile import compile_all

    todo = [case for case in cases_of(arguments, setup) if case.variants]
    found: list[dict[str, dict[str, Any]]] = [{} for _ in todo]
    runs = [case.variants for case in todo]
    for part in (0.5, 0.25, 0.25):  # of the time
        if part < 0.5:
            runs = [near_best(case, results) for case, results in zip(todo, found, strict=True)]
            compile_all(arguments, arguments.dtype, {case.name: list(near) for case, near in zip(todo, runs, strict=True)})
        begin = time.monotonic()
        for index, case in enumerate(todo):
            attempt(case, runs[index], found[index], begin + part * arguments.limit_s * (index + 1) / len(todo))
    rows = []
    for case, results in zip(todo, found, strict=True):
        row = {"op": case.op, "shape": case.shape, "rows": case.rows, "bytes": case.num_bytes, "tried": fastest(results)}
        rows.append({**row, "now_us": time_us(case.run, case.sets, repeats=7)})
        show_best(case, rows[-1])
    return rows


def near_best(case: Case, results: dict[str, dict[str, Any]]) -> dict[str, Callable[[int], Any]]:
    """What has not been timed yet of the best one's neighbours."""
    best = fastest(results)[:1]
    if not best or best[0]["us"] is None:
        return {}
    return {name: run for name, run in case.neighbours(best[0]["config"]).items() if name not in results}


def show_best(case: Case, found: dict[str, Any]) -> None:
    from benchmarks.kernel_case import BANDWIDTH

    tried = found["tried"]
    print(f"{case.name}: {sum(row['us'] is not None for row in tried)} of {len(tried)} timed; now {found['now_us']:.2f} us")
    for row in tried[:4]:
        if row["us"] is not None:
            print(
                f"    {row['us']:8.2f} us {case.num_bytes / (row['us'] * 1e-6) / BANDWIDTH:6.1%}  {row['config']}", flush=True
            )


def dry_run(arguments: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """Every case once, and a few of its variants: what runs here does not fail for a silly reason on a GPU."""
    from benchmarks.kernel_case import error_of

    rows = []
    for case in cases_of(arguments, setup):
        runs = [case.run, *list(case.variants.values())[:: max(1, len(case.variants) // 3)]] if arguments.sweep else [case.run]
        row = {"op": case.op, "shape": case.shape, "rows": case.rows, "error": max(error_of(case, run) for run in runs)}
        if row["error"] > case.tolerance:
            row["failed"] = "error above tolerance"
        rows.append(row)
        show(row)
    return rows


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--eight-bit", nargs="*", default=["fp8"], choices=["fp8", "int8"])
    parser.add_argument("--sweep", metavar="OP")
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--output", type=Path, default=None)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from benchmarks.kernel_case import Setup

    unknown = {*(arguments.ops or ()), *([arguments.sweep] if arguments.sweep else ())} - set(operations())
    if unknown:
        print(f"no operation is called {', '.join(sorted(unknown))}; there are {', '.join(operations())}", file=sys.stderr)
        return 2
    dtype = getattr(torch, arguments.dtype)
    if arguments.compile:
        from benchmarks.kernel_compile import compile_all

        return compile_all(arguments, arguments.dtype)
    if arguments.dry_run:
        setup = Setup(torch.device("cpu"), torch.float32, tuple(arguments.rows), tiny=True)
    else:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        setup = Setup(torch.device("cuda"), dtype, tuple(arguments.rows))
    with torch.inference_mode():
        if arguments.dry_run:
            rows = dry_run(arguments, setup)
        elif arguments.sweep:
            rows = sweep(arguments, setup)
        else:
            rows = []
            for case in cases_of(arguments, setup):
                rows.append(table_row(case))
                show(rows[-1])
    write(arguments, rows)
    return 1 if any("failed" in row for row in rows) else 0


def write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    import torch
    import triton

    if arguments.dry_run and arguments.output is None:
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, interpreter"
    about = {"device": device, "torch": torch.__version__, "triton": triton.__version__, "dtype": arguments.dtype}
    output = arguments.output or RESULTS
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**about, "sweep": arguments.sweep, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {output}")


if __name__ == "__main__":
    sys.exit(main())
