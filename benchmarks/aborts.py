"""Memory of a process in which streams are aborted, one after another for a thousand times. Writes JSON.

    python benchmarks/aborts.py [MODEL] [--streams 1000] [--warm-up 100] [--at-once 8] [--output FILE]

Each request streams a text of some sentences through synthesizer and engine in this process, and is ended at a random
moment: while it waits or its reference is encoded, or after so many chunks. A fifth has a reference, half of these one that
was never seen. Resident memory is read from /proc every hundred streams, after a collection of garbage, with nothing
running. The cache of keys and values is small enough for the warm-up to fill it, since untouched memory does not count as
resident.
"""

import argparse
import asyncio
import gc
import io
import json
import os
import platform
import random
import sys
import time
import wave
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from duetts import __version__
from duetts.config import EngineConfig, Limits
from duetts.embedded import mini_folder
from duetts.engine.inprocess import start_speaker
from duetts.synthesizer import Synthesizer
from duetts.types import Reference, SpeechRequest

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and then it takes a rest.",
    "Nobody had told the children how far it was to the sea.",
    "It rained.",
    "When the lights went out, every one of the 42 guests began to count aloud.",
)  # fmt: skip


def resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("this system does not tell its resident memory")


def clip(seed: int) -> Reference:
    """One to two seconds of noise as a WAV file."""
    noise = np.random.default_rng(seed)
    samples = (noise.normal(0, 3000, noise.integers(44100, 88200))).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(44100)
        writer.writeframes(samples.tobytes())
    return Reference(file.getvalue(), "A reference.")


class Crowd:
    """People who leave."""

    def __init__(self, synthesizer: Synthesizer, seed: int) -> None:
        self._synthesizer = synthesizer
        self._chance = random.Random(seed)
        self._known = [clip(number) for number in range(4)]
        self._number = 0
        self.left: Counter[str] = Counter()

    def request(self) -> SpeechRequest:
        self._number += 1
        chance = self._chance
        text = " ".join(chance.choices(SENTENCES, k=chance.randrange(1, 4)))
        references = ()
        if self._number % 5 == 0:
            references = (chance.choice(self._known) if self._number % 10 else clip(1000 + self._number),)
        return SpeechRequest(
            text, references, seed=self._number, streaming=chance.random() < 0.7, request_id=f"r{self._number}"
        )  # fmt: skip

    async def leave_one(self) -> None:
        """A stream that is ended after some chunks, or after some time at the latest."""
        chunks, patience_s = self._chance.randrange(1, 8), self._chance.choice((0.05, 0.5, 5.0, 60.0))
        where = "before audio"
        try:
            async with asyncio.timeout(patience_s):
                speech = await self._synthesizer.start(self.request())
                try:
                    async for _ in speech:
                        where = "after audio"
                        chunks -= 1
                        if chunks == 0:
                            break
                finally:
                    await speech.aclose()
        except TimeoutError:
            where += ", out of patience"
        self.left[where] += 1

    async def leave(self, count: int, at_once: int) -> None:
        places = asyncio.Semaphore(at_once)

        async def one() -> None:
            async with places:
                await self.leave_one()

        await asyncio.gather(*(one() for _ in range(count)))


async def quiet(synthesizer: Synthesizer) -> dict[str, Any]:
    """The engine's figures once nothing is open or encoded."""
    while (stats := synthesizer.stats())["open"] or stats["encoding"]:  # noqa: ASYNC110 it is asked, it does not tell
        await asyncio.sleep(0.05)
    return stats


async def measure(synthesizer: Synthesizer, options: argparse.Namespace) -> dict[str, Any]:
    crowd = Crowd(synthesizer, options.seed)
    memory: list[dict[str, float]] = []
    began = time.perf_counter()
    counts = [options.warm_up, *[100] * (options.streams // 100)]
    for count in counts:
        await crowd.leave(count, options.at_once)
        stats = await quiet(synthesizer)
        gc.collect()
        memory.append({"streams": crowd._number, "resident_mb": round(resident_mb(), 1), "objects": len(gc.get_objects())})
        print(json.dumps({**memory[-1], "s": round(time.perf_counter() - began), **stats["finished"]}), file=sys.stderr)
    first, last = memory[0]["resident_mb"], memory[-1]["resident_mb"]
    return {
        "growth_percent": round(100 * (last - first) / first, 2),
        "memory": memory,
        "left": dict(crowd.left),
        "finished": stats["finished"],
        "pages": {name: stats[name] for name in ("pages", "pages_used", "pages_cached", "pages_evicted")},
        "frames": stats["frames"],
        "seconds": round(time.perf_counter() - began),
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(options.model) if options.model else mini_folder()
    config = EngineConfig(device="cpu", max_model_len=1024, kv_positions=2048, cpu_threads=1)
    synthesizer = Synthesizer(folder, start_speaker(folder, config), Limits(reference_disk_bytes=0))
    try:
        return await measure(synthesizer, options)
    finally:
        await synthesizer.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", nargs="?", help="folder; duetts-mini if absent")
    arguments.add_argument("--streams", type=int, default=1000)
    arguments.add_argument("--warm-up", type=int, default=100)
    arguments.add_argument("--at-once", type=int, default=8)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    report = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "duetts": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **asyncio.run(run(options)),
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
