"""FFmpeg's audio filters over float samples, piece by piece. Knows no formats."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from threading import get_native_id
from typing import Any

import av
import numpy as np

from duetts.types import Float32


class Filters:
    """Filters in a row, each a name and its arguments, over mono float32 samples at `rate` Hz. Opened by the first samples."""

    def __init__(self, rate: int, *filters: tuple[str, str]) -> None:
        self._rate = rate
        self._filters = filters
        self._graph: Any = None
        self._position = 0  # in samples

    def write(self, samples: Float32) -> Float32:
        """What comes out after these samples [n] went in."""
        if not len(samples):
            return samples
        if self._graph is None:
            self._graph = self._open()
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None], np.float32), format="flt", layout="mono")
        frame.sample_rate = self._rate
        frame.time_base = Fraction(1, self._rate)
        frame.pts = self._position
        self._position += len(samples)
        self._graph.push(frame)
        return self._pull()

    def finish(self) -> Float32:
        """What is left at the end."""
        if self._graph is None:
            return np.zeros(0, np.float32)
        self._graph.push(None)
        return self._pull()

    def _open(self) -> Any:
        graph = av.filter.Graph()
        with one_cpu():
            source = graph.add_abuffer(format="flt", sample_rate=self._rate, layout="mono", time_base=Fraction(1, self._rate))
            middle = [graph.add(name, arguments) for name, arguments in self._filters]
            floats = graph.add("aformat", "sample_fmts=flt")
            graph.link_nodes(source, *middle, floats, graph.add("abuffersink")).configure()
        return graph

    def _pull(self) -> Float32:
        blocks = [np.zeros(0, np.float32)]
        try:
            while True:
                blocks.append(self._graph.pull().to_ndarray()[0])
        except (av.BlockingIOError, av.EOFError):
            return np.concatenate(blocks)


@contextmanager
def one_cpu() -> Iterator[None]:
    """Shows the calling thread a single CPU while FFmpeg opens a filter graph.

    A graph starts an idle thread per CPU that it sees, 15 of them on a large machine, and keeps them; mono audio needs none.
    PyAV has such a graph in every audio encoder, out of reach until its version 19.1.
    """
    if sys.platform != "linux":  # threads of other systems cannot be told so
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[get_native_id() % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
