"""Devices, a router before them and the clients in front, in simulated time: a heap of events, nothing sleeps."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks.sim.gpu import Gpu
from benchmarks.sim.listeners import Load, Request, Voices, first_arrivals, make_request
from benchmarks.sim.model import Card
from benchmarks.sim.policies import Policy

from duetts.engine.sequence import Sequence

RETRY_S = 2.0  # a refused client of a closed population comes again


class Fleet:
    """One simulation: `start`, `run`, read `requests` and `gpus`."""

    def __init__(self, load: Load, policy: Policy, num_gpus: int = 1, card: Card | None = None) -> None:
        self._load = load
        self._policy = policy
        self._voices = Voices.of(load.voices, load.seed)
        self.gpus = [Gpu(index, card or Card(), policy, self._heard, self._ended) for index in range(num_gpus)]
        self._sequences: dict[Request, Sequence] = {}
        self.requests: list[Request] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = itertools.count()
        self._asleep = set(range(num_gpus))
        self._stop = 0.0

    def start(self, until: float) -> None:
        """Clients ask from 0 `until` then."""
        self._stop = until
        for at, client in first_arrivals(self._load, until):
            self._at(at, partial(self._ask, client, 0))

    def run(self, until: float) -> None:
        """On to that simulated second; may be called again. Afterwards the waits of those who still listen are up to date."""
        while self._events and self._events[0][0] <= until:
            now, _, event = heapq.heappop(self._events)
            event(now)
        for gpu in self.gpus:
            for sequence, request in gpu.open.items():
                request.hear(sequence.playout, until)

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), event))

    def _ask(self, client: int, number: int, now: float) -> None:
        if now >= self._stop:
            return
        request = make_request(self._load, self._voices, client, number, now)
        self.requests.append(request)
        limit = self._policy.longest_line_s
        gpus = self.gpus
        if limit is not None and request.listening:
            gpus = [gpu for gpu in gpus if gpu.line_s() <= limit]
        if not gpus:
            request.state, request.ended = "refused", now
            if self._load.arrivals == "closed":
                self._at(now + RETRY_S, partial(self._ask, client, number + 1))
            return
        gpu = self._policy.route(gpus, request)
        if not self._policy.tells_apart:
            request.utterance = replace(request.utterance, streaming=True)
        self._sequences[request] = gpu.submit(request, now)
        if gpu.index in self._asleep:
            self._asleep.discard(gpu.index)
            self._at(now, lambda then: self._turn(gpu, then))
        if request.listening:
            self._at(now + self._load.patience_s, lambda then: self._lose_patience(request))

    def _lose_patience(self, request: Request) -> None:
        if request.first_audio_s is None:
            self._sequences[request].cancelled = True

    def _heard(self, request: Request) -> None:
        assert request.first_audio_s is not None
        if request.listens_s < math.inf:
            self._at(request.submitted + request.first_audio_s + request.listens_s, lambda then: self._interrupt(request))

    def _interrupt(self, request: Request) -> None:
        if request in self._sequences:
            self._sequences[request].cancelled = True

    def _turn(self, gpu: Gpu, now: float) -> None:
        then = gpu.turn(now)
        if then is None:
            self._asleep.add(gpu.index)
        else:
            self._at(then, lambda later: self._turn(gpu, later))

    def _ended(self, request: Request) -> None:
        """A closed population listens to the end before it asks again; a batch client asks at once."""
        assert request.ended is not None
        del self._sequences[request]
        again = request.ended
        if request.listening:
            if self._load.arrivals == "poisson":
                return
            again = max(again, request.played)
        self._at(again, partial(self._ask, request.client, request.number + 1))
