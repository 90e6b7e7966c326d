"""`python -m duetts.engine.process`: an engine over a model folder, or the codec of one, in a process of its own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from duetts.checkpoint import read_configs
from duetts.config import EngineConfig, ProcessConfig
from duetts.engine.codec_service import CodecService
from duetts.engine.host import Started
from duetts.engine.inprocess import InProcessSpeaker, start_codec, start_speaker
from duetts.engine.life import Orders, live
from duetts.engine.parts import DecodeCall
from duetts.engine.remote_codec import RemoteCodec
from duetts.errors import EmptyGeneration, EngineFailure
from duetts.types import Outcome, Sampling, Speaker, Utterance

PROOF_FRAMES = 2


async def start(orders: Orders, changed: Callable[[], None]) -> Started:
    """Loads what the orders ask for, and has it speak or decode once. Raises as `start_speaker`, or what became of that."""
    folder = Path(orders.folder)
    model, codec = await asyncio.to_thread(read_configs, folder)
    if orders.role == "codec":  # its place was found by its engine
        service = await asyncio.to_thread(start_codec, folder, orders.engine)
        await prove_codec(service)
        return Started(service, (codec.semantic_size, codec.residual_size))
    vocabulary = model.slow.vocab_size, max(codec.semantic_size, codec.residual_size)
    own = place(orders.engine, orders.index, orders.processes)
    if orders.processes.codec_device == "same":
        speaker = await asyncio.to_thread(start_speaker, folder, own)
        await prove(speaker)
        return Started(speaker, vocabulary)
    other = RemoteCodec(orders.index, folder, place_codec(own, orders.processes), orders.processes, changed)
    started = False
    try:
        speaker = await join(asyncio.to_thread(start_speaker, folder, own, other), other)
        await prove(speaker)
        started = True
    finally:
        if not started:
            await other.close()
    return Started(speaker, vocabulary, lambda: other.is_up)


async def join(starting: Coroutine[Any, Any, InProcessSpeaker], codec: RemoteCodec) -> InProcessSpeaker:
    """An engine and its codec process start side by side; whichever cannot tells it at once."""
    loading = asyncio.ensure_future(starting)
    halves: list[asyncio.Future[Any]] = [loading, codec.first]
    await asyncio.wait(halves, return_when=asyncio.FIRST_EXCEPTION)
    if not loading.done():
        codec.first.result()
    return await loading


def place(config: EngineConfig, index: int, processes: ProcessConfig) -> EngineConfig:
    """The settings of one of several engines: a GPU each (two if the codec has the next), or a share of the CPU's threads."""
    if config.device in ("auto", "cuda") and torch.cuda.is_available():
        return replace(config, device=f"cuda:{2 * index if processes.codec_device == 'next' else index}")
    return replace(config, cpu_threads=max(1, config.cpu_threads // processes.engines))


def place_codec(engine: EngineConfig, processes: ProcessConfig) -> EngineConfig:
    """The settings of the codec process of an engine that has its place."""
    if processes.codec_device != "next":
        return replace(engine, device=processes.codec_device)
    own = re.fullmatch(r"cuda(?::([0-9]+))?", engine.device)
    return replace(engine, device=f"cuda:{int(own[1] or 0) + 1}" if own else "cpu")


async def prove(speaker: Speaker) -> None:
    """Speaks a few frames, so that an engine that is ready has spoken. Raises `EngineFailure` if it cannot."""
    prompt = np.zeros((1 + speaker.info.num_codebooks, 2), np.int32)
    utterance = Utterance("proof", prompt, Sampling(), 0, PROOF_FRAMES)
    async with aclosing(speaker.speak(utterance)) as items:
        async for item in items:
            if isinstance(item, Outcome) and item.error is not None and not isinstance(item.error, EmptyGeneration):
                raise EngineFailure(f"the first speech failed: {item.error}")


async def prove_codec(service: CodecService) -> None:
    """Decodes a frame. Raises `EngineFailure` if that is no sound."""
    codes = np.zeros((1, service.info.num_codebooks, 1), np.int32)
    made = await service.decode(DecodeCall([0], [0], codes, keep=True))
    if None in made.sounds:
        raise EngineFailure("the first frame that was decoded is no sound")


if __name__ == "__main__":
    live(start)
