"""A speaker over real processes whose engines only hum: who serves, who dies, who comes back, and what callers see of it."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetts.config import EngineConfig, ProcessConfig
from duetts.engine import wire
from duetts.engine.life import Life
from duetts.engine.remote import RemoteSpeaker, Search, keeping, visiting
from duetts.engine.supervisor import backoff_s, listen_at, short_folder
from duetts.errors import (
    Aborted,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    DuettsError,
    EngineFailure,
    NotEnoughMemory,
    NotReady,
    Overloaded,
)
from duetts.server.metrics import Metrics
from duetts.types import Chunk, Outcome
from tests.waiting import LIMIT_S, until

from .fake_engine import FRAME, INFO
from .test_remote_link import collect, spoken, whole

FAKE = (sys.executable, "-P", str(Path(__file__).with_name("fake_engine.py")))
ENGINE = EngineConfig(device="cpu", max_num_seqs=8)
QUICK = ProcessConfig(heartbeat_s=0.05, silence_s=20.0, stuck_s=60.0, restart_s=0.1, wait_s=60.0)
ATTENTIVE = {"silence_s": 0.5, "stuck_s": 2.0}  # where silence is what a test is about
FROM_ELSEWHERE: ContextVar[bool] = ContextVar("from_elsewhere", default=False)  # whether another process keeps the engines
SLOW, FRAMES = 0.2, 400  # seconds a frame, and frames: speech that does not end before `finish`


class Fleet:
    """A speaker over fake engines and the folder with their knobs."""

    def __init__(self, folder: Path, speaker: RemoteSpeaker) -> None:
        self.folder, self.speaker = folder, speaker

    def set(self, **knobs: Any) -> None:
        turn(self.folder, **knobs)

    def pids(self) -> list[int | None]:
        return [engine["pid"] for engine in self.speaker.stats()["engines"]]

    def starts(self) -> list[int]:
        return [engine["starts"] for engine in self.speaker.stats()["engines"]]

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        pid = self.pids()[index]
        assert pid is not None
        os.kill(pid, number)

    async def all_up(self) -> None:
        count = len(self.speaker.stats()["engines"])
        await until(lambda: self.speaker.stats()["engines_up"] == count)

    async def streams(self, count: int, **knobs: Any) -> list["asyncio.Task[tuple[bytes, Outcome]]"]:
        """That many utterances, when each has begun to be spoken, slowly: they last until `finish`."""
        self.set(frame_s=SLOW, **knobs)
        tasks = [asyncio.ensure_future(collect(self.speaker, spoken(FRAMES, seed))) for seed in range(count)]
        await until(lambda: self.speaker.stats().get("open") == count)
        return tasks

    async def finish(self, tasks: list["asyncio.Task[tuple[bytes, Outcome]]"]) -> list[tuple[bytes, Outcome]]:
        """Their bytes and outcomes, all at once."""
        self.set()
        return await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)


def turn(folder: Path, **knobs: Any) -> None:
    fresh = folder / "fresh.json"
    fresh.write_text(json.dumps(knobs))
    fresh.replace(folder / "knobs.json")


@asynccontextmanager
async def fleet(folder: Path, engines: int = 2, **options: Any) -> AsyncIterator[Fleet]:
    knobs = options.pop("knobs", {})
    turn(folder, **knobs)
    config = replace(QUICK, engines=engines, **options)
    async with AsyncExitStack() as stack:
        if FROM_ELSEWHERE.get():
            (speaker,) = await stack.enter_async_context(visitors(folder, config, 1))
        else:
            speaker = await RemoteSpeaker.start(folder, ENGINE, config, FAKE)
            stack.push_async_callback(speaker.close)
        running = Fleet(folder, speaker)
        yield running
    assert running.pids() == [None] * engines


@asynccontextmanager
async def visitors(folder: Path, config: ProcessConfig, count: int) -> AsyncIterator[list[RemoteSpeaker]]:
    """Speakers over engines that another one keeps, as several processes have them."""
    doors = [visiting(config) for _ in range(count)]

    def tell_all() -> None:
        for _, tell in doors:
            tell([wire.build(Life, wire.to_plain(life)) for life in keeper.lives])

    keeper = RemoteSpeaker(keeping(folder, ENGINE, config, FAKE, are_visited=True), ENGINE, config, tell_all)
    speakers = [RemoteSpeaker(make, ENGINE, config) for make, _ in doors]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(keeper.close)
        await keeper.up()
        tell_all()
        for speaker in speakers:
            stack.push_async_callback(speaker.close)
            await speaker.up()
        await until(lambda: all(speaker.stats()["engines_up"] == config.engines for speaker in speakers))
        yield speakers


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of one's own, with a short path, which is empty at the end."""
    folder = Path(tempfile.mkdtemp(prefix="d-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    folder.rmdir()


def gone(pid: int) -> bool:
    """Whether no such process runs; one that has ended and is not yet reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state in "ZX"


def share(done: list[tuple[bytes, Outcome]], frames: int = FRAMES) -> tuple[int, int]:
    """Asserts that each is whole or visibly failed, and counts both."""
    failed = 0
    for seed, (pcm, outcome) in enumerate(done):
        assert whole(seed, frames).startswith(pcm)
        if outcome.reason == "failed":
            failed += 1
            assert isinstance(outcome.error, EngineFailure)
            assert outcome.num_frames * 2 * FRAME == len(pcm)
        else:
            assert (outcome.reason, pcm) == ("length", whole(seed, frames))
    return len(done) - failed, failed


async def test_work_is_spread_and_comes_back_whole(tmp_path: Path, temporary: Path) -> None:
    async with fleet(tmp_path) as running:
        assert running.speaker.info == INFO
        assert share(await running.finish(await running.streams(20))) == (20, 0)
        assert (await running.speaker.encode_reference(np.full(64, 7, np.float32))).tolist() == [[7] * 8] * 4
        for index in range(12):
            await collect(running.speaker, spoken(5, 1, voice_key=f"voice {index % 4}"))
        await until(lambda: running.speaker.stats()["finished"] == {"length": 32})
        stats = running.speaker.stats()
        voices = [{name for name in engine["voices"] if name} for engine in stats["engines"]]
        assert not voices[0] & voices[1]  # every voice has one home
        assert min(engine["frames"] for engine in stats["engines"]) >= 10 * FRAMES
        assert (stats["alive"], stats["engines_up"], stats["restarts"], stats["open"]) == (True, 2, 0, 0)
        assert [engine["calls"] for engine in stats["engines"]] == [0, 0]
        assert os.listdir(temporary) == []  # the sockets have no name any more


async def test_an_engine_that_is_killed_loses_only_its_own_streams_and_comes_back(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        tasks = await running.streams(8)
        running.kill(0)
        await until(lambda: sum(task.done() for task in tasks) == 4)
        assert (await collect(running.speaker, spoken(3, 50)))[0] == whole(50, 3)  # the other one serves meanwhile
        await running.all_up()
        assert running.starts() == [2, 1]
        assert share(await running.finish(tasks)) == (4, 4)
        assert share(await running.finish(await running.streams(8))) == (8, 0)
        assert min(engine["frames"] for engine in running.speaker.stats()["engines"]) > 0


async def test_a_request_that_kills_its_engine_is_not_given_to_the_next(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        for _ in range(2):
            _, outcome = await collect(running.speaker, spoken(request_id="deadly"))
            assert isinstance(outcome.error, EngineFailure)
            assert "ended with code -9" in str(outcome.error)
        await running.all_up()
        assert sum(running.starts()) == 4  # two engines, or one twice if the second came after its restart


async def test_an_engine_that_stands_still_is_passed_by_and_then_killed(tmp_path: Path) -> None:
    async with fleet(tmp_path, **ATTENTIVE) as running:
        tasks = await running.streams(4)
        pid = running.pids()[0]
        running.kill(0, signal.SIGSTOP)
        await until(lambda: running.speaker.stats()["engines_up"] == 1)
        assert running.speaker.stats()["engines"][0]["state"] == "silent"
        assert running.starts() == [1, 1]
        answers = await asyncio.gather(*(collect(running.speaker, spoken(2, seed)) for seed in range(4)))
        assert [pcm for pcm, _ in answers] == [whole(seed, 2) for seed in range(4)]
        done = (await asyncio.wait(tasks, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED))[0]
        assert "was silent for" in str(done.pop().result()[1].error)
        await running.all_up()
        assert pid is not None
        assert gone(pid)
        assert running.starts() == [2, 1]
        assert share(await running.finish(tasks)) == (2, 2)


async def test_a_short_silence_costs_nothing(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, silence_s=0.5) as running:
        tasks = await running.streams(2)
        running.kill(0, signal.SIGSTOP)
        await until(lambda: running.speaker.stats()["engines_up"] == 0)
        waiting = asyncio.ensure_future(collect(running.speaker, spoken(3, 9)))
        await until(lambda: running.speaker.stats()["waiting_for_engine"] == 1)
        running.kill(0, signal.SIGCONT)
        assert (await asyncio.wait_for(waiting, LIMIT_S))[0] == whole(9, 3)
        assert share(await running.finish(tasks)) == (2, 0)
        assert running.starts() == [1]


async def test_requests_wait_for_an_engine_within_bounds(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, wait_s=0.6, max_waiting=2) as running:
        running.set(start_s=300)
        running.kill(0)
        await until(lambda: running.speaker.stats()["engines_up"] == 0)
        running.speaker._engines[0].start_s = 0.1  # as far as it knows
        waiting = [asyncio.ensure_future(collect(running.speaker, spoken())) for _ in range(2)]
        await until(lambda: running.speaker.stats()["waiting_for_engine"] == 2)
        with pytest.raises(NotReady, match="enough requests wait") as refusal:
            await collect(running.speaker, spoken())
        assert refusal.value.retry_after_s is not None
        for task in waiting:
            with pytest.raises(NotReady, match="no engine is up") as refusal:
                await asyncio.wait_for(task, LIMIT_S)
            assert refusal.value.retry_after_s is not None
            assert refusal.value.retry_after_s >= 1
        _, outcome = await collect(running.speaker, spoken(timeout_s=0.2))
        assert (outcome.reason, outcome.num_frames) == ("timeout", 0)
        running.set()
        await running.all_up()
        assert (await collect(running.speaker, spoken(3, 9)))[0] == whole(9, 3)


async def test_nobody_waits_for_an_engine_that_cannot_be_up_in_time(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, wait_s=5.0, restart_s=200.0, restart_max_s=200.0) as running:
        running.kill(0)
        await until(lambda: running.speaker.stats()["engines"][0]["state"] == "restarting")
        with pytest.raises(NotReady, match="nor will be soon") as refusal:  # at once, else "no engine is up"
            await collect(running.speaker, spoken())
        assert refusal.value.retry_after_s is not None
        assert 100 < refusal.value.retry_after_s < 300


async def test_how_long_a_codec_is_away_is_its_own_time_not_the_engines_start(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, wait_s=100.0) as running:
        link = running.speaker._engines[0].link
        assert link is not None
        assert link.ready_at is not None
        link.ready_at += 1000  # it took as long to start
        await until(lambda: running.speaker.stats()["engines"][0]["start_s"] > 1000)
        running.set(up=False, codec={"expected_s": 500.0})
        await until(lambda: running.speaker.stats()["engines_up"] == 0)
        with pytest.raises(NotReady, match="nor will be soon") as refusal:
            await collect(running.speaker, spoken())
        assert refusal.value.retry_after_s == 500
        running.set(up=False, codec={"expected_s": 0.0})
        await until(lambda: running.speaker.stats()["engines"][0]["codec"]["expected_s"] == 0)
        waiting = asyncio.ensure_future(collect(running.speaker, spoken(3, 9)))
        await until(lambda: running.speaker.stats()["waiting_for_engine"] == 1 or waiting.done())
        running.set()
        assert (await asyncio.wait_for(waiting, LIMIT_S))[0] == whole(9, 3)


async def test_an_engine_that_came_back_before_its_refusal_was_read_is_asked_again(tmp_path: Path) -> None:
    """Its refusal and its news lay in one burst: nothing more comes that would wake anybody."""
    async with fleet(tmp_path, 1, wait_s=1000.0) as running:
        search = Search("", 1.0, refusals={0: NotReady("the engine is ending")})
        engine, _ = await asyncio.wait_for(running.speaker._find(search), LIMIT_S)
        assert engine.index == 0
        late = Search("", 1.0, timeout_s=0.0, refusals={0: NotReady("the engine is ending")})
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(running.speaker._find(late), LIMIT_S)


async def test_a_codec_process_is_counted_as_down_while_its_engine_is_away(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, codec_device="cpu", knobs={"codec": {"state": "ready", "pid": None, "starts": 1}}) as running:
        metrics = Metrics()
        metrics.watch(running.speaker.stats)
        await until(lambda: b'duetts:codec_up{engine="0"} 1.0' in metrics.written())
        running.set(start_s=300)
        running.kill(0)
        await until(lambda: running.speaker.stats()["engines_up"] == 0)
        await until(lambda: b'duetts:codec_up{engine="0"} 0.0' in metrics.written())
        await until(lambda: running.speaker.stats()["engines"][0]["state"] in ("starting", "loading"))
        assert b'duetts:codec_up{engine="0"} 0.0' in metrics.written()


async def test_a_waiting_request_is_served_by_the_engine_that_comes_back(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as running:
        running.kill(0)
        await until(lambda: running.speaker.stats()["engines_up"] == 0)
        assert (await asyncio.wait_for(collect(running.speaker, spoken(3, 9, timeout_s=50.0)), LIMIT_S))[0] == whole(9, 3)


async def test_an_overloaded_engine_hands_on_to_another(tmp_path: Path) -> None:
    async with fleet(tmp_path, knobs={"0": {"places": 0}}) as running:
        for seed in range(4):
            assert (await collect(running.speaker, spoken(3, seed)))[0] == whole(seed, 3)
        assert (await running.speaker.encode_reference(np.ones(8, np.float32))).shape == (4, 1)
        running.set(places=0)
        for asking in (collect(running.speaker, spoken()), running.speaker.encode_reference(np.ones(8, np.float32))):
            with pytest.raises(Overloaded) as refusal:
                await asking
            assert refusal.value.retry_after_s >= 2.5


async def test_an_engine_is_full_while_it_has_all_the_calls_that_it_takes(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as running:
        assert running.speaker._room == ENGINE.max_num_seqs + ENGINE.max_queue
        running.speaker._room = 4
        tasks = await running.streams(3)
        assert not running.speaker.stats()["full"]
        tasks.append(asyncio.ensure_future(collect(running.speaker, spoken(FRAMES, len(tasks)))))
        await until(lambda: running.speaker.stats()["full"])
        assert running.speaker.stats()["retry_after_s"] == 0  # these engines tell of no pace
        running.speaker._engines[0].link.stats["step_s"] = 0.01  # type: ignore[union-attr]
        assert FRAMES * 0.005 < running.speaker.stats()["retry_after_s"] <= (FRAMES + 1) * 0.01
        assert share(await running.finish(tasks)) == (len(tasks), 0)
        assert not running.speaker.stats()["full"]


async def test_leaving_frees_the_engine(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, knobs={"frame_s": 0.01}) as running:
        for _ in range(3):
            async with aclosing(running.speaker.speak(spoken(3000))) as stream:
                assert isinstance(await anext(stream), Chunk)
        await until(lambda: running.speaker.stats()["finished"] == {"aborted": 3})
        assert running.speaker.stats()["open"] == 0


@pytest.mark.parametrize(("error", "kind"), [("CheckpointError", CheckpointError), ("NotEnoughMemory", NotEnoughMemory)])
async def test_a_first_start_that_cannot_help_is_raised_at_once(tmp_path: Path, error: str, kind: type[DuettsError]) -> None:
    turn(tmp_path, **{"1": {"start_error": error}})
    patient = replace(QUICK, engines=2, restart_s=300.0, restart_max_s=300.0)
    with pytest.raises(kind, match=r"folder is empty|9 GB"):
        await asyncio.wait_for(RemoteSpeaker.start(tmp_path, ENGINE, patient, FAKE), LIMIT_S)


async def test_a_process_that_ends_before_it_is_up_is_tried_a_few_times(tmp_path: Path) -> None:
    turn(tmp_path, exit=9)
    with pytest.raises(EngineFailure, match="ended with code 9"):
        await RemoteSpeaker.start(tmp_path, ENGINE, QUICK, FAKE)


async def test_a_command_that_is_not_there_is_an_engine_failure(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="cannot be started"):
        await RemoteSpeaker.start(tmp_path, ENGINE, QUICK, ("/no/such/program",))


async def test_a_start_that_takes_too_long_is_a_failure(tmp_path: Path) -> None:
    turn(tmp_path, start_s=300)
    with pytest.raises(EngineFailure, match=r"not ready within 0\.3 s"):
        await RemoteSpeaker.start(tmp_path, ENGINE, replace(QUICK, start_limit_s=0.3), FAKE)


async def test_later_starts_are_tried_again_whatever_they_say(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, wait_s=0.1) as running:
        running.set(start_error="NotEnoughMemory")
        running.kill(0)
        await until(lambda: running.starts()[0] >= 3)
        with pytest.raises(NotReady):
            await collect(running.speaker, spoken())
        running.set()
        await running.all_up()
        assert (await collect(running.speaker, spoken(3, 9)))[0] == whole(9, 3)


async def test_a_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    turn(tmp_path, start_s=300)
    starting = asyncio.ensure_future(RemoteSpeaker.start(tmp_path, ENGINE, replace(QUICK, engines=2), FAKE))
    await until(lambda: len(children()) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() == []


def children() -> list[int]:
    """The live processes that this one has started and that run fake engines."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getpid() and FAKE[2] in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


async def test_closing_ends_everything(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        tasks = await running.streams(4)
        pids = running.pids()
        await asyncio.wait_for(running.speaker.close(), LIMIT_S)
        for _, outcome in await asyncio.gather(*tasks):
            assert isinstance(outcome.error, Aborted)
        assert all(gone(pid) for pid in pids if pid)
        assert children() == []
        with pytest.raises(NotReady):
            await collect(running.speaker, spoken())


async def test_closing_while_an_engine_waits_for_its_restart_or_is_starting(tmp_path: Path) -> None:
    for wait, states in ((300.0, ["restarting"]), (0.01, ["starting", "loading"])):
        async with fleet(tmp_path, 1, restart_s=wait, restart_max_s=300.0, wait_s=1000.0) as running:
            running.set(start_s=300)
            engines = running.speaker._engines
            running.kill(0)
            await until(lambda engines=engines, states=states: engines[0].state in states and not engines[0].takes_work)
            waiting = asyncio.ensure_future(collect(running.speaker, spoken()))
            await until(lambda running=running: running.speaker.stats()["waiting_for_engine"] == 1)
            await asyncio.wait_for(running.speaker.close(), LIMIT_S)
            with pytest.raises(NotReady):
                await waiting
        assert children() == []


async def test_an_engine_with_a_dead_part_is_started_again(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        tasks = await running.streams(4)
        running.set(**{"frame_s": SLOW, "0": {"alive": False}})
        await until(lambda: running.starts()[0] == 2)
        running.set(frame_s=SLOW)
        await running.all_up()
        done = await running.finish(tasks)
        assert sorted(outcome.reason for _, outcome in done) == ["aborted"] * 2 + ["length"] * 2


async def test_signals_to_all_processes_are_not_meant_for_engines(tmp_path: Path) -> None:
    """As terminals and service managers send them. New work is taken as ever: a long text has later pieces."""
    async with fleet(tmp_path) as running:
        tasks = await running.streams(4)
        pids = running.pids()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            for index in range(2):
                running.kill(index, number)
        assert (await collect(running.speaker, spoken(3, 9)))[0] == whole(9, 3)
        assert share(await running.finish(tasks)) == (4, 0)
        assert (running.pids(), running.starts()) == (pids, [1, 1])


async def test_engines_can_be_reached_over_tcp(tmp_path: Path) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with fleet(tmp_path, 1, listen=f"tcp://127.0.0.1:{port}") as running:
        assert (await collect(running.speaker, spoken(30, 9)))[0] == whole(9, 30)
        running.kill(0)
        await until(lambda: running.speaker.stats()["engines_up"] == 0)
        assert (await collect(running.speaker, spoken(30, 9)))[0] == whole(9, 30)


SERVER = """
import asyncio, json, sys
from pathlib import Path
from duetts.config import EngineConfig, ProcessConfig
from duetts.engine.remote import RemoteSpeaker

async def main():
    speaker = await RemoteSpeaker.start(Path(sys.argv[1]), EngineConfig(device="cpu"), ProcessConfig(engines=2), sys.argv[2:])
    print(json.dumps([engine["pid"] for engine in speaker.stats()["engines"]]), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_engines_end_when_their_server_does_however_it_does(tmp_path: Path, ending: int) -> None:
    """Also the one that is stopped and could not notice by itself. Nothing of theirs stays in the temporary folder."""
    command = [sys.executable, "-c", SERVER, str(tmp_path), *FAKE]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    assert server.stdout is not None
    pids = json.loads(await asyncio.to_thread(server.stdout.readline))
    try:
        os.kill(pids[1], signal.SIGSTOP)
        server.send_signal(ending)
        await until(lambda: all(gone(pid) for pid in pids))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.mark.parametrize("victim", ["server", "engine"])
async def test_nothing_stays_on_disk_of_an_engine_that_is_killed_while_it_loads(
    tmp_path: Path, temporary: Path, victim: str
) -> None:
    """It has not even opened its socket. Whoever dies: the codec process of an engine is started by that, as this one here."""
    told = tmp_path / "pid"
    loading = f"import os, sys; open({str(told)!r}, 'w').write(str(os.getpid())); sys.stdin.buffer.read()"
    command = [sys.executable, "-c", SERVER.replace("engines=2", "engines=1"), str(tmp_path), sys.executable, "-c", loading]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        await until(lambda: told.exists() and told.read_text() != "")
        pid = int(told.read_text())
        os.kill(server.pid if victim == "server" else pid, signal.SIGKILL)
        await until(lambda: gone(pid))
        if victim == "engine":
            await until(lambda: int(told.read_text() or pid) != pid)  # it is started again
        assert os.listdir(temporary) == []
    finally:
        server.kill()
        server.wait()


def test_the_wait_before_a_restart_doubles_up_to_a_limit() -> None:
    config = ProcessConfig()
    assert [backoff_s(failures, config) for failures in range(9)] == [0.5, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff_s(10**6, config) == 30


def test_sockets_lie_in_a_folder_with_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert short_folder() == tempfile.gettempdir()
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with tempfile.TemporaryDirectory(prefix="duetts-", dir=short_folder()) as folder, listen_at(f"ipc://{folder}/engine"):
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "options",
    [
        {"engines": 0}, {"listen": "ipc:///tmp/x"}, {"listen": "tcp://host"}, {"heartbeat_s": 0}, {"silence_s": 0.3},
        {"stuck_s": 0.5}, {"restart_s": 40.0}, {"max_waiting": -1},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ProcessConfig(**options)
