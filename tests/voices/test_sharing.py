"""Threads with a bounded line, and work that is done once for all who ask."""

import asyncio
import threading

import pytest

from duetts.errors import NotReady, Overloaded
from duetts.voices.sharing import SharedWork, Threads
from tests.waiting import LIMIT_S, until


async def until_waiting(threads: Threads, count: int) -> None:
    await until(lambda: threads.line.waiting == count)


async def test_the_line_has_a_bound_and_whoever_leaves_it_makes_room() -> None:
    threads, go, done = Threads("test", 1, 2), threading.Event(), []

    def work(number: int) -> int:
        go.wait(LIMIT_S)
        done.append(number)
        return number

    running = asyncio.ensure_future(threads.run(work, 0))
    waiting = [asyncio.ensure_future(threads.run(work, number)) for number in (1, 2)]
    await until_waiting(threads, 2)
    with pytest.raises(Overloaded) as refusal:
        await threads.run(work, 3)
    assert refusal.value.retry_after_s >= 1
    waiting[0].cancel()
    await until_waiting(threads, 1)
    waiting.append(asyncio.ensure_future(threads.run(work, 4)))
    go.set()
    assert await asyncio.gather(running, *waiting[1:]) == [0, 2, 4]
    assert done == [0, 2, 4]
    threads.close()


async def test_begun_work_keeps_its_thread_when_its_caller_leaves() -> None:
    threads, go = Threads("test", 1, 1), threading.Event()
    begun = threading.Event()
    left = asyncio.ensure_future(threads.run(lambda: (begun.set(), go.wait(LIMIT_S))))
    await asyncio.to_thread(begun.wait, LIMIT_S)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    waiting = asyncio.ensure_future(threads.run(lambda: "next"))
    await until_waiting(threads, 1)
    with pytest.raises(Overloaded):
        await threads.run(lambda: "too many")
    go.set()
    assert await waiting == "next"
    threads.close()


async def test_errors_reach_the_caller_and_a_closed_line_takes_nothing() -> None:
    threads, go = Threads("test", 1, 5), threading.Event()
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0)
    running, waiting = (asyncio.ensure_future(threads.run(go.wait, 10)) for _ in range(2))
    await until_waiting(threads, 1)
    threads.close()
    go.set()
    assert await running
    with pytest.raises(NotReady):
        await waiting
    with pytest.raises(NotReady):
        await threads.run(lambda: 1)
    threads.start(lambda: 1)


class Work:
    """Work that counts its beginnings and ends, and waits until it may go on. `stubborn` work does not heed who leaves."""

    def __init__(self, *, stubborn: bool = False) -> None:
        self.begun = self.ended = 0
        self.go = asyncio.Event()
        self._stubborn = stubborn

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            if not self._stubborn:
                raise
            await self.go.wait()
        self.ended += 1
        return number


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_key_is_done_once_and_others_beside_it() -> None:
    shared: SharedWork[int] = SharedWork()
    work, other = Work(), Work()
    callers = [asyncio.ensure_future(shared.run("a", work)) for _ in range(20)]
    beside = asyncio.ensure_future(shared.run("b", other))
    await settle()
    assert "a" in shared
    other.go.set()
    assert await beside == 1
    for caller in callers[:19]:
        caller.cancel()
    await settle()
    work.go.set()
    assert await callers[19] == 1
    assert (work.begun, work.ended) == (1, 1)
    await settle()
    assert "a" not in shared
    assert await shared.run("a", work) == 2


async def test_work_ends_when_its_last_caller_leaves() -> None:
    shared: SharedWork[int] = SharedWork()
    work = Work()
    callers = [asyncio.ensure_future(shared.run("a", work)) for _ in range(3)]
    await settle()
    for caller in callers:
        caller.cancel()
    await settle()
    assert "a" not in shared
    assert (work.begun, work.ended) == (1, 0)


async def test_who_comes_just_as_the_last_leaves_gets_a_result() -> None:
    shared: SharedWork[int] = SharedWork()
    work = Work()
    first = asyncio.ensure_future(shared.run("a", work))
    await settle()
    first.cancel()
    await asyncio.sleep(0)  # the first has left, its work has been told but not ended
    late = asyncio.ensure_future(shared.run("a", work))
    await settle()
    work.go.set()
    assert await late == 2
    assert (work.begun, work.ended) == (2, 1)


async def test_stubborn_work_is_there_for_who_comes_back() -> None:
    shared: SharedWork[int] = SharedWork()
    work = Work(stubborn=True)
    first = asyncio.ensure_future(shared.run("a", work))
    await settle()
    first.cancel()
    await settle()
    late = asyncio.ensure_future(shared.run("a", work))
    await settle()
    work.go.set()
    assert await late == 1
    assert work.begun == 1


async def test_a_failure_reaches_all_and_is_not_kept() -> None:
    shared: SharedWork[int] = SharedWork()

    async def fail() -> int:
        await asyncio.sleep(0)
        raise ValueError("broken")

    results = await asyncio.gather(*(shared.run("a", fail) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [ValueError] * 3
    work = Work()
    work.go.set()
    assert await shared.run("a", work) == 1
