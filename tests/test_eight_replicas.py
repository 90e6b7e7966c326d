"""The profile of eight GPUs with eight engines on a CPU: work is spread evenly, nobody starves, and the end of one engine costs
its streams only. Nothing here depends on how fast anything is."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from benchmarks.host import engines, kill

from tests.server.test_metrics import Numbers
from tests.server.test_serve import Running, running
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENGINES, PLACES, FRAMES, AGAIN, SHORT = 8, 2, 200, 40, 8
FRAME_BYTES = 4096
BODY = {"input": "A long one.", "response_format": "pcm", "stream_format": "audio", "seed": 1, "temperature": 0.9}
CLIENTS, ANSWERS, MOST = 3 * ENGINES, 3, 15


@pytest.fixture(scope="module")
def served(endless_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all of it, as its start costs half a minute. Engines that wait for a core are not held to be silent."""
    options = ("--profile", "fish_qwen3_omni_8gpu", "--max-num-seqs", str(PLACES), "--max-queue", "8", "--silence", "30",
               "--stuck", "60", "--restart", "0.1", "--heartbeat", "0.1",
               "--default-voice", "none", "--port", "0", "--workers", "1")  # which knows at once what each has  # fmt: skip
    cache = str(tmp_path_factory.mktemp("eight-cache"))
    with running(str(endless_folder), *options, DUETTS_CACHE_DIR=cache) as server:
        with httpx.Client(base_url=server.address, timeout=60, trust_env=False) as http:
            server.until(http, "/ready", 200)
        yield server


class Stream:
    """One answer, as it comes."""

    def __init__(self) -> None:
        self.body, self.broken, self.began = b"", False, asyncio.Event()

    async def listen(self, http: httpx.AsyncClient, frames: int) -> None:
        try:
            async with http.stream("POST", "/v1/audio/speech", json={**BODY, "max_new_tokens": frames}) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for part in answer.aiter_raw():
                    self.body += part
                    self.began.set()
        except httpx.RemoteProtocolError:  # the body has no end
            self.broken = True


@asynccontextmanager
async def asking(server: Running) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=120, limits=limits, trust_env=False) as http:
        yield http


async def each_engine(http: httpx.AsyncClient, name: str) -> list[float]:
    numbers = Numbers((await http.get("/metrics")).text)
    return [numbers.get(name, engine=str(engine)) for engine in range(ENGINES)]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await condition():  # noqa: ASYNC110 it is asked, it does not tell
            await asyncio.sleep(0.05)


@asynccontextmanager
async def full_house(http: httpx.AsyncClient) -> AsyncIterator[list[Stream]]:
    """As many long streams as there are places, all of which have begun: every engine has as many of them as any other."""
    streams = [Stream() for _ in range(ENGINES * PLACES)]
    asked = [asyncio.create_task(stream.listen(http, FRAMES)) for stream in streams]
    await asyncio.wait_for(asyncio.gather(*(stream.began.wait() for stream in streams)), LIMIT_S)

    async def spread() -> bool:
        assert not any(task.done() for task in asked), "the streams are too short for this machine"
        return await each_engine(http, "num_requests_open") == [PLACES] * ENGINES

    await until(spread)
    yield streams
    await asyncio.wait_for(asyncio.gather(*asked), 2 * LIMIT_S)


async def test_an_engine_of_eight_ends_and_only_its_streams_are_lost(served: Running) -> None:
    async with asking(served) as http:
        assert len(engines(served.process.pid)) == ENGINES
        async with full_house(http) as streams:
            killing = asyncio.create_task(asyncio.to_thread(kill, served.address, served.process.pid))
        end = await killing  # it is back
        assert end["open_before"] == {str(engine): PLACES for engine in range(ENGINES)}
        whole = [stream.body for stream in streams if not stream.broken]
        assert len(whole) == (ENGINES - 1) * PLACES
        assert set(whole) == {whole[0]}  # whichever engine spoke, whoever else was there
        assert len(whole[0]) == FRAMES * FRAME_BYTES
        for stream in streams:
            assert whole[0].startswith(stream.body)
        assert all(0 < len(stream.body) < len(whole[0]) for stream in streams if stream.broken)

        starts = await each_engine(http, "engine_starts_total")
        assert starts == [2 if str(engine) == end["engine"] else 1 for engine in range(ENGINES)]
        assert await each_engine(http, "engine_up") == [1] * ENGINES
        await all_speak(http, whole[0][: AGAIN * FRAME_BYTES])


async def all_speak(http: httpx.AsyncClient, expected: bytes) -> None:
    """As many requests as there are places: every engine has one at least, and so has the one that is back."""
    frames = await each_engine(http, "frames_generated_total")
    streams = [Stream() for _ in range(ENGINES * PLACES)]
    await asyncio.wait_for(asyncio.gather(*(stream.listen(http, AGAIN) for stream in streams)), LIMIT_S)
    assert {stream.body for stream in streams} == {expected}

    async def spoken() -> bool:
        now = await each_engine(http, "frames_generated_total")
        return all(late - early >= AGAIN for early, late in zip(frames, now, strict=True))

    await until(spoken)


async def test_nobody_starves_in_a_crowd(served: Running) -> None:
    """More clients than places, each of whom asks again at once until the last of them has had some answers: however slow the
    machine is, those who were first may not pass the others by again and again."""
    answers = [0] * CLIENTS

    async def client(http: httpx.AsyncClient, number: int) -> None:
        while min(answers) < ANSWERS:
            stream = Stream()
            await stream.listen(http, SHORT)
            assert len(stream.body) == SHORT * FRAME_BYTES
            answers[number] += 1

    async with asking(served) as http:
        frames = await each_engine(http, "frames_generated_total")
        await asyncio.wait_for(asyncio.gather(*(client(http, number) for number in range(CLIENTS))), 2 * LIMIT_S)
        assert max(answers) <= MOST, answers

        async def all_told() -> bool:
            made = [late - early for early, late in zip(frames, await each_engine(http, "frames_generated_total"), strict=True)]
            return sum(made) >= SHORT * sum(answers) and min(made) > 0

        await until(all_told)
