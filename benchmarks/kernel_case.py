"""One measurement of one kernel: what it runs, against what, and how both are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BANDWIDTH = 4.3e12  # bytes a second of a copy on an H200, read and written
COLD_BYTES = 480e6  # input sets of one case exceed this together, several times any L2, so that weights come from memory


@dataclass(frozen=True)
class Setup:
    """Where and how large. `tiny` is for a CPU, where Triton's interpreter takes seconds for microseconds of a GPU."""

    device: torch.device
    dtype: torch.dtype
    rows: tuple[int, ...]
    tiny: bool = False

    def draw(self, *shape: int, dtype: torch.dtype | None = None, std: float = 1.0) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(*shape, device=self.device, dtype=dtype or self.dtype)
        return torch.empty(*shape, device=self.device).normal_(std=std).to(dtype or self.dtype)

    def num_sets(self, set_bytes: int) -> int:
        """How many sets of inputs to go through in turn; one where nothing is timed."""
        return max(1, -(-int(COLD_BYTES) // set_bytes)) if self.device.type == "cuda" else 1


@dataclass(frozen=True)
class Case:
    """`run` and `twin` take the index of an input set. `num_bytes` is what must move through memory at least.

    `torch` is what is timed beside it (None: the twin). `variants` are the configurations of a sweep, by label: they compute
    the same as `run`. `neighbours` makes more of them from the label of a good one.
    """

    op: str
    shape: str
    rows: int
    num_bytes: int
    sets: int
    run: Callable[[int], Any]
    twin: Callable[[int], Any]
    torch: Callable[[int], Any] | None = None
    tolerance: float = 1e-2
    variants: dict[str, Callable[[int], Any]] = field(default_factory=dict)
    neighbours: Callable[[str], dict[str, Callable[[int], Any]]] = lambda label: {}

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {self.rows}"


def error_of(case: Case, run: Callable[[int], Any]) -> float:
    """The largest relative error of any output against the twin, by norms; infinite if something is not finite."""
    worst = 0.0
    found, expected = run(0), case.twin(0)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for a, b in pairs:
        error = ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def time_us(run: Callable[[int], Any], sets: int, repeats: int = 15) -> float:
    """Microseconds of one call: the median over replays of a CUDA graph of many calls, each on another set of inputs.

    So the time holds the gap to the next kernel, and what dependent launch hides of it, as in a captured frame.
    """
    calls = sets * max(1, -(-24 // sets))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(3):
            run(index % sets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            run(index % sets)
    times = []
    for repeat in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= 2:
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)
