"""`duetts bench K`: the language model and the codec by themselves, through the protocols that the engine drives them with,
beside what the card allows. Knows no scheduler, no text and no HTTP."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from duetts.checkpoint import Model, load_model
from duetts.conditions import card, program, write_json
from duetts.config import EngineConfig
from duetts.engine.inprocess import build_vocoder
from duetts.engine.memory import choose_device, choose_dtype
from duetts.engine.pages import PAGE, Block, pages_for
from duetts.engine.parts import UNSOUND, Device, Result, Vocoder
from duetts.engine.playout import Playout
from duetts.engine.runner import Runner
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.errors import ConfigError
from duetts.model_config import CodecConfig, DecoderConfig, ModelConfig, read_model_config
from duetts.roofline import FRAME_S, H200, S2_PRO, Sizes, codec_floor_s, frame_floor_s, prefill_floor_s
from duetts.types import Int32, Sampling, Utterance

WARM_UP, LEAST, MOST = 3, 5, 100  # steps
PREFILLS = (50, 265, 512)  # positions: text on a known voice, 10 s of voice and a text, a whole block
BLOCK = 512
PARTS = ("ar", "codec", "prefill")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: `streams` at once, `contexts` in positions, `chunks` in frames. `seconds` bounds each measurement."""

    folder: Path
    device: str
    dtype: str
    load_format: str
    parts: tuple[str, ...]
    streams: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if wrong := set(self.parts) - set(PARTS):
            raise ConfigError(f"--parts has {min(wrong)!r}; it must be of {', '.join(PARTS)}")


