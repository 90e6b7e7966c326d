"""The codec in a process of its own on a GPU, the second one where there are two: the codes and the sound of one process."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from duetts.config import EngineConfig, ProcessConfig
from duetts.engine.remote import RemoteSpeaker
from duetts.types import Chunk, Int32, Outcome, Sampling, Utterance

pytestmark = pytest.mark.gpu

FRAMES = 40
ENGINE = EngineConfig(device="cuda:0", dtype="float32", max_num_seqs=4, max_model_len=1024)
WAVE = (0.3 * np.sin(np.arange(44100) / 20)).astype(np.float32)


async def spoken(folder: Path, config: ProcessConfig) -> tuple[list[tuple[Int32, Int32]], Int32]:
    """Codes and samples of four listeners, and the codes of a reference."""
    speaker = await RemoteSpeaker.start(folder, ENGINE, config)

    async def one(seed: int) -> tuple[Int32, Int32]:
        prompt = np.full((1 + speaker.info.num_codebooks, 5), 0, np.int32)
        chunks: list[Chunk] = []
        async for item in speaker.speak(Utterance(f"r{seed}", prompt, Sampling(0.0), seed, FRAMES, streaming=True)):
            if isinstance(item, Outcome):
                assert item.error is None
                codes = np.concatenate([chunk.codes for chunk in chunks], axis=1)
                return codes, np.frombuffer(b"".join(chunk.pcm for chunk in chunks), "<i2").astype(np.int32)
            chunks.append(item)
        raise AssertionError("a stream had no outcome")

    try:
        return await asyncio.gather(*(one(seed) for seed in range(4))), await speaker.encode_reference(WAVE)
    finally:
        await speaker.close()


def test_the_same_codes_and_nearly_the_same_samples(endless_folder: Path) -> None:
    other = f"cuda:{min(1, torch.cuda.device_count() - 1)}"
    together, reference = asyncio.run(spoken(endless_folder, ProcessConfig()))
    apart, reference_apart = asyncio.run(spoken(endless_folder, ProcessConfig(codec_device=other)))
    assert np.array_equal(reference, reference_apart)
    for (codes, samples), (codes_apart, samples_apart) in zip(together, apart, strict=True):
        assert codes.shape[1] == FRAMES
        assert np.array_equal(codes, codes_apart)
        assert np.abs(samples - samples_apart).max() <= 64  # float16, in other chunks
