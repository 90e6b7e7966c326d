"""An engine in this process behind the `Speaker` protocol, and how one is built from a model folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from duetts.checkpoint import Model, describe_layout, load_model, read_configs
from duetts.config import EngineConfig
from duetts.engine.engine import Engine
from duetts.engine.pages import PAGE, pages_for
from duetts.engine.parts import Parts, Threads
from duetts.engine.playout import ChunkPolicy
from duetts.engine.reference_encoder import EncoderThread, ReferenceEncoder
from duetts.engine.runner import Runner
from duetts.engine.scheduler import Room
from duetts.engine.stream import Channel, Post
from duetts.engine.vocoder import GPU_DTYPE, CodecVocoder, GraphedVocoder, count_graphed_bytes
from duetts.errors import ConfigError, NotEnoughMemory
from duetts.model_config import CodecConfig, ModelConfig
from duetts.models.codec import Codec
from duetts.models.stream_decoder import StreamDecoder
from duetts.types import Chunk, Float32, Int32, Outcome, SpeakerInfo, Utterance

DEFAULT_MODEL_LEN = 8192  # positions; more must be asked for, as the cache must hold one such sequence
ORDINARY_LEN = 2048  # positions that are set aside for each sequence: 60 s of reference and as much speech
MAX_ROWS = 256  # of a step on a GPU
RECORDING_S = 15.0  # after which codec calls that are not needed are not recorded any more


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
        return self._engine.stats()

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)


def choose_device(name: str) -> torch.device:
    """ "auto" is the first GPU if there is one. Raises `ConfigError` for a device that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not here: {torch.cuda.device_count()} CUDA devices are")
    return device


def choose_dtype(name: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """ "auto" is float32 on a CPU and the checkpoint's own type on a GPU."""
    chosen = ("float32" if device.type == "cpu" else config.dtype) if name == "auto" else name
    return {
        "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16
    }[chosen]  # fmt: skip


def cache_bytes_per_position(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of one position in all slow layers."""
    return 2 * config.slow.num_layers * config.slow.num_kv_heads * config.slow.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that a model takes on its device before the first request."""

    weights: int
    codec: int
    caches: int

    @property
    def total(self) -> int:
        return self.weights + self.codec + self.caches

    def __str__(self) -> str:
        parts = (self.total, self.weights, self.codec, self.caches)
        return "{:.2f} GB needed: weights {:.2f}, codec {:.2f}, caches {:.2f}".format(*(part / 1e9 for part in parts))


def plan_memory(
    config: ModelConfig, codec: CodecConfig, dtype: torch.dtype, positions: int, graphed_slots: int = 0
) -> MemoryPlan:  # fmt: skip
    """The sum that must fit, from the dimensions alone. `positions` are those of all slots; the codec counts as float32, and
    what decodes `graphed_slots` streams on a GPU beside it."""
    language, waveform = (
        sum(torch.Size(shape).numel() for shape in shapes.values()) for shapes in describe_layout(config, codec)
    )
    graphed = count_graphed_bytes(codec, slots=graphed_slots) if graphed_slots else 0
    return MemoryPlan(language * dtype.itemsize, waveform * 4 + graphed, positions * cache_bytes_per_position(config, dtype))


def check_memory(plan: MemoryPlan, device: torch.device) -> None:
    """Raises `NotEnoughMemory`, before anything is loaded, when the plan does not fit what is free on a GPU."""
    if device.type == "cuda" and plan.total > (free := torch.cuda.mem_get_info(device)[0]):
        raise NotEnoughMemory(f"{plan}; {free / 1e9:.2f} GB are free on {device}: lower max_num_seqs or max_model_len")


def build_engine(model: Model, config: EngineConfig, max_model_len: int) -> Engine:
    """An engine's parts, sized by the settings and the device, and the engine itself, whose threads run at once.

    On a CPU shapes are fixed (`docs/architecture.md`), and codec and encoder have threads of their own.
    """
    device = model.dual_ar.slow.embeddings.weight.device
    on_cpu = device.type == "cpu"
    slots = config.max_num_seqs
    pages = cache_positions(config, max_model_len) // PAGE
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
                shared_thread=not on_cpu,
            ),
            num_pages=pages,
            end_id=model.config.end_id,
            max_queue=config.max_queue,
            policy=ChunkPolicy(config.first_chunk, config.largest_chunk),
            threads=threads,
        )
    )  # fmt: skip


def build_vocoder(codec: Codec, config: EngineConfig, max_model_len: int) -> CodecVocoder | GraphedVocoder:
    """A GPU's is recorded when this returns. There are two streams to a slot: audio may follow when a sequence has ended."""
    slots = 2 * config.max_num_seqs
    if codec.quantizer.post_module.norm.weight.device.type == "cpu":
        return CodecVocoder(codec, slots=slots, quantum=config.codec_quantum)
    vocoder = GraphedVocoder(StreamDecoder(codec, GPU_DTYPE, max_model_len), slots=slots)
    vocoder.prepare(RECORDING_S)
    return vocoder


def cache_positions(config: EngineConfig, max_model_len: int) -> int:
    """Positions of the KV cache, whole pages: as set, else `ORDINARY_LEN` for each sequence; one of full length always fits."""
    wanted = config.kv_positions or max(max_model_len, config.max_num_seqs * min(max_model_len, ORDINARY_LEN))
    if wanted < max_model_len:
        raise ConfigError(f"kv_positions is {wanted}; one sequence alone may need {max_model_len} (max_model_len)")
    return pages_for(wanted) * PAGE


def start_speaker(folder: Path, config: EngineConfig) -> InProcessSpeaker:
    """Loads and starts a model. Raises `ConfigError`, `CheckpointError` or `NotEnoughMemory`."""
    model_config, codec_config = read_configs(folder)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device, model_config)
    longest = min(model_config.slow.max_positions, config.max_model_len or DEFAULT_MODEL_LEN)
    if config.max_model_len is not None and config.max_model_len > model_config.slow.max_positions:
        raise ConfigError(f"max_model_len {config.max_model_len} exceeds the model's {model_config.slow.max_positions}")
    graphed_slots = 2 * config.max_num_seqs if device.type == "cuda" else 0
    check_memory(plan_memory(model_config, codec_config, dtype, cache_positions(config, longest), graphed_slots), device)
    codec_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    torch.backends.cudnn.allow_tf32 = False  # on by default for convolutions; it changes about 3 % of a reference's codes
    dummy = config.seed if config.load_format == "dummy" else None
    model = load_model(folder, device=device, dtype=dtype, codec_dtype=codec_dtype, max_positions=longest, dummy_seed=dummy)
    return InProcessSpeaker(build_engine(model, config, longest), describe(model, longest, device, dtype, dummy is not None))


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