@dataclass(frozen=True, slots=True)
class Clock:
    """Times work on a device, from idle to idle by the host's clock: the work may run on streams of its own."""

    device: torch.device
    seconds: float

    def each(self, work: Callable[[int], object]) -> tuple[int, float]:
        """`work` is given how often to do it -> how often it was measured, and seconds of each."""
        self._timed(work, WARM_UP)
        times = min(MOST, max(LEAST, int(self.seconds * LEAST / self._timed(work, LEAST))))
        return times, self._timed(work, times) / times

    def _timed(self, work: Callable[[int], object], times: int) -> float:
        self._settle()
        begin = time.perf_counter()
        work(times)
        self._settle()
        return time.perf_counter() - begin

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(plan: Plan, told: dict[str, Any], tell: Callable[[str], None], output: Path | None) -> None:
    """Measures all parts and saves as it goes. Raises what loading a model raises, and `OSError`."""
    device = choose_device(plan.device)
    if device.type == "cpu":
        torch.set_num_threads(EngineConfig().cpu_threads)
    config = read_model_config(plan.folder)
    dtype = choose_dtype(plan.dtype, device, config)
    longest = min(config.slow.max_positions, max(plan.contexts, default=0) + BLOCK + MOST + 2 * PAGE)
    seed = EngineConfig().seed if plan.load_format == "dummy" else None
    model = load_model(
        plan.folder, device=device, dtype=dtype, codec_dtype=torch.float32, max_positions=longest, dummy_seed=seed
    )  # fmt: skip
    sizes = sizes_of(model.config, model.codec_config, dtype)
    rows: list[dict[str, Any]] = []
    report = {
        "kind": "duetts bench K", **told, **program(), "plan": asdict(plan) | {"folder": plan.folder.name}, "card": card(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "dtype": str(dtype),
        "floors": "by the formulas of docs/benchmarks.md for one H200", "sizes": asdict(sizes), "rows": rows,
    }  # fmt: skip
    clock = Clock(device, plan.seconds)
    works = {"ar": language_model, "codec": codec, "prefill": prefill}
    for part in plan.parts:
        for row in works[part](model, plan, clock, sizes):
            rows.append({"part": part, **row})
            tell("  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                           for name, value in rows[-1].items() if value is not None))  # fmt: skip
            if output is not None:
                write_json(output, report)


def sizes_of(config: ModelConfig, codec: CodecConfig, dtype: torch.dtype) -> Sizes:
    """What the formulas need of a model. The codec's operations are known of S2 Pro's only."""
    slow, fast = config.slow, config.fast
    return Sizes(
        slow=layer_parameters(slow) * slow.num_layers,
        fast=layer_parameters(fast) * fast.num_layers,
        slow_head=(config.num_semantic + 1) * slow.dim,
        fast_head=codec.residual_size * fast.dim,
        cache_bytes=2 * slow.num_layers * slow.num_kv_heads * slow.head_dim * dtype.itemsize,
        attention=4 * slow.num_layers * slow.num_heads * slow.head_dim,
        books=config.num_codebooks,
        passes=config.num_codebooks - 1,
        codec_flop=S2_PRO.codec_flop if codec == CodecConfig() else float("nan"),
        weight_bytes=dtype.itemsize,
    )


def layer_parameters(decoder: DecoderConfig) -> int:
    """Of the four matrices of a layer."""
    heads = decoder.num_heads * decoder.head_dim
    return decoder.dim * (2 * heads + 2 * decoder.num_kv_heads * decoder.head_dim + 3 * decoder.ffn_dim)


# -- the language model --------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """Sequences of one length on a device of their own, and steps of them, pipelined as deep as the device allows."""

    device: Device
    sequences: list[Sequence]
    failed: int = 0
    _under_way: deque[Result] = field(default_factory=deque)

    def step(self) -> None:
        self._under_way.append(self.device.launch(self.sequences))
        for sequence in self.sequences:
            sequence.launched += 1
        self.land(self.device.lag)

    def land(self, left: int = 0) -> None:
        """Waits for all steps but the last `left`."""
        while len(self._under_way) > left:
            self.failed += int((self._under_way.popleft()()[:, 0] == UNSOUND).sum())

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.land()


def make_rows(model: Model, streams: int, context: int) -> Rows:
    """So many sequences whose prompts of `context` random ids are in the cache."""
    config = model.config
    length = context + BLOCK // 2 + MOST
    if length > config.slow.max_positions:
        raise ConfigError(f"{context} positions of context need {length} in all; the model has {config.slow.max_positions}")
    each = pages_for(length)
    runner = Runner(model.dual_ar, slots=streams, rows=streams, pages=streams * each, max_model_len=length)
    generator = np.random.default_rng(0)
    sequences = []
    for number in range(streams):
        prompt = np.zeros((1 + config.num_codebooks, context), np.int32)
        prompt[0] = generator.integers(0, min(256, config.slow.vocab_size), context)
        utterance = Utterance(f"k{number}", prompt, Sampling(), number, length - context)
        pages = list(range(number * each, (number + 1) * each))
        sequences.append(Sequence(utterance, cast(Channel, None), Playout(FRAME_S), slot=number, pages=pages))
    for sequence in sequences:
        for start in range(0, context - 1, BLOCK):
            runner.read(sequence, Block(start, min(start + BLOCK, context - 1), None))
    return Rows(runner, sequences)


def language_model(model: Model, plan: Plan, clock: Clock, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Milliseconds a frame by streams and context."""
    for context in plan.contexts:
        for streams in plan.streams:
            rows = make_rows(model, streams, context)
            steps, frame_s = clock.each(rows.run)
            floor_s = frame_floor_s(streams, context + WARM_UP + LEAST + steps / 2, sizes, H200)
            yield {"streams": streams, "context": context, "steps": steps, "frame_ms": 1e3 * frame_s,
                   "floor_ms": 1e3 * floor_s, "times_floor": frame_s / floor_s,
                   "rtf": frame_s / FRAME_S, "audio_s_per_s": streams * FRAME_S / frame_s,
                   "unsound_rows": rows.failed}  # fmt: skip
            del rows
            gc.collect()  # the next cache needs the room of this one


def prefill(model: Model, plan: Plan, clock: Clock, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Milliseconds to read a prompt's block, one at a time."""
    rows = make_rows(model, 1, BLOCK)
    for positions in PREFILLS:

        def read(times: int, end: int = positions) -> None:
            for _ in range(times):
                rows.device.read(rows.sequences[0], Block(0, end, None))

        times, block_s = clock.each(read)
        yield {"positions": positions, "repeats": times, "ms": 1e3 * block_s,
               "floor_ms": 1e3 * prefill_floor_s(positions, sizes, H200)}  # fmt: skip


# -- the codec -----------------------------------------------------------------------------------------------------------


def codec(model: Model, plan: Plan, clock: Clock, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Microseconds for a second of audio by streams and frames of a chunk, each call waited for before the next one."""
    config = model.codec_config
    slots = EngineConfig(max_num_seqs=-(-max(plan.streams) // 2))  # the engine has two streams of the codec to a slot
    vocoder: Vocoder = build_vocoder(model.codec, slots, max(plan.contexts, default=0) + BLOCK)
    frame_s = config.frame_length / config.sample_rate
    generator = np.random.default_rng(0)
    for chunk in plan.chunks if vocoder.quantum is None else (vocoder.quantum,):
        for streams in plan.streams if vocoder.quantum is None else (1,):
            codes = generator.integers(0, config.residual_size, (streams, config.num_codebooks, chunk)).astype(np.int32)
            on_device: deque[float] = deque(maxlen=MOST)

            def decode(times: int, codes: Int32 = codes, on_device: deque[float] = on_device) -> None:
                for _ in range(times):
                    decoding = vocoder.start(list(range(len(codes))), codes, keep=True)
                    decoding.result()
                    on_device.append(decoding.seconds or math.nan)

            calls, call_s = clock.each(decode)
            device_s = float(np.median(on_device))
            audio_s = streams * chunk * frame_s
            yield {"streams": streams, "chunk": chunk, "calls": calls, "call_ms": 1e3 * call_s, "device_ms": 1e3 * device_s,
                   "us_per_audio_s": 1e6 * call_s / audio_s, "device_us_per_audio_s": 1e6 * device_s / audio_s,
                   "floor_us_per_audio_s": 1e6 * codec_floor_s(sizes, H200) / frame_s,
                   "audio_s_per_s": audio_s / call_s}  # fmt: skip
