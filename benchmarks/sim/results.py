"""What a simulation says: how many listeners were served well, how soon, how much was made of the device."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.sim.fleet import Fleet
from benchmarks.sim.listeners import Load, Request
from benchmarks.sim.model import FRAME_S
from benchmarks.sim.policies import Policy

GAP_S = 0.1  # a longer wait in the middle breaks continuity
TTFA_S = 0.5  # of 95 % of the requests
SHARE = 0.99  # of the requests must be continuous
WARM_S, WINDOW_S = 13.0, 22.0  # simulated: until the population is mixed, and measured


@dataclass(frozen=True, slots=True)
class Result:
    """One point of a curve. Shares are of listeners' requests; seconds of audio are of all. A request that was refused, or left
    because nothing came, has an infinite time to first audio and is not served well."""

    scenario: str
    policy: str
    num_gpus: int
    listeners: int
    arrivals: str
    batch_clients: int
    interrupted: float
    requests: int
    continuous: float  # worst wait in the middle <= 100 ms, of those that heard anything
    smooth: float  # all waits together <= 100 ms
    unbroken: float  # no wait at all
    served_well: float  # first audio within 500 ms, and smooth
    well_listeners: float  # how many at a time, on average, were listening to something served well
    failed: float  # refused or left
    ttfa_p50_s: float
    ttfa_p95_s: float
    audio_s: float  # made per second, in all devices together
    batch_audio_s: float  # of it, complete answers
    busy: float  # share of the devices' time
    rows: float  # of a step
    reading: float  # share of the devices' time spent on prompts

    @property
    def holds(self) -> bool:
        """Whether so many listeners are within the capacity: continuity, time to first audio, nobody failed.

        Continuity is judged by the sum of a request's waits, which is stricter than by the worst of them: many short ones
        would make an overloaded device look sound.
        """
        return self.smooth >= SHARE and self.ttfa_p95_s <= TTFA_S and self.failed == 0

    def as_json(self) -> dict[str, Any]:
        values = {name: round(float(value), 4) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return {name: value if value != math.inf else None for name, value in values.items()}


def simulate(
    load: Load, policy: Policy, num_gpus: int = 1, *, scenario: str = "", warm_s: float = WARM_S, window_s: float = WINDOW_S
) -> Result:
    """Runs a fleet and looks at what listeners asked for in the window after the warm-up; the waits of all who heard something
    in it count, also of those who asked before or have not heard all at its end."""
    fleet = Fleet(load, policy, num_gpus)
    until = warm_s + window_s
    fleet.start(until)
    fleet.run(warm_s)
    before = _work(fleet)
    fleet.run(until)
    frames, listened, busy_s, read_s, steps, rows = _work(fleet) - before
    listening = [request for request in fleet.requests if request.listening]
    return Result(
        scenario=scenario, policy=policy.name, num_gpus=num_gpus, listeners=load.listeners, arrivals=load.arrivals,
        batch_clients=load.batch_clients, interrupted=load.interrupted,
        **_as_heard(listening, warm_s, until),
        audio_s=frames * FRAME_S / window_s, batch_audio_s=(frames - listened) * FRAME_S / window_s,
        busy=busy_s / window_s / num_gpus, reading=read_s / window_s / num_gpus, rows=rows / max(1.0, steps),
    )  # fmt: skip


def _work(fleet: Fleet) -> npt.NDArray[np.float64]:
    done = [gpu.work for gpu in fleet.gpus]
    rows = [(w.frames, w.listened, w.busy_s, w.read_s, w.steps, w.rows) for w in done]
    total: npt.NDArray[np.float64] = np.array(rows, np.float64).sum(axis=0)
    return total


def _as_heard(listening: list[Request], began: float, until: float) -> dict[str, Any]:
    """The listeners' side: of those who asked in the window and whose first audio has come or is late, and of all who heard."""
    known = [
        r for r in listening
        if r.submitted >= began and (r.state != "open" or r.first_audio_s is not None or until - r.submitted > TTFA_S)
    ]  # fmt: skip
    heard = [r for r in listening if r.first_audio_s is not None and (r.ended is None or r.played >= began)]
    good = [r for r in heard if (r.first_audio_s or 0.0) <= TTFA_S and r.waited_s <= GAP_S]
    first = np.sort([math.inf if r.first_audio_s is None else r.first_audio_s for r in known] or [math.inf])
    worst = np.array([r.worst_s for r in heard] or [math.inf])
    waited = np.array([r.waited_s for r in heard] or [math.inf])
    listened_s = sum(max(0.0, min(until, r.played) - max(began, r.submitted + (r.first_audio_s or 0.0))) for r in good)
    return {
        "requests": len(known),
        "continuous": float((worst <= GAP_S).mean()),
        "smooth": float((waited <= GAP_S).mean()),
        "unbroken": float((waited <= 1e-6).mean()),
        "served_well": sum(r.submitted >= began for r in good) / max(1, len(known)),
        "well_listeners": listened_s / (until - began),
        "failed": sum(r.state in ("refused", "left") for r in known) / max(1, len(known)),
        "ttfa_p50_s": float(first[len(first) // 2]),
        "ttfa_p95_s": float(first[min(len(first) - 1, int(0.95 * len(first)))]),
    }
