"""`python -m duetts.engine.null`: an engine process without a model, for measuring what clients and the server can carry.

It answers every utterance at once with `max_frames` frames of a quiet tone, in chunks that grow as an engine's do. It reads the
dimensions of its folder, no weights.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from duetts.config import EngineConfig
from duetts.engine.host import Started
from duetts.engine.life import Orders, live
from duetts.model_config import read_codec_config, read_model_config
from duetts.types import Chunk, Float32, Int32, Outcome, SpeakerInfo, Timings, Utterance

NULL_COMMAND = (sys.executable, "-P", "-m", "duetts.engine.null")
DEFAULT_MODEL_LEN = 8192
TONE_HZ = 220


class NullSpeaker:
    """A `Speaker` that computes nothing."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        model, codec = read_model_config(folder), read_codec_config(folder)
        longest = min(model.slow.max_positions, config.max_model_len or DEFAULT_MODEL_LEN)
        self.info = SpeakerInfo(
            model.model_type, codec.sample_rate, codec.frame_length, model.num_codebooks, longest, "dummy", "null", "none"
        )
        self.vocabulary = model.slow.vocab_size, max(codec.semantic_size, codec.residual_size)
        self._sizes = config.first_chunk, config.largest_chunk
        time_s = np.arange(config.largest_chunk * codec.frame_length) / codec.sample_rate
        tone = np.asarray(1000 * np.sin(2 * np.pi * TONE_HZ * time_s), "<i2").tobytes()
        self._pcm = [tone[: 2 * codec.frame_length * frames] for frames in range(config.largest_chunk + 1)]
        self._codes = [np.zeros((model.num_codebooks, frames), np.int32) for frames in range(config.largest_chunk + 1)]
        self._frames = self._open = 0
        self._finished: Counter[str] = Counter()

    async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        """Chunks, then one outcome. Others have their turn between the chunks."""
        self._open += 1
        reason = "aborted"
        try:
            first, largest = self._sizes
            left, size = utterance.max_frames, min(utterance.first_chunk or first, largest)
            while left:
                size = min(size, left)
                left -= size
                self._frames += size
                yield Chunk(self._pcm[size], self._codes[size])
                await asyncio.sleep(0)
                size = min(2 * size, largest)
            reason = "length"
            yield Outcome("length", utterance.max_frames, utterance.prompt.shape[1], Timings())
        finally:
            self._open -= 1
            self._finished[reason] += 1

    async def encode_reference(self, wave: Float32) -> Int32:
        """Codes of silence."""
        return np.zeros((self.info.num_codebooks, -(-len(wave) // self.info.frame_length)), np.int32)

    def stats(self) -> dict[str, Any]:
        return {"alive": True, "open": self._open, "frames": self._frames, "finished": dict(self._finished)}

    async def close(self) -> None:
        """There is nothing to close."""


async def start_null(orders: Orders, _: Callable[[], None]) -> Started:
    """The engine of the orders. Raises what its folder's configuration raises."""
    speaker = NullSpeaker(Path(orders.folder), orders.engine)
    return Started(speaker, speaker.vocabulary)


if __name__ == "__main__":
    live(start_null)
