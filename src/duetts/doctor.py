"""What a model folder holds and what this machine can do with it: files, sizes, devices, kernels, and what will not fit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from duetts.attention import fish_kvcache_attn
from duetts.checkpoint import read_configs
from duetts.checkpoint_files import TensorFile, open_codec, open_language_model
from duetts.config import EngineConfig, ProcessConfig
from duetts.cores import usable_cores
from duetts.engine.memory import MemoryPlan, choose_device, longest_sequence, plan_memory
from duetts.engine.process import place, place_codec
from duetts.errors import CheckpointError, ConfigError
from duetts.model_config import CodecConfig, ModelConfig

GB = 1e9


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `good` None is a plain fact."""

    topic: str
    text: str
    good: bool | None = None


def examine(folder: Path, config: EngineConfig, processes: ProcessConfig) -> Iterator[Finding]:
    """Looks at everything; a problem ends its own part of the report, not the rest. Memory is that of the first engine."""
    yield from _machine()
    try:
        model_config, codec_config = read_configs(folder)
    except CheckpointError as error:
        yield Finding("config", str(error), good=False)
        return
    yield Finding("config", f"{model_config.model_type}, {model_config.num_codebooks} codebooks", good=True)
    if model_config.untrained:
        yield Finding("weights", "untrained: what it speaks is noise")
    rate = codec_config.sample_rate / codec_config.frame_length
    yield Finding("codec", f"{codec_config.sample_rate} Hz, {rate:.2f} frames a second", good=True)
    sizes = []
    for name, read in (("language model", _language_model_bytes), ("codec", _codec_bytes)):
        try:
            sizes.append(read(folder))
            yield Finding(name, f"{sizes[-1] / GB:.3f} GB on disk, complete headers", good=True)
        except (CheckpointError, OSError) as error:
            yield Finding(name, str(error), good=False)
    tokenizer = (folder / "tokenizer.json").exists()
    yield Finding("tokenizer", "tokenizer.json is there" if tokenizer else "tokenizer.json is missing", good=tokenizer)
    if len(sizes) == 2:
        yield from _memory(model_config, codec_config, config, processes)


def _machine() -> Iterator[Finding]:
    yield Finding("machine", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}")
    yield Finding("cores", f"{usable_cores()} may be used, the machine has {os.cpu_count()}")
    yield Finding("torch", torch.__version__)
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "absent"
    yield Finding("triton", triton)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding(f"cuda:{index}", f"{name}, {free / GB:.1f} of {total / GB:.1f} GB free", good=True)
    if not torch.cuda.is_available():
        yield Finding("cuda", "no CUDA device: the CPU is used")
    yield from _kernels()


def _kernels() -> Iterator[Finding]:
    """Whether decode attention has its kernel here, and on a GPU whether it is right."""
    found = fish_kvcache_attn.status()
    counts = f"{found['hits_short']} short, {found['hits_long']} long, {sum(found['fallbacks'].values())} fallbacks"
    text = f"fish_kvcache_attn is {found['mode']}, {'available' if found['available'] else found['reason']}; {counts}"
    good = None if found["mode"] != "required" else bool(found["available"])
    if found["available"] and found["mode"] != "off":
        error = fish_kvcache_attn.self_test("cuda")
        text, good = f"{text}; self test: off by {error:.2g} at most", error <= fish_kvcache_attn.TOLERANCE
    yield Finding("kernels", text, good)


def _tensor_bytes(files: list[TensorFile]) -> int:
    return sum(file.path.stat().st_size for file in files)


def _language_model_bytes(folder: Path) -> int:
    return _tensor_bytes(open_language_model(folder))


def _codec_bytes(folder: Path) -> int:
    return _tensor_bytes([open_codec(folder)])


def _memory(model: ModelConfig, codec: CodecConfig, config: EngineConfig, processes: ProcessConfig) -> Iterator[Finding]:
    """The same sums that a start refuses by, for each process, against what is free now."""
    slots = f"{config.max_num_seqs} slots, {longest_sequence(model, config)} positions at most"
    if processes.codec_device == "same":
        yield _fit("memory", model, codec, config, slots, lambda plan: plan)
        return
    engine = place(config, 0, processes)
    yield _fit("engine memory", model, codec, engine, slots, lambda plan: replace(plan, codec=0))
    apart = place_codec(engine, processes)
    yield _fit("codec memory", model, codec, apart, "a process of its own", lambda plan: replace(plan, weights=0, positions=0))


def _fit(
    topic: str, model: ModelConfig, codec: CodecConfig, config: EngineConfig, what: str,
    part: Callable[[MemoryPlan], MemoryPlan],
) -> Finding:  # fmt: skip
    try:
        device = choose_device(config.device)
        plan = part(plan_memory(model, codec, config, device))
    except ConfigError as error:
        return Finding(topic, str(error), good=False)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_host_bytes()
    fits = plan.total <= free
    advice = "" if fits else "; it does not fit: lower max_num_seqs or max_model_len"
    return Finding(topic, f"{plan} ({what}); {free / GB:.2f} GB free on {device}{advice}", good=fits)


def _free_host_bytes() -> int:
    """What the kernel says is available; where it is not Linux, all of the memory."""
    try:
        told = Path("/proc/meminfo").read_text()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = next(line for line in told.splitlines() if line.startswith("MemAvailable:"))
    return int(available.split()[1]) * 1024
