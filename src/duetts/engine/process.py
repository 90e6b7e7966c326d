"""`python -m duetts.engine.process`: an engine over a model folder in a process of its own."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from duetts.checkpoint import read_configs
from duetts.config import EngineConfig
from duetts.engine.host import Started
from duetts.engine.inprocess import start_speaker
from duetts.engine.life import Orders, live
from duetts.errors import EmptyGeneration, EngineFailure
from duetts.types import Outcome, Sampling, Speaker, Utterance

PROOF_FRAMES = 2


def start_engine(orders: Orders) -> Started:
    """Loads the model of the orders and has it speak once. Raises as `start_speaker`, or what became of the speech."""
    folder = Path(orders.folder)
    model, codec = read_configs(folder)
    speaker = start_speaker(folder, place(orders.engine, orders.index, orders.processes.engines))
    asyncio.run(prove(speaker))
    return Started(speaker, (model.slow.vocab_size, max(codec.semantic_size, codec.residual_size)))


def place(config: EngineConfig, index: int, engines: int) -> EngineConfig:
    """The settings of one of several engines: a GPU each, or a share of the CPU's threads."""
    if config.device in ("auto", "cuda") and torch.cuda.is_available():
        return replace(config, device=f"cuda:{index}")
    return replace(config, cpu_threads=max(1, config.cpu_threads // engines))


async def prove(speaker: Speaker) -> None:
    """Speaks a few frames, so that an engine that is ready has spoken. Raises `EngineFailure` if it cannot."""
    prompt = np.zeros((1 + speaker.info.num_codebooks, 2), np.int32)
    utterance = Utterance("proof", prompt, Sampling(), 0, PROOF_FRAMES)
    async with aclosing(speaker.speak(utterance)) as items:
        async for item in items:
            if isinstance(item, Outcome) and item.error is not None and not isinstance(item.error, EmptyGeneration):
                raise EngineFailure(f"the first speech failed: {item.error}")


if __name__ == "__main__":
    live(start_engine)
