"""What an engine takes of its device, known before anything is loaded: where it runs, in which type, the sum of all memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from duetts.config import EngineConfig
from duetts.engine.pages import PAGE, pages_for
from duetts.engine.vocoder import count_graphed_bytes
from duetts.errors import ConfigError, NotEnoughMemory
from duetts.model_config import CodecConfig, ModelConfig
from duetts.models.blocks import Projection
from duetts.models.codec import Codec
from duetts.models.dual_ar import DualAR

DEFAULT_MODEL_LEN = 8192  # positions; more must be asked for, as the cache must hold one such sequence
ORDINARY_LEN = 2048  # positions that are set aside for each sequence: 60 s of reference and as much speech
WORK_SPACE = 1_000_000_000  # bytes of a GPU for libraries, recordings and what is computed in passing


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


def choose_dtype(name: str, device: torch.device, model: ModelConfig) -> torch.dtype:
    """ "auto" is float32 on a CPU and the checkpoint's own type on a GPU."""
    chosen = ("float32" if device.type == "cpu" else model.dtype) if name == "auto" else name
    return {
        "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16
    }[chosen]  # fmt: skip


def longest_sequence(model: ModelConfig, config: EngineConfig) -> int:
    """Positions that one sequence may have. Raises `ConfigError` if more are asked for than the model has."""
    longest = model.slow.max_positions
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len {config.max_model_len} exceeds the model's {longest}")
    return min(longest, config.max_model_len or DEFAULT_MODEL_LEN)


def cache_positions(config: EngineConfig, longest: int) -> int:
    """Positions of the KV cache, whole pages: as set, else `ORDINARY_LEN` for each sequence; one of full length always fits."""
    wanted = config.kv_positions or max(longest, config.max_num_seqs * min(longest, ORDINARY_LEN))
    if wanted < longest:
        raise ConfigError(f"kv_positions is {wanted}; one sequence alone may need {longest} (max_model_len)")
    return pages_for(wanted) * PAGE


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that a model takes on its device before the first request, and the positions of its KV cache."""

    weights: int
    codec: int
    work_space: int
    positions: int
    position_bytes: int

    @property
    def caches(self) -> int:
        return self.positions * self.position_bytes

    @property
    def total(self) -> int:
        return self.weights + self.codec + self.work_space + self.caches

    def __str__(self) -> str:
        parts = (self.total, self.weights, self.codec, self.work_space, self.caches)
        text = "{:.2f} GB needed: weights {:.2f}, codec {:.2f}, work space {:.2f}, caches {:.2f}"
        return text.format(*(part / 1e9 for part in parts))


def plan_memory(model: ModelConfig, codec: CodecConfig, config: EngineConfig, device: torch.device) -> MemoryPlan:
    """What `config` asks for. The codec counts as float32; a GPU decodes with a packed copy of half of it.

    Raises `ConfigError` for positions that do not go together.
    """
    positions = cache_positions(config, longest_sequence(model, config))
    dtype = choose_dtype(config.dtype, device, model)
    with torch.device("meta"):
        dual_ar, waveform = DualAR(model), Codec(codec)
    weights = sum(parameter.numel() for parameter in dual_ar.parameters()) * dtype.itemsize
    if config.quantization != "none":
        matrices = [module.weight for module in dual_ar.modules() if isinstance(module, Projection)]
        weights += sum(4 * len(matrix) - matrix.numel() * (dtype.itemsize - 1) for matrix in matrices)
    codec_bytes = sum(parameter.numel() for parameter in waveform.parameters()) * 4
    on_gpu = device.type == "cuda"
    slow = model.slow
    return MemoryPlan(
        weights=weights,
        codec=codec_bytes + (count_graphed_bytes(codec, slots=codec_slots(config)) if on_gpu else 0),
        work_space=WORK_SPACE if on_gpu else 0,
        positions=positions,
        position_bytes=2 * slow.num_layers * slow.num_kv_heads * slow.head_dim * dtype.itemsize,
    )


def codec_slots(config: EngineConfig) -> int:
    """There are two streams of the codec to a sequence: audio may follow when one has ended and the next has begun."""
    return 2 * config.max_num_seqs


def fit_memory(plan: MemoryPlan, model: ModelConfig, config: EngineConfig, device: torch.device) -> MemoryPlan:
    """The plan as a GPU has room for it: no more than is free and than `gpu_memory_utilization` of all. A KV cache whose size
    was not asked for takes what is left. Raises `NotEnoughMemory` if that is not enough for one sequence of full length."""
    if device.type != "cuda":
        return plan
    free, total = torch.cuda.mem_get_info(device)
    room = min(free, int(total * config.gpu_memory_utilization))
    if plan.total <= room:
        return plan
    left = (room - (plan.total - plan.caches)) // plan.position_bytes // PAGE * PAGE
    if config.kv_positions is None and left >= longest_sequence(model, config):
        return replace(plan, positions=left)
    share = f"{config.gpu_memory_utilization:g} of {total / 1e9:.2f} GB may be used"
    advice = "lower max_num_seqs, max_model_len or kv_positions, or set quantization"
    raise NotEnoughMemory(f"{plan}; {free / 1e9:.2f} GB are free on {device}, {share}: {advice}")
