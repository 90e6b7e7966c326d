"""An engine in this process behind the `Speaker` protocol, and how one, or the codec of one, is built from a model folder."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from duetts import kernels
from duetts.attention import fish_kvcache_attn
from duetts.checkpoint import Model, load_codec, load_dual_ar, read_configs
from duetts.config import EngineConfig
from duetts.cores import usable_cores
from duetts.engine.codec_service import CodecService
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
from duetts.engine.parts import Encoder, Parts, Threads, Vocoder
from duetts.engine.playout import ChunkPolicy
from duetts.engine.reference_encoder import EncoderThread, ReferenceEncoder
from duetts.engine.remote_codec import RemoteCodec, RemoteEncoder, RemoteVocoder
from duetts.engine.runner import Runner
from duetts.engine.scheduler import Room
from duetts.engine.stream import Channel, Post, await_codes
from duetts.engine.vocoder import GPU_DTYPE, CodecVocoder, GraphedVocoder
from duetts.kernels import guard
from duetts.model_config import CodecConfig, ModelConfig
from duetts.models.codec import Codec
from duetts.models.dual_ar import DualAR
from duetts.models.stream_decoder import StreamDecoder
from duetts.types import Chunk, Float32, Int32, Outcome, SpeakerInfo, Utterance

MAX_ROWS = 256  # of a step on a GPU
RECORDING_S = 60.0  # after which codec calls that are not needed are not recorded any more

log = logging.getLogger(__name__)


class InProcessSpeaker:
    """An engine's threads in this process, and the codec process that they use, if they do not decode themselves."""

    def __init__(self, engine: Engine, info: SpeakerInfo, codec: RemoteCodec | None = None) -> None:
        self._engine = engine
        self._codec = codec
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
        """Mono float32 [samples] at the codec rate -> codes int32 [codebooks, frames]."""
        return await await_codes(self._engine.encode(wave))

    def stats(self) -> dict[str, Any]:
        """The engine's, and whether attention runs its own kernel. Twins on a CPU count as neither."""
        use = guard.DECODE
        fallbacks = sum(use.fallbacks.values())
        codec = {} if self._codec is None else {"codec": self._codec.stats()}
        return {**self._engine.stats(), **codec, "attention_hits": use.short + use.long, "attention_fallbacks": fallbacks}

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)
        if self._codec is not None:
            await self._codec.close()


@dataclass(frozen=True, slots=True)
class CodecHalf:
    """What an engine decodes and encodes with. Without `threads` its loop steps them."""

    vocoder: Vocoder
    encoder: Encoder
    threads: Threads | None


def build_engine(model: Model, config: EngineConfig, max_model_len: int, kv_positions: int | None = None) -> Engine:
    """An engine's parts, sized by the settings and the device, and the engine itself, whose threads run at once.

    On a CPU shapes are fixed (`docs/architecture.md`), and codec and encoder have threads of their own.
    """
    half = own_codec(model.codec, config, max_model_len)
    return join_halves(model.dual_ar, model.config, model.codec_config, half, config, max_model_len, kv_positions)


def join_halves(
    dual_ar: DualAR, model: ModelConfig, codec: CodecConfig, half: CodecHalf, config: EngineConfig, max_model_len: int,
    kv_positions: int | None,
) -> Engine:  # fmt: skip
    """An engine of a language model and a codec, wherever that is."""
    device = dual_ar.slow.embeddings.weight.device
    on_cpu = device.type == "cpu"
    one_core = on_cpu and usable_cores() == 1
    slots = config.max_num_seqs
    pages = pages_for(kv_positions or cache_positions(config, max_model_len))
    rows = config.rows if on_cpu else min(slots, MAX_ROWS)  # on a CPU also with fewer slots: bytes must not depend on them
    block = config.prefill_block or (128 if on_cpu else 512)
    runner = Runner(dual_ar, slots=slots, rows=rows, pages=pages, max_model_len=max_model_len, block=block)
    runner.prepare()
    return Engine(
        Parts(
            device=runner,
            vocoder=half.vocoder,
            encoder=half.encoder,
            room=Room(
                slots=slots, rows=rows, block=block, length=max_model_len,
                frame_s=codec.frame_length / codec.sample_rate, rereads=not on_cpu, padded=on_cpu,
                shared_thread=one_core,
            ),
            num_pages=pages,
            end_id=model.end_id,
            max_queue=config.max_queue,
            max_line_s=config.max_line_s,
            policy=ChunkPolicy(config.first_chunk, config.largest_chunk),
            threads=half.threads,
            prepare=partial(begin, device, config),
        ),
        effort=time.thread_time if one_core else None,
    )  # fmt: skip


def own_codec(codec: Codec, config: EngineConfig, max_model_len: int) -> CodecHalf:
    """The codec in the engine's process: on a CPU beside the loop, on a GPU stepped by it."""
    encoder = ReferenceEncoder(codec, max_waiting=config.max_num_seqs + config.max_queue)
    vocoder = build_vocoder(codec, config, max_model_len)
    device = codec.quantizer.post_module.norm.weight.device
    if device.type != "cpu":
        return CodecHalf(vocoder, encoder, None)
    return CodecHalf(vocoder, encoder, Threads(EncoderThread(encoder, config.cpu_threads)))


