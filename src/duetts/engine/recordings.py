"""Work on a GPU that is recorded once for each size and then replayed whole: CUDA graphs. It does not know what the work is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WARM_UPS = 2  # calls before a recording, in which libraries choose their ways and kernels are compiled


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor


class Recordings:
    """`work` takes tensors of one of `sizes` on `device` and gives one tensor, which is valid until the next call.

    `blank` makes harmless inputs of a size on the host: recording runs the work with them. All recordings share their memory,
    so they must be replayed one after another on one stream. It is recorded on the stream that is the current one then, whose
    priority it keeps, and which must not be the default one. Without `replayed` (on a CPU) the work is just called.
    """

    def __init__(
        self, work: Callable[..., Tensor], sizes: Sequence[int], blank: Callable[[int], tuple[Tensor, ...]],
        device: torch.device, *, replayed: bool,
    ) -> None:  # fmt: skip
        self.sizes = sorted(sizes)
        self._work = work
        self._blank = blank
        self._device = device
        self._replayed = replayed
        self._recordings: dict[int, _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle() if replayed else None

    def size_for(self, count: int) -> int:
        """The smallest size that has room for so many."""
        return self.sizes[bisect_left(self.sizes, count)]

    def record_all(self) -> None:
        """Records every size now, the largest first, whose memory then serves the others."""
        for size in reversed(self.sizes):
            self.record(size)

    def record(self, size: int) -> None:
        """Records a size now, if it is not yet."""
        if self._replayed and size not in self._recordings:
            self._recordings[size] = self._record(size)

    def __call__(self, size: int, inputs: tuple[Tensor, ...]) -> Tensor:
        """The work on inputs that lie on the host, pinned if the device is a GPU. Nothing here waits for the device."""
        if not self._replayed:
            return self._work(*(each.to(self._device) for each in inputs))
        recording = self._recordings.get(size)
        if recording is None:
            recording = self._recordings[size] = self._record(size)
        for place, each in zip(recording.inputs, inputs, strict=True):
            place.copy_(each, non_blocking=True)
        recording.graph.replay()
        return recording.output

    def _record(self, size: int) -> _Recording:
        inputs = [each.to(self._device) for each in self._blank(size)]
        stream = torch.cuda.current_stream(self._device)
        for _ in range(WARM_UPS):
            self._work(*inputs)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: the encoder of references does.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = self._work(*inputs)
        return _Recording(graph, inputs, output)
