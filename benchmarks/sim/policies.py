"""What is compared: who is served first, who is let in, how large chunks are, and which device gets a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from duetts.engine import codec_worker, pace, playout, routing, scheduler
from duetts.engine.playout import ChunkPolicy, Playout
from duetts.engine.scheduler import urgency
from duetts.engine.sequence import Sequence

if TYPE_CHECKING:
    from benchmarks.sim.gpu import Gpu
    from benchmarks.sim.listeners import Request

OURS = ChunkPolicy()
Order = Callable[[Sequence, float], tuple[int, float]]
Route = Callable[[list["Gpu"], "Request"], "Gpu"]


def by_arrival(sequence: Sequence, now: float) -> tuple[int, float]:
    return 0, sequence.arrival


@dataclass(frozen=True, slots=True)
class FixedChunks:
    """Always as many frames, whatever the listener has in hand; the first chunk may be smaller, as in some peers."""

    first: int
    largest: int

    def size(self, playout: Playout, last: int, frame_s: float, now: float) -> int:
        return self.largest if last else self.first


def round_robin(gpus: list[Gpu], request: Request) -> Gpu:
    """By turns, as a plain balancer does."""
    return gpus[(request.client + request.number) % len(gpus)]


def shortest_queue(gpus: list[Gpu], request: Request) -> Gpu:
    """The fewest open requests."""
    return min(gpus, key=lambda gpu: (gpu.num_open, gpu.index))


def least_work(gpus: list[Gpu], request: Request) -> Gpu:
    """The fewest frames owed, whatever the voice."""
    return min(gpus, key=lambda gpu: (gpu.owed, gpu.index))


def by_voice(gpus: list[Gpu], request: Request) -> Gpu:
    """The package's own choice: the device of the voice unless it is clearly busier than the least busy one."""
    candidates = [routing.Candidate(gpu.index, gpu.owed) for gpu in gpus]
    utterance = request.utterance
    chosen = routing.choose(candidates, utterance.voice_key, routing.utterance_weight(utterance))
    return next(gpu for gpu in gpus if gpu.index == chosen.index)


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to serve. Without `tells_apart` complete answers are served as if somebody listened, as peers do.

    `stands_back`: streams far ahead yield while another is short. `admits_by_lateness`: listeners wait outside beyond
    what can be served in time. `longest_line_s`: a listener who would wait outside longer is refused (429) at once, if every
    device would make it wait.
    """

    name: str
    order: Order = urgency
    stands_back: bool = True
    admits_by_lateness: bool = True
    chunks: ChunkPolicy | FixedChunks = OURS
    route: Route = by_voice
    tells_apart: bool = True
    longest_line_s: float | None = None


# First come, first served: continuous batching with no thought of listeners, in the same steps, blocks and slots. Chunks of 8
# frames serve it best (larger ones come too late, smaller ones cost more calls); peers hand out 25 to 45.
FCFS = Policy(
    "first come, first served", by_arrival, stands_back=False, admits_by_lateness=False, chunks=FixedChunks(8, 8),
    route=round_robin, tells_apart=False,
)  # fmt: skip
SHORTEST_QUEUE = replace(FCFS, name="shortest queue", route=shortest_queue)
DEADLINE = Policy("deadline")
REFUSING = replace(DEADLINE, name="deadline, refusing", longest_line_s=0.2)


@contextmanager
def constants(**values: float) -> Iterator[None]:
    """Other values for constants of the engine's scheduling rooms, wherever they are read, until the end of the block."""
    places = [
        (module, name)
        for name in values
        for module in (scheduler, pace, playout, codec_worker, routing)
        if name in vars(module)
    ]
    before = [vars(module)[name] for module, name in places]
    assert {name for _, name in places} == set(values), f"some of {set(values)} are unknown"
    try:
        for module, name in places:
            setattr(module, name, values[name])
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
