"""Loads without a server: who asks how often and when, and the search for a capacity."""

from __future__ import annotations

import asyncio
import time

import pytest

from duetts.bench.load import Measure, closed, poisson, search
from duetts.bench.metrics import Record


class Counter:
    """Notes what was asked; each answer takes `seconds`."""

    def __init__(self, seconds: float = 0.0, error: str = "") -> None:
        self.asked: list[tuple[float, int, int]] = []
        self.open = self.most_open = 0
        self._seconds, self._error = seconds, error

    async def __call__(self, client: int, turn: int) -> Record:
        self.asked.append((time.monotonic(), client, turn))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(self._seconds)
        self.open -= 1
        return Record(turn, client, 1, error=self._error)


async def test_a_closed_loop_keeps_every_client_busy() -> None:
    counter = Counter(0.01)
    await closed(counter, 3, Measure(seconds=0, least=4))
    assert sorted((client, turn) for _, client, turn in counter.asked) == [(c, t) for c in range(3) for t in range(4)]
    assert counter.most_open == 3
    await closed(counter := Counter(0.01), 2, Measure(seconds=0.3, least=1))
    assert len(counter.asked) > 6
    await closed(counter := Counter(0.01), 2, Measure(seconds=10, least=1, most=2))
    assert len(counter.asked) == 4


async def test_clients_begin_spread_over_the_time_given() -> None:
    counter, began = Counter(), time.monotonic()
    await closed(counter, 4, Measure(seconds=0, least=1, most=1), spread_s=0.4)
    begins = [when - began for when, _, _ in counter.asked]
    assert [client for _, client, _ in counter.asked] == [0, 1, 2, 3]
    assert all(begin >= 0.1 * number - 0.01 for number, begin in enumerate(begins))


async def test_a_server_that_refuses_is_not_hammered() -> None:
    counter = Counter(error="status 429")
    await closed(counter, 2, Measure(seconds=0.3, least=1))
    assert len(counter.asked) <= 6


async def test_poisson_arrivals_do_not_wait_for_answers() -> None:
    counter = Counter(0.2)
    await poisson(counter, 100, Measure(seconds=1.0, least=1), seed=1)
    assert 60 < len(counter.asked) < 140
    assert counter.most_open > 5
    assert counter.open == 0
    await poisson(counter := Counter(), 1000, Measure(seconds=0, least=7), seed=1)
    assert [turn for _, _, turn in counter.asked] == list(range(7))


@pytest.mark.parametrize("start", [1, 5, 64, 1000])
@pytest.mark.parametrize("capacity", [0, 1, 5, 50, 63, 500, 1024, 3000])
async def test_the_search_finds_the_capacity(capacity: int, start: int) -> None:
    asked: list[tuple[int, int]] = []

    async def stands(clients: int, runs: int) -> bool:
        asked.append((clients, runs))
        return clients <= capacity

    found = await search(stands, start, 1024, 0.06, 3)
    assert found <= min(capacity, 1024)
    assert found >= min(capacity, 1024) * 0.93 - 1
    assert max(clients for clients, _ in asked) <= 1024
    assert len(asked) < 25
    assert not found or (found, 3) in asked


async def test_a_capacity_that_falls_in_three_runs_is_lowered() -> None:
    async def stands(clients: int, runs: int) -> bool:
        return clients <= (100 if runs == 1 else 80)

    assert 70 <= await search(stands, 8, 1024, 0.06, 3) <= 80
