"""An engine process without a model: its speaker hums by seed, and a file in its folder says what goes wrong.

Run as `python fake_engine.py` in the place of `python -m duetts.engine.process`; it starts in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from duetts.engine.host import Started
from duetts.engine.life import Orders, live
from duetts.errors import Aborted, CheckpointError, NotEnoughMemory, Overloaded
from duetts.types import Chunk, Float32, Int32, Outcome, SpeakerInfo, Utterance

FRAME, CODEBOOKS, LENGTH = 8, 4, 4000
VOCABULARY = (500, 100)
INFO = SpeakerInfo("fake", 44100, FRAME, CODEBOOKS, LENGTH)
ERRORS = {"CheckpointError": CheckpointError("the folder is empty"), "NotEnoughMemory": NotEnoughMemory("9 GB are needed")}


def hum(seed: int, index: int) -> Chunk:
    """The frame of this index of this seed."""
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return Chunk(digest[: 2 * FRAME], np.full((CODEBOOKS, 1), digest[0] % 100, np.int32))


class FakeSpeaker:
    """Knobs, read from `knobs.json` or given: frame_s, places, alive, codec, and in a folder's file up, start_s, start_error,
    exit."""

    info = INFO

    def __init__(self, **knobs: Any) -> None:
        self.knobs = knobs
        self.open = 0
        self.frames = 0
        self.finished: Counter[str] = Counter()
        self.voices: Counter[str] = Counter()
        self.closed = False

    async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        if self.open >= self.knobs.get("places", 1000):
            raise Overloaded("full", retry_after_s=3.5)
        self.open += 1
        self.voices[utterance.voice_key] += 1
        reason = "aborted"
        try:
            for index in range(utterance.max_frames):
                await asyncio.sleep(self.knobs.get("frame_s", 0.0))
                if self.closed:
                    break
                if utterance.request_id == "poison" and index == 3:
                    raise RuntimeError("poisoned")
                if utterance.request_id == "deadly" and index == 3:
                    os.kill(os.getpid(), 9)
                self.frames += 1
                yield hum(utterance.seed, index)
            else:
                reason = "length"
            error = None if reason == "length" else Aborted("closed")
            yield Outcome(reason, index + (error is None), utterance.prompt.shape[1], error=error)  # type: ignore[arg-type]
        finally:
            self.open -= 1
            self.finished[reason] += 1

    async def encode_reference(self, wave: Float32) -> Int32:
        if self.knobs.get("places", 1000) == 0:
            raise Overloaded("full", retry_after_s=2.5)
        await asyncio.sleep(self.knobs.get("frame_s", 0.0))
        return np.full((CODEBOOKS, len(wave) // FRAME), int(wave[0]), np.int32)

    def stats(self) -> dict[str, Any]:
        return {
            "open": self.open, "frames": self.frames, "finished": dict(self.finished), "voices": dict(self.voices),
            "alive": self.knobs.get("alive", True), **({"codec": self.knobs["codec"]} if "codec" in self.knobs else {}),
        }  # fmt: skip

    async def close(self) -> None:
        self.closed = True


class FolderSpeaker(FakeSpeaker):
    """Its knobs are those of its folder at every moment; those of one engine lie under its number."""

    def __init__(self, orders: Orders) -> None:
        super().__init__()
        self._path, self._index = Path(orders.folder) / "knobs.json", str(orders.index)

    @property
    def knobs(self) -> dict[str, Any]:
        values = json.loads(self._path.read_text()) if self._path.exists() else {}
        return {**values, **values.get(self._index, {})}

    @knobs.setter
    def knobs(self, _: dict[str, Any]) -> None: ...


async def start(orders: Orders, _: Callable[[], None]) -> Started:
    return await asyncio.to_thread(start_at, orders)


def start_at(orders: Orders) -> Started:
    speaker = FolderSpeaker(orders)
    began = time.monotonic()
    while time.monotonic() - began < speaker.knobs.get("start_s", 0.0):
        time.sleep(0.01)
    knobs = speaker.knobs
    if "exit" in knobs:
        os._exit(knobs["exit"])
    if "start_error" in knobs:
        raise ERRORS[knobs["start_error"]]
    return Started(speaker, VOCABULARY, lambda: bool(speaker.knobs.get("up", True)))


if __name__ == "__main__":
    live(start)
