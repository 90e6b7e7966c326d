"""Throughput of one engine process and of two of one thread each, through `RemoteSpeaker` and beside it over HTTP. Writes JSON.

    python benchmarks/replicas.py [MODEL] [--seconds 20] [--repeats 3] [--clients 16] [--frames 108] [--output FILE]

The model's dimensions with random weights that never end: every request has exactly `--frames` frames, or nothing is reported.
A closed loop of the same number of clients, every other one a listener, asks one engine or two; audio counts when it arrives
while all clients are busy. Every case has engines of its own, started anew, and cases take turns in each repeat. The cases:

- `core`: each engine process, with all its threads, may use one core of its own. An engine on a CPU has two threads that work,
  one for the language model and one for the codec, so only this compares one core with two.
- `free`: nobody is held to a core, as served. One engine then has a part of the second core already.
- `http`: as `core`, with `duetts serve` before the engines and HTTP clients.

Client and server use the same cores as the engines, wherever the system puts them. `cores` are the processor time of engines,
server and client over the time measured. `speedup` is that of two engines over one: of medians, and of the repeats.
"""

import argparse
import asyncio
import os
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from duetts.conditions import program, write_json
from duetts.config import EngineConfig, ProcessConfig
from duetts.embedded import mini_folder
from duetts.engine.remote import RemoteSpeaker
from duetts.model_config import read_codec_config, read_model_config
from duetts.text.prompt import build_prompt
from duetts.text.tokenizer import Tokenizer
from duetts.types import Outcome, Sampling, Utterance

TEXT = "Number {}: the quick brown fox jumps over the lazy dog, and then it takes a rest."
CASES = ("core", "free", "http")
SEQUENCES = 8  # of an engine
TICKS = os.sysconf("SC_CLK_TCK")

Ask = Callable[[int, Callable[[int], None]], Awaitable[int]]  # number and a listener of frames -> frames in all


