"""An engine in this process behind the `Speaker` protocol, and how one is built from a model folder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from duetts import kernels
from duetts.attention import fish_kvcache_attn
from duetts.checkpoint import Model, load_model, read_configs
from duetts.config import EngineConfig
from duetts.engine.engine import Engine
from duetts.engine.memory import (
    cache_positions,
    choose_device,
    choose_dtype,
    codec_slots,
    fit_memory,
    longest_sequence,
    plan_memory,
)
from duetts.engine.pages import pages_for
from duetts.engine.parts import Parts, Threads
from duetts.engine.playout import ChunkPolicy
from duetts.engine.reference_encoder import EncoderThread, ReferenceEncoder
from duetts.engine.runner import Runner
from duetts.engine.scheduler import Room
from duetts.engine.stream import Channel, Post
from duetts.engine.vocoder import GPU_DTYPE, CodecVocoder, GraphedVocoder
from duetts.kernels import guard
from duetts.models.codec import Codec
from duetts.models.stream_decoder import StreamDecoder
from duetts.types import Chunk, Float32, Int32, Outcome, SpeakerInfo, Utterance

MAX_ROWS = 256  # of a step on a GPU
RECORDING_S = 60.0  # after which codec calls that are not needed are not recorded any more

log = logging.getLogger(__name__)


class InProcessSpeaker:
    """An engine's threads in this process."""

    def __init__(self, engine: Engine, info: SpeakerInfo) -> None:
        self._engine = engine
        self.info = info
        self._post: Post | None = None

    async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        """Chunks, then one outcome. Closing the generator early cancels the utterance."""
        channel = Channel(self._post_here())
        sequence = self._engine.submit(utterance, channel)
        try:
            while True:
                item = await channel.get()
                yield item
                if isinstance(item, Outcome):
                    return
        finally:
            self._engine.cancel(sequence)

    def _post_here(self) -> Post:
        """The post of the running loop; there is hardly ever more than one."""
        if self._post is None or self._post.loop is not asyncio.get_running_loop():
            self._post = Post()
        return self._post

    async def encode_reference(self, wave: Float32) -> Int32:
        """Mono float32 [samples] at the codec rate -> codes int32 [codebooks, frames].

        A caller that is cancelled takes its clip out of the line. Once begun it is finished and returned all the same, for
        those who come back for it: where encoding is slow, a client that gives up and tries again would never get it.
        """
        future = self._engine.encode(wave)
        codes = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(codes)
        except asyncio.CancelledError:
            if future.cancel():
                raise
            return await codes

    def stats(self) -> dict[str, Any]:
        """The engine's, and whether attention runs its own kernel. Twins on a CPU count as neither."""
        use = guard.DECODE
        fallbacks = sum(use.fallbacks.values())
        return {**self._engine.stats(), "attention_hits": use.short + use.long, "attention_fallbacks": fallbacks}

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)


def build_engine(model: Model, config: EngineConfig, max_model_len: int, kv_positions: int | None = None) -> Engine:
    """An engine's parts, sized by the settings and the device, and the engine itself, whose threads run at once.

    On a CPU shapes are fixed (`docs/architecture.md`), and codec and encoder have threads of their own.
    """
    device = model.dual_ar.slow.embeddings.weight.device
    on_cpu = device.type == "cpu"
    slots = config.max_num_seqs
    pages = pages_for(kv_positions or cache_positions(config, max_model_len))
    rows = config.rows if on_cpu else min(slots, MAX_ROWS)  # on a CPU also with fewer slots: bytes must not depend on them
    frame_s = model.codec_config.frame_length / model.codec_config.sample_rate
    encoder = ReferenceEncoder(model.codec, max_waiting=slots + config.max_queue)
    block = config.prefill_block or (128 if on_cpu else 512)
    runner = Runner(model.dual_ar, slots=slots, rows=rows, pages=pages, max_model_len=max_model_len, block=block)
    runner.prepare()
    threads = None
    if on_cpu:
        threads = Threads(partial(torch.set_num_threads, config.cpu_threads), EncoderThread(encoder, config.cpu_threads))
    return Engine(
        Parts(
            device=runner,
            vocoder=build_vocoder(model.codec, config, max_model_len),
            encoder=encoder,
            room=Room(
                slots=slots, rows=rows, block=block, length=max_model_len, frame_s=frame_s, rereads=not on_cpu,
            ),
            num_pages=pages,
            end_id=model.config.end_id,
            max_queue=config.max_queue,
            max_line_s=config.max_line_s,
            policy=ChunkPolicy(config.first_chunk, config.largest_chunk),
            threads=threads,
        )
    )  # fmt: skip


def build_vocoder(codec: Codec, config: EngineConfig, max_model_len: int) -> CodecVocoder | GraphedVocoder:
    """A GPU's is recorded when this returns, if the codec's kernels run there."""
    slots = codec_slots(config)
    device = codec.quantizer.post_module.norm.weight.device
    if not kernels.runs_codec(device):
        return CodecVocoder(codec, slots=slots, quantum=config.codec_quantum if device.type == "cpu" else None)
    vocoder = GraphedVocoder(StreamDecoder(codec, GPU_DTYPE, max_model_len), slots=slots)
    vocoder.prepare(RECORDING_S)
    return vocoder


def start_speaker(folder: Path, config: EngineConfig) -> InProcessSpeaker:
    """Loads and starts a model. Raises `ConfigError`, `CheckpointError` or `NotEnoughMemory`."""
    model_config, codec_config = read_configs(folder)
    device = choose_device(config.device)
    fish_kvcache_attn.prepare(device)
    plan = fit_memory(plan_memory(model_config, codec_config, config, device), model_config, config, device)
    log.info("%s on %s, %d positions", plan, device, plan.positions)
    dtype, longest = choose_dtype(config.dtype, device, model_config), longest_sequence(model_config, config)
    torch.backends.cudnn.allow_tf32 = False  # on by default for convolutions; it changes about 3 % of a reference's codes
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False  # sums stay in float32, as the kernels keep them
    dummy = config.seed if config.load_format == "dummy" else None
    model = load_model(
        folder, device=device, dtype=dtype, codec_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        max_positions=longest, dummy_seed=dummy, quantization=config.quantization,
    )  # fmt: skip
    engine = build_engine(model, config, longest, plan.positions)
    return InProcessSpeaker(engine, describe(model, longest, device, dtype, dummy is not None))


def describe(model: Model, max_model_len: int, device: torch.device, dtype: torch.dtype, dummy: bool) -> SpeakerInfo:
    """What the text side is told about a loaded model."""
    return SpeakerInfo(
        model_type=model.config.model_type,
        sample_rate=model.codec_config.sample_rate,
        frame_length=model.codec_config.frame_length,
        num_codebooks=model.config.num_codebooks,
        max_model_len=max_model_len,
        weights="dummy" if dummy else "untrained" if model.config.untrained else "trained",
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        codec_id=model.codec.encoding_id(),
    )
