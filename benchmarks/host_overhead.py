"""Time of a frame step that is not the model's: the real engine on parts that compute nothing. Writes JSON.

    python benchmarks/host_overhead.py [--rows 1 8 64 256] [--frames 400] [--repeats 5] [--output FILE]

The engine is built as on a GPU: loop, codec and references on one thread, the host one step behind. Every row is a request; its
consumer is a task of an asyncio loop on another thread of the same interpreter. `complete`: nobody listens while it is
made, chunks of 16 frames. `grown`: listeners, chunks as the engine grows them. `each frame`: listeners who are handed every
frame alone, the most that there can be. A step counts when all rows drew in it and no prompt was read.

`wall` is the time from one step's begin to the next one's, so it has in it what the other thread takes of the interpreter.
`loop` is processor time of the engine's thread, `all` that of the whole process; both are means over the counted stretch.
The repeat with the smallest median counts.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from duetts import __version__
from duetts.engine.engine import Engine
from duetts.engine.inprocess import InProcessSpeaker
from duetts.engine.pages import Block, pages_for
from duetts.engine.parts import Decoded, Drawn, Parts, Result
from duetts.engine.playout import ChunkPolicy
from duetts.engine.scheduler import Room
from duetts.engine.sequence import Sequence
from duetts.types import Chunk, Int32, Sampling, SpeakerInfo, Utterance

BOOKS, FRAME_LENGTH, SAMPLE_RATE, END = 10, 2048, 44100, 1
PROMPT = 200
KINDS = {"complete": (False, 16), "grown": (True, 16), "each frame": (True, 1)}


class NullDevice:
    """Hands out columns that were made before."""

    lag = 1

    def __init__(self, rows: int) -> None:
        self._columns = np.random.default_rng(0).integers(2, 1024, (rows, 1 + BOOKS)).astype(np.int32)

    def read(self, sequence: Sequence, block: Block) -> None:
        pass

    def launch(self, rows: list[Sequence]) -> Result:
        columns = self._columns[: len(rows)]
        return Drawn(columns)


class NullVocoder:
    """Hands out silence that was made before."""

    quantum: int | None = None

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._silence = [bytes(2 * FRAME_LENGTH * frames) for frames in range(17)]

    def reset(self, slot: int) -> None:
        pass

    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> Decoded:
        return Decoded([self._silence[codes.shape[2]]] * len(slots))


class NullEncoder:
    """Is never asked."""

    waiting = 0

    def step(self) -> bool:
        return False

    def close(self) -> None:
        pass


@dataclass
class Steps:
    """Turns of the loop, seen from its thread: begin of each that counts, and processor times around the whole."""

    begins: list[float] = field(default_factory=list)
    loop_s: list[float] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)

    def drive(self, engine: Engine, rows: int) -> None:
        """The engine's own loop, with a clock in it."""
        drawn = 0
        while True:
            begin, loop_s, all_s = time.perf_counter(), time.thread_time(), time.process_time()
            if engine._draining or not engine._turn():
                return
            full = engine._rows - drawn == rows
            drawn = engine._rows
            if full:
                self.begins.append(begin)
                self.loop_s.append(loop_s)
                self.all_s.append(all_s)

    def result(self) -> dict[str, float]:
        kept = slice(len(self.begins) // 10, -1)  # the first tenth is warm-up, the last step has no next
        wall = np.diff(self.begins)[kept] * 1e6
        median, p99 = np.percentile(wall, [50, 99])
        count = len(self.begins[kept]) - 1
        loop_us, all_us = ((times[kept][-1] - times[kept][0]) / count * 1e6 for times in (self.loop_s, self.all_s))
        values = {"median_us": median, "p99_us": p99, "mean_us": wall.mean(), "loop_us": loop_us, "all_us": all_us}
        return {"steps": len(wall), **{name: round(float(value), 1) for name, value in values.items()}}


def build(rows: int, largest: int, frames: int) -> Engine:
    length = PROMPT + frames
    room = Room(
        slots=rows, rows=rows, block=512, length=length, frame_s=FRAME_LENGTH / SAMPLE_RATE, rereads=True, shared_thread=True
    )  # fmt: skip
    parts = Parts(
        NullDevice(rows), NullVocoder(2 * rows), NullEncoder(), room, rows * pages_for(length), END, rows,
        ChunkPolicy(min(2, largest), largest),
    )  # fmt: skip
    return Engine(parts, start=False)


async def listen(speaker: InProcessSpeaker, number: int, frames: int, streaming: bool) -> int:
    prompt = np.full((1 + BOOKS, PROMPT), number, np.int32)
    utterance = Utterance(f"r{number}", prompt, Sampling(), number, frames, streaming=streaming)
    heard = 0
    async for item in speaker.speak(utterance):
        heard += item.num_frames if isinstance(item, Chunk) else 0
    return heard


def measure(rows: int, kind: str, frames: int) -> dict[str, float]:
    streaming, largest = KINDS[kind]
    engine = build(rows, largest, frames)
    info = SpeakerInfo("null", SAMPLE_RATE, FRAME_LENGTH, BOOKS, PROMPT + frames)
    steps = Steps()
    thread = threading.Thread(target=steps.drive, args=(engine, rows))

    async def run() -> list[int]:
        speaker = InProcessSpeaker(engine, info)
        tasks = [asyncio.create_task(listen(speaker, number, frames, streaming)) for number in range(rows)]
        await asyncio.sleep(0)
        thread.start()
        return await asyncio.gather(*tasks)

    heard = asyncio.run(run())
    assert heard == [frames] * rows, "frames were lost"
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join()
    thread.join()
    return steps.result()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    arguments.add_argument("--frames", type=int, default=400)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--output", type=Path)
    given = arguments.parse_args()
    results: list[dict[str, Any]] = []
    for rows in given.rows:
        for kind in KINDS:
            frames = given.frames * max(1, 16 // rows)
            found = [measure(rows, kind, frames) for _ in range(given.repeats)]
            best = min(found, key=lambda each: each["median_us"])
            medians = [each["median_us"] for each in found]
            results.append({"rows": rows, "kind": kind, **best, "median_us_of_repeats": statistics.median(medians)})
            print(json.dumps(results[-1]))
    if given.output:
        report = {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "duetts": __version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
            "results": results,
        }
        given.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
