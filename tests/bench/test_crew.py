"""Several client processes are one: nobody is asked twice, everybody asks, and what they note comes together."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from duetts.bench.client import Target
from duetts.bench.crew import Crew, Plan, hired
from duetts.bench.load import Clients, Measure, Point, Share, closed, poisson
from duetts.bench.workloads import WORKLOADS, Asker
from duetts.errors import ConfigError
from tests.bench.test_load import Counter as Asked

from .servers import CHUNKED, FRAME, chunk, serving

MEASURE = Measure(seconds=0, least=2, most=2, frames=1, short=True)


class Nowhere(Target):
    """Cannot be asked."""

    def head(self, length: int) -> bytes:
        raise OSError("there is no way to it")


async def crowd(work: Callable[[Clients], Awaitable[Any]], servers: int, processes: int) -> tuple[Any, list[list[str]]]:
    """What comes of it, and the texts that each server was asked for."""
    texts: list[list[str]] = [[] for _ in range(servers)]

    def answering(number: int) -> Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]:
        async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
            texts[number].append(json.loads(body)["input"])
            writer.write(CHUNKED + chunk(FRAME) + b"0\r\n\r\n")

        return answer

    async with serving(answering(0)) as first, serving(answering(1)) as second:
        targets = (first, second)[:servers]
        with hired(Plan(targets, Asker(), MEASURE, 100, processes)) as clients:
            return await work(clients), texts


@pytest.mark.parametrize(("servers", "processes"), [(1, 1), (1, 3), (2, 2)])
async def test_they_are_one_crowd(servers: int, processes: int) -> None:
    async def work(clients: Clients) -> Any:
        await clients.warm_up(Point(WORKLOADS["T"], 7))
        return await clients.run(Point(WORKLOADS["T"], 7))

    run, texts = await crowd(work, servers, processes)
    assert Counter(record.client for record in run.records) == dict.fromkeys(range(7), 2)
    assert {record.error for record in run.records} == {""}
    assert sorted(record.index for record in run.records) == list(range(14))
    assert run.clients == 7
    assert len(run.processor_shares) == processes
    assert min(run.processor_shares) > 0
    every = [text for each in texts for text in each]
    assert len(every) == len(set(every)) == 2 * 14
    assert [len(each) for each in texts] == ([28] if servers == 1 else [16, 12])  # clients 0, 2, 4, 6 and 1, 3, 5


async def test_bursts_and_arrivals_are_shared_too() -> None:
    async def work(clients: Clients) -> Any:
        return await clients.run(Point(WORKLOADS["B"], 5)), await clients.run(Point(WORKLOADS["P"], 50))

    (burst, arrivals), _ = await crowd(work, 1, 2)
    assert sorted(record.client for record in burst.records) == list(range(5))
    assert sorted(record.index for record in arrivals.records) == [0, 1]
    assert arrivals.open_loop


async def test_each_has_its_part_of_a_load() -> None:
    counters = [Asked(), Asked()]
    for index, counter in enumerate(counters):
        await closed(counter, 5, Measure(seconds=0, least=1), share=Share(index, 2))
    assert [[client for _, client, _ in counter.asked] for counter in counters] == [[0, 2, 4], [1, 3]]
    for index, counter in enumerate(parts := [Asked(), Asked()]):
        await poisson(counter, 1000, Measure(seconds=0, least=7), seed=index, share=Share(index, 2))
    assert [[turn for _, _, turn in counter.asked] for counter in parts] == [[0, 2, 4, 6], [1, 3, 5]]


async def test_a_client_process_that_ends_is_noticed() -> None:
    with Crew(Plan((Target("127.0.0.1", 1),), Asker(), MEASURE, processes=2)) as crew:
        crew._processes[1].kill()
        with pytest.raises(ConnectionError, match="a client process has ended"):
            await crew.warm_up(Point(WORKLOADS["T"], 2))
    assert not any(process.is_alive() for process in crew._processes)


async def test_what_a_client_process_raises_is_raised_here() -> None:
    plan = Plan((Nowhere("127.0.0.1", 1),), Asker(), MEASURE, processes=2)
    with Crew(plan) as crew, pytest.raises(OSError, match="there is no way"):
        await crew.run(Point(WORKLOADS["T"], 2))


async def test_a_process_without_clients_is_not_busy() -> None:
    async def work(clients: Clients) -> Any:
        return await clients.run(Point(WORKLOADS["T"], 1))

    run, _ = await crowd(work, 1, 2)
    assert run.processor_shares[0] > 0
    assert run.processor_shares[1] == 0


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_every_server_has_as_many_processes(processes: int) -> None:
    plan = Plan((Target("127.0.0.1", 1), Target("127.0.0.1", 2)), Asker(), MEASURE, 0, processes)
    with pytest.raises(ConfigError, match="no multiple of the 2 addresses"), hired(plan):
        pass
