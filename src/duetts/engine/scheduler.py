"""Who may run: a waiting line, slots, and what comes next. Plain Python, no torch, used by the loop's thread alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from duetts.engine.sequence import Sequence


class Scheduler:
    """Sequences wait in order of arrival, take a slot each, and leave it when they finish."""

    def __init__(self, num_slots: int, rows: int) -> None:
        self._free = list(range(num_slots))[::-1]
        self._rows = rows
        self.num_slots = num_slots
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self, now: float) -> None:
        """Gives free slots to those who have waited longest."""
        while self.waiting and self._free:
            sequence = self.waiting.popleft()
            sequence.slot = self._free.pop()
            sequence.admitted_at = now
            self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees its slot."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._free.append(sequence.slot)
        sequence.slot = None

    def everyone(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def next_prefill(self) -> Sequence | None:
        """The oldest sequence whose prompt is not read yet. One block of one prompt is read between two frames."""
        return next((sequence for sequence in self.running if sequence.to_prefill > 0), None)

    def step_groups(self) -> Iterator[list[Sequence]]:
        """Sequences that draw a frame now, in groups of at most `rows`."""
        ready = [sequence for sequence in self.running if sequence.to_prefill == 0]
        for start in range(0, len(ready), self._rows):
            yield ready[start : start + self._rows]

    def assert_idle(self) -> None:
        """With nobody waiting or running every slot is free."""
        assert self.idle, "sequences are waiting or running"
        assert sorted(self._free) == list(range(self.num_slots)), f"slots leaked: only {sorted(self._free)} are free"