@dataclass
class Load:
    """Clients who ask one request after another. `heard` counts frames as they arrive, `ended` requests."""

    ask: Ask
    frames: int
    heard: int = 0
    ended: int = 0
    _number: int = 0
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def start(self, clients: int) -> None:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        while True:
            self._number += 1
            frames = await self.ask(self._number, self._hear)
            if frames != self.frames:
                raise RuntimeError(f"a request had {frames} frames, not {self.frames}")
            self.ended += 1

    def _hear(self, frames: int) -> None:
        self.heard += frames

    async def during(self, seconds: float) -> None:
        """Waits so long. Raises what a client raised."""
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def processes() -> Iterator[tuple[int, int, list[str]]]:
    """Id, parent and the fields of /proc/ID/stat after the name of each process."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        yield int(entry.name), int(fields[1]), fields


def family(root: int) -> set[int]:
    """A process and all that descend from it."""
    found, parents = {root}, {pid: parent for pid, parent, _ in processes()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def used_s(pids: set[int]) -> float:
    """Processor seconds of these processes so far."""
    return sum(int(fields[11]) + int(fields[12]) for pid, _, fields in processes() if pid in pids) / TICKS


def hold(pids: set[int], core: int) -> None:
    """Every thread of the processes stays on one core from now on, and so do those that they start."""
    held: set[int] = set()
    while fresh := {int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()} - held:
        for thread in fresh:
            os.sched_setaffinity(thread, {core})
        held |= fresh


class Bench:
    """One model, one load, and the cases."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._tokenizer = Tokenizer.load(folder, read_model_config(folder))
        self._codec = read_codec_config(folder)
        self._cores = sorted(os.sched_getaffinity(0))

    async def measure(self, case: str, engines: int) -> dict[str, Any]:
        """One case with so many engines, started for it."""
        options = self._options
        async with (self._served if case == "http" else self._spoken)(engines) as (ask, server, pids):
            families = [family(pid) for pid in pids]
            if case != "free":
                for number, members in enumerate(families):
                    hold(members, self._cores[number % len(self._cores)])
            groups = {"engines": set().union(*families), "server": {server} - {os.getpid()}, "client": {os.getpid()}}
            load = Load(ask, options.frames)
            load.start(options.clients)
            try:
                while load.ended < options.clients:
                    await load.during(0.1)
                before, heard, ended = {name: used_s(pids) for name, pids in groups.items()}, load.heard, load.ended
                began = time.perf_counter()
                await load.during(options.seconds)
                lasted = time.perf_counter() - began
                cores = {name: round((used_s(pids) - before[name]) / lasted, 3) for name, pids in groups.items()}
                audio_s = (load.heard - heard) * self._codec.frame_length / self._codec.sample_rate
                return {"audio_s_per_s": audio_s / lasted, "requests": load.ended - ended, "seconds": lasted, "cores": cores}
            finally:
                await load.stop()

    @asynccontextmanager
    async def _spoken(self, engines: int) -> AsyncIterator[tuple[Ask, int, list[int]]]:
        """Engines behind a speaker in this process."""
        config = EngineConfig(
            device="cpu", load_format="dummy", cpu_threads=engines, max_num_seqs=SEQUENCES, max_queue=self._options.clients,
            max_model_len=1024,
        )  # fmt: skip
        speaker = await RemoteSpeaker.start(self._folder, config, ProcessConfig(engines=engines))

        async def ask(number: int, hear: Callable[[int], None]) -> int:
            prompt = build_prompt(self._tokenizer, [], [], TEXT.format(number))
            utterance = Utterance(
                f"r{number}", prompt, Sampling(), number, self._options.frames, streaming=number % 2 == 0
            )  # fmt: skip
            async for item in speaker.speak(utterance):
                if isinstance(item, Outcome):
                    return item.num_frames
                hear(item.num_frames)
            raise RuntimeError("a stream had no outcome")

        try:
            yield ask, os.getpid(), [engine["pid"] for engine in speaker.stats()["engines"]]
        finally:
            await speaker.close()

    @asynccontextmanager
    async def _served(self, engines: int) -> AsyncIterator[tuple[Ask, int, list[int]]]:
        """The same engines behind `duetts serve`, asked over HTTP."""
        command = [
            sys.executable, "-m", "duetts", "serve", str(self._folder), "--port", "0", "--device", "cpu", "--load-format",
            "dummy", "--engines", str(engines), "--cpu-threads", str(engines), "--max-num-seqs", str(SEQUENCES), "--max-queue",
            str(self._options.clients), "--max-model-len", "1024", "--default-voice", "none",
        ]  # fmt: skip
        server = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert server.stderr is not None, "it was started with a pipe"
        log, port = b"", None
        while port is None:
            line = await server.stderr.readline()
            log += line
            port = re.search(rb"listening on http://127\.0\.0\.1:(\d+)", line)
            if not line:
                raise RuntimeError(log.decode())
        reading = asyncio.create_task(_pass_over(server.stderr))
        limits = httpx.Limits(max_connections=None)
        base = f"http://127.0.0.1:{int(port[1])}"
        try:
            async with httpx.AsyncClient(base_url=base, timeout=600, limits=limits, trust_env=False) as http:
                while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110 it is asked, it does not tell
                    await asyncio.sleep(0.2)
                pids = [pid for pid, parent, _ in processes() if parent == server.pid and _is_engine(pid)]
                yield self._over_http(http), server.pid, pids
        finally:
            server.kill()
            await server.wait()
            await reading

    def _over_http(self, http: httpx.AsyncClient) -> Ask:
        frame_bytes = 2 * self._codec.frame_length

        async def ask(number: int, hear: Callable[[int], None]) -> int:
            fields = {
                "input": TEXT.format(number), "response_format": "pcm", "seed": number, "max_new_tokens": self._options.frames,
                "sample_rate": self._codec.sample_rate, **({"stream_format": "audio"} if number % 2 == 0 else {}),
            }  # fmt: skip
            size = 0
            async with http.stream("POST", "/v1/audio/speech", json=fields) as answer:
                answer.raise_for_status()
                async for part in answer.aiter_raw():
                    hear((size + len(part)) // frame_bytes - size // frame_bytes)
                    size += len(part)
            return size // frame_bytes

        return ask


def _is_engine(pid: int) -> bool:
    try:
        return b"duetts.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def _pass_over(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each case with one engine and with two, and how much more two give."""
    found: dict[str, Any] = {}
    for case in dict.fromkeys(run["case"] for run in runs):
        rates = {
            engines: [run["audio_s_per_s"] for run in runs if (run["case"], run["engines"]) == (case, engines)]
            for engines in (1, 2)
        }
        one, two = (statistics.median(rates[engines]) for engines in (1, 2))
        found[case] = {
            "audio_s_per_s_one": one, "audio_s_per_s_two": two, "speedup": two / one,
            "speedups": [late / early for early, late in zip(rates[1], rates[2], strict=True)],
        }  # fmt: skip
    return found


async def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    bench, runs = Bench(folder, options), []
    for repeat in range(options.repeats):
        for case in options.cases:
            for engines in (1, 2):
                found = await bench.measure(case, engines)
                runs.append({"repeat": repeat, "case": case, "engines": engines, **found})
                print(runs[-1], file=sys.stderr, flush=True)
    return {"results": summary(runs), "runs": runs}


def main(given: list[str]) -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", nargs="?", type=Path, help="folder; duetts-mini if absent")
    arguments.add_argument("--seconds", type=float, default=20.0, help="of each measurement, after all clients had one answer")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--clients", type=int, default=16)
    arguments.add_argument("--frames", type=int, default=108, help="frames of each request, 21.5 a second")
    arguments.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args(given)
    conditions = {"command": [Path(__file__).name, *given], **program()}  # the load is that before it begins
    report = {**conditions, **asyncio.run(run(options.model or mini_folder(), options))}
    for case, found in report["results"].items():
        print(case, {name: value if isinstance(value, list) else round(value, 3) for name, value in found.items()})
    if options.output:
        write_json(options.output, report)


if __name__ == "__main__":
    main(sys.argv[1:])
