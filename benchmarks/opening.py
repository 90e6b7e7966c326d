"""Where the time to first audio goes, inside one engine: milliseconds from `submit` to each mark, medians over requests that
come one after another, alone or beside others that already run.

    python benchmarks/opening.py MODEL [--device cuda] [--dummy] [--beside 0 15 63] [--repeats 20] [--positions 60]

Marks: it is `heard` by the loop, its prompt's first block is started (`read`), its first three steps have landed (`step 1`
and so on), its first codec call is started (`decoding`), its first samples are handed over (`sound`). Prints a table.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from duetts.config import EngineConfig
from duetts.engine.inprocess import InProcessSpeaker, start_speaker
from duetts.types import Chunk, Sampling, Utterance

MARKS = ("heard", "read", "step 1", "step 2", "step 3", "decoding", "sound")


class Watch:
    """Notes when the engine does what for one request; the others go by unseen."""

    def __init__(self, engine: Any) -> None:
        self.request, self.began, self.marks = "", 0.0, dict[str, float]()
        self._wrap(engine._scheduler, "add", lambda sequence: self.note("heard", [sequence]))
        self._wrap(engine, "_read", lambda sequence, _: self.note("read", [sequence]))
        self._wrap(engine._codec, "_launch", lambda parts: self.note("decoding", [part.stream.sequence for part in parts]))
        self._wrap(engine, "_land", lambda flight: self.landed(flight.rows))
        self._landed = 0

    def _wrap(self, owner: Any, name: str, noted: Callable[..., None]) -> None:
        work = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            result = work(*arguments, **named)
            noted(*arguments)
            return result

        setattr(owner, name, wrapped)

    def start(self, request: str) -> None:
        self.request, self.marks, self._landed = request, {}, 0
        self.began = time.perf_counter()

    def note(self, mark: str, sequences: Any) -> None:
        if mark not in self.marks and any(one.utterance.request_id == self.request for one in sequences):
            self.marks[mark] = time.perf_counter() - self.began

    def landed(self, rows: Any) -> None:
        if self._landed < 3 and any(one.utterance.request_id == self.request for one in rows):
            self._landed += 1
            self.marks[f"step {self._landed}"] = time.perf_counter() - self.began


def utterance(request: str, positions: int, frames: int, codebooks: int) -> Utterance:
    """Text of so many positions, no two alike."""
    prompt = np.zeros((1 + codebooks, positions), np.int32)
    prompt[0] = np.random.default_rng(crc32(request.encode())).integers(1, 200, positions)
    return Utterance(request, prompt, Sampling(), 1, frames, streaming=True)


async def listen(speaker: InProcessSpeaker, one: Utterance, first: Callable[[], None]) -> None:
    heard = False
    async for item in speaker.speak(one):
        if isinstance(item, Chunk) and not heard:
            heard = True
            first()


async def measure(speaker: InProcessSpeaker, watch: Watch, beside: int, repeats: int, positions: int) -> Mapping[str, float]:
    """Medians of all marks in seconds."""
    codebooks = speaker.info.num_codebooks
    company = [
        asyncio.create_task(listen(speaker, utterance(f"{beside}-{n}", positions, 2000, codebooks), lambda: None))
        for n in range(beside)
    ]
    await asyncio.sleep(1.0 if beside else 0)
    found: list[dict[str, float]] = []
    for number in range(repeats + 1):
        name = f"one-{beside}-{number}"
        one = utterance(name, positions, 8, codebooks)
        watch.start(name)
        await listen(speaker, one, lambda: watch.marks.setdefault("sound", time.perf_counter() - watch.began))
        if number:
            found.append(watch.marks)
        await asyncio.sleep(0.02)
    for task in company:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return {mark: statistics.median(marks[mark] for marks in found if mark in marks) for mark in MARKS if mark in found[0]}


async def run(options: argparse.Namespace) -> None:
    config = EngineConfig(
        device=options.device, load_format="dummy" if options.dummy else "auto", max_num_seqs=max(options.beside) + 2,
        max_model_len=4096,
    )  # fmt: skip
    speaker = await asyncio.to_thread(start_speaker, options.model, config)
    watch = Watch(speaker._engine)
    print("beside  " + "".join(f"{mark:>10}" for mark in MARKS))
    for beside in options.beside:
        found = await measure(speaker, watch, beside, options.repeats, options.positions)
        print(f"{beside:6}  " + "".join(f"{1000 * found.get(mark, float('nan')):10.2f}" for mark in MARKS), flush=True)
    await speaker.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--device", default="auto")
    arguments.add_argument("--dummy", action="store_true", help="random weights")
    arguments.add_argument("--beside", type=int, nargs="+", default=[0, 15, 63], help="streams that run already")
    arguments.add_argument("--repeats", type=int, default=20)
    arguments.add_argument("--positions", type=int, default=60, help="of each prompt")
    asyncio.run(run(arguments.parse_args()))


if __name__ == "__main__":
    main()
