"""The engine without a model keeps the promises of a speaker."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import numpy as np

from duetts.config import EngineConfig
from duetts.engine.null import NullSpeaker
from duetts.types import Chunk, Outcome, Sampling, Utterance


def utterance(frames: int, first_chunk: int = 0) -> Utterance:
    return Utterance("r", np.zeros((5, 7), np.int32), Sampling(), 1, frames, streaming=True, first_chunk=first_chunk)


async def test_it_says_what_is_asked_in_chunks_that_grow(tiny_folder: Path) -> None:
    speaker = NullSpeaker(tiny_folder, EngineConfig())
    items = [item async for item in speaker.speak(utterance(51))]
    *chunks, outcome = items
    assert [chunk.num_frames for chunk in chunks if isinstance(chunk, Chunk)] == [2, 4, 8, 16, 16, 5]
    assert all(isinstance(chunk, Chunk) and len(chunk.pcm) == 2 * 2048 * chunk.num_frames for chunk in chunks)
    assert isinstance(outcome, Outcome)
    assert (outcome.reason, outcome.num_frames, outcome.input_tokens) == ("length", 51, 7)
    items = [item async for item in speaker.speak(utterance(3, first_chunk=1))]
    assert [item.num_frames for item in items if isinstance(item, Chunk)] == [1, 2]
    assert speaker.stats() == {"alive": True, "open": 0, "frames": 54, "finished": {"length": 2}}


async def test_whoever_leaves_ends_it(tiny_folder: Path) -> None:
    speaker = NullSpeaker(tiny_folder, EngineConfig())
    async with aclosing(speaker.speak(utterance(51))) as items:
        await anext(items)
        assert speaker.stats()["open"] == 1
    assert speaker.stats() == {"alive": True, "open": 0, "frames": 2, "finished": {"aborted": 1}}
    assert (await speaker.encode_reference(np.zeros(2049, np.float32))).shape == (4, 2)