def other_codec(codec: RemoteCodec, info: SpeakerInfo, config: EngineConfig) -> CodecHalf:
    """The codec in its own process, which has told `info`."""
    vocoder = RemoteVocoder(codec, slots=codec_slots(config), quantum=config.codec_quantum if info.device == "cpu" else None)
    encoder = RemoteEncoder(codec)
    return CodecHalf(vocoder, encoder, Threads(encoder, patient=False))


def build_vocoder(codec: Codec, config: EngineConfig, max_model_len: int) -> CodecVocoder | GraphedVocoder:
    """A GPU's is recorded when this returns, if the codec's kernels run there."""
    slots = codec_slots(config)
    device = codec.quantizer.post_module.norm.weight.device
    if not kernels.runs_codec(device):
        return CodecVocoder(codec, slots=slots, quantum=config.codec_quantum if device.type == "cpu" else None)
    vocoder = GraphedVocoder(StreamDecoder(codec, GPU_DTYPE, max_model_len), slots=slots)
    vocoder.prepare(RECORDING_S)
    return vocoder


def start_speaker(folder: Path, config: EngineConfig, codec: RemoteCodec | None = None) -> InProcessSpeaker:
    """Loads and starts a model, or only its language model where a codec process does the rest, which must be up or coming up.
    Waits for that. Raises `ConfigError`, `CheckpointError` or `NotEnoughMemory`."""
    device = choose_device(config.device)
    with nullcontext() if device.type == "cpu" else torch.cuda.device(device):  # meant by whatever names none
        return _start_on(device, folder, config, codec)


def _start_on(device: torch.device, folder: Path, config: EngineConfig, codec: RemoteCodec | None) -> InProcessSpeaker:
    model_config, codec_config = read_configs(folder)
    fish_kvcache_attn.prepare(device)
    asked = plan_memory(model_config, codec_config, config, device)
    plan = fit_memory(asked if codec is None else replace(asked, codec=0), model_config, config, device)
    log.info("%s on %s, %d positions", plan, device, plan.positions)
    dtype, longest = choose_dtype(config.dtype, device, model_config), longest_sequence(model_config, config)
    be_exact()
    dummy = config.seed if config.load_format == "dummy" else None
    dual_ar = load_dual_ar(
        folder, device=device, dtype=dtype, max_positions=longest, dummy_seed=dummy, quantization=config.quantization
    )
    info = tell(model_config, codec_config, longest, device, dtype, dummy is not None)
    if codec is None:
        own = load_codec(folder, device=device, dtype=codec_dtype(dtype), dummy_seed=dummy)
        model = Model(model_config, codec_config, dual_ar, own)
        return InProcessSpeaker(build_engine(model, config, longest, plan.positions), replace(info, codec_id=own.encoding_id()))
    told = codec.join()
    half = other_codec(codec, told, config)
    engine = join_halves(dual_ar, model_config, codec_config, half, config, longest, plan.positions)
    codec.attach(engine.codec_worker)
    return InProcessSpeaker(engine, replace(info, codec_id=told.codec_id, codec_device=told.device), codec)


def start_codec(folder: Path, config: EngineConfig) -> CodecService:
    """Loads and starts a model's codec alone. Raises as `start_speaker`."""
    model_config, codec_config = read_configs(folder)
    device = choose_device(config.device)
    plan = replace(plan_memory(model_config, codec_config, config, device), weights=0, positions=0)
    log.info("%s on %s", fit_memory(plan, model_config, config, device), device)
    dtype, longest = choose_dtype(config.dtype, device, model_config), longest_sequence(model_config, config)
    begin(device, config)
    be_exact()
    dummy = config.seed if config.load_format == "dummy" else None
    codec = load_codec(folder, device=device, dtype=codec_dtype(dtype), dummy_seed=dummy)
    info = tell(model_config, codec_config, longest, device, codec_dtype(dtype), dummy is not None)
    half = own_codec(codec, config, longest)
    driver = None if half.threads is None else half.threads.encoder
    return CodecService(
        replace(info, codec_id=codec.encoding_id()), half.vocoder, half.encoder, driver, partial(begin, device, config)
    )


def begin(device: torch.device, config: EngineConfig) -> None:
    """What a thread that computes begins with. Each has a GPU of its own that is meant where none is named."""
    if device.type == "cpu":
        torch.set_num_threads(config.cpu_threads)
    elif device.index is not None:
        torch.cuda.set_device(device)


def codec_dtype(dtype: torch.dtype) -> torch.dtype:
    """The codec's type beside a language model of that type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def be_exact() -> None:
    """Products of float32 and sums of float16 keep their bits."""
    torch.backends.cudnn.allow_tf32 = False  # on by default for convolutions; it changes about 3 % of a reference's codes
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False  # sums stay in float32, as the kernels keep them


def describe(model: Model, max_model_len: int, device: torch.device, dtype: torch.dtype, dummy: bool) -> SpeakerInfo:
    """What the text side is told about a loaded model."""
    info = tell(model.config, model.codec_config, max_model_len, device, dtype, dummy)
    return replace(info, codec_id=model.codec.encoding_id())


def tell(
    model: ModelConfig, codec: CodecConfig, max_model_len: int, device: torch.device, dtype: torch.dtype, dummy: bool
) -> SpeakerInfo:
    """The same without the codec's id."""
    return SpeakerInfo(
        model_type=model.model_type,
        sample_rate=codec.sample_rate,
        frame_length=codec.frame_length,
        num_codebooks=model.num_codebooks,
        max_model_len=max_model_len,
        weights="dummy" if dummy else "untrained" if model.untrained else "trained",
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
    )
