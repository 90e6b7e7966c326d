"""Deploy files of vLLM-Omni made into settings of duetts. Stage 0 there is the language model, stage 1 the codec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from duetts.errors import ConfigError
from duetts.settings.files import load
from duetts.settings.table import BY_NAME
from duetts.settings.values import from_plain

OURS = ("max_model_len", "dtype", "quantization")  # of the file or of stage 0, where they mean the same here
NO_EQUAL: Mapping[str, str] = load(Path(__file__).parent / "vllm_omni.toml")
ONLY_ONE = ("tensor_parallel_size", "pipeline_parallel_size")
OWN = ("stages", "platforms", "base_config", "custom_voice_dir", "data_parallel_size", *OURS, *ONLY_ONE)
OF_STAGES = (
    "stage_id", "devices", "num_replicas", "max_num_seqs", "gpu_memory_utilization", "engine_args", *OURS, *ONLY_ONE,
)  # fmt: skip


def convert(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Sections of a file of duetts, and a line for each thing that has no equal in it. Raises `ConfigError`."""
    content = _merged(path, ())
    stages = _by_id(path.name, content.get("stages"))
    for platform, overlay in (content.get("platforms") or {}).items():
        if platform == "cuda" and isinstance(overlay, Mapping):
            stages = _overlaid(stages, _by_id(path.name, overlay.get("stages")))
    if 0 not in stages:
        raise ConfigError(f"{path.name} has no stage 0: it is no deploy file of vLLM-Omni for this model")
    language, codec = stages[0], stages.get(1, {})
    notes = list(_without_equal(content, stages))
    engine = {name: _fit(name, value) for name in OURS if (value := language.get(name, content.get(name))) is not None}
    if "max_num_seqs" in language:
        engine["max_num_seqs"] = _fit("max_num_seqs", language["max_num_seqs"])
    apart = str(codec.get("devices", "0")) != str(language.get("devices", "0"))
    if "gpu_memory_utilization" in language:
        shares = [_fit("gpu_memory_utilization", stage.get("gpu_memory_utilization", 0.0)) for stage in (language, codec)]
        engine["gpu_memory_utilization"] = shares[0] if apart else round(sum(shares), 4)
        if not apart:
            notes.append("stages 1.gpu_memory_utilization is added to that of stage 0: both are one process here")
    engines = max(
        _count(name, where.get(name)) for name, where in (("num_replicas", language), ("data_parallel_size", content))
    )
    if str(language.get("devices", "0")) not in ("0", "auto"):
        notes.append(f"stages 0.devices is {language['devices']}: say it with CUDA_VISIBLE_DEVICES")
    made: dict[str, Any] = {"engine": engine}
    processes = {**({"engines": engines} if engines > 1 else {}), **({"codec_device": "next"} if apart else {})}
    if processes:
        made["processes"] = processes
    if content.get("custom_voice_dir"):
        made["voices"] = {"voices_dir": str(content["custom_voice_dir"])}
    return made, notes


def as_file(name: str, made: Mapping[str, Any], notes: list[str]) -> str:
    """A configuration file, what it leaves out as comments."""
    head = [f"# From {name} of vLLM-Omni. Without an equal here:" if notes else f"# From {name} of vLLM-Omni."]
    return "\n".join([*head, *(f"# * {note}" for note in notes), yaml.safe_dump({"version": 1, **made}, sort_keys=False)])


def _fit(name: str, value: Any) -> Any:
    """The value, if it is one here too."""
    if name == "quantization" and value in (None, "none"):
        return "none"
    return from_plain(BY_NAME[name], value, name)


def _count(name: str, value: Any) -> int:
    """A whole number; 1 if there is none."""
    found: int = from_plain(BY_NAME["engines"], 1 if value is None else value, name)
    return found


def _merged(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The file over its base; stages are merged by their number."""
    if path.resolve() in seen:
        raise ConfigError(f"{path.name}: its base_config leads back to itself")
    content = dict(load(path))
    base = content.pop("base_config", None)
    if base is None:
        return content
    under = _merged(path.parent / str(base), (*seen, path.resolve()))
    stages = _overlaid(_by_id(path.name, under.get("stages")), _by_id(path.name, content.get("stages")))
    return {**under, **content, "stages": list(stages.values())}


def _by_id(name: str, stages: Any) -> dict[int, dict[str, Any]]:
    if not isinstance(stages or [], list) or not all(isinstance(stage, Mapping) for stage in stages or []):
        raise ConfigError(f"{name}: stages must be a list of stages")
    found = {}
    for number, stage in enumerate(stages or []):
        inner = stage.get("engine_args") or {}
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{name}: engine_args of a stage must hold names and values")
        found[_count("stage_id", stage.get("stage_id", number))] = {**inner, **stage}
    return found


def _overlaid(under: dict[int, dict[str, Any]], over: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {number: {**under.get(number, {}), **over.get(number, {})} for number in sorted({*under, *over})}


def _without_equal(content: Mapping[str, Any], stages: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each key that is not carried over, with its path."""
    for key, value in content.items():
        if key in ONLY_ONE and value not in (None, 1):
            yield f"{key} {value}: a model is not spread over GPUs"
        elif key == "connectors" and isinstance(value, Mapping):
            for name, connector in value.items():
                extra = connector.get("extra") if isinstance(connector, Mapping) else None
                yield from (f"connectors.{name}.{inner}: {_reason(inner)}" for inner in extra or {})
        elif key == "platforms":
            yield from (f"platforms.{name}: only cuda is carried over" for name in value or {} if name != "cuda")
        elif key not in OWN:
            yield f"{key}: {_reason(key)}"
    for number, stage in stages.items():
        for key, value in stage.items():
            if key in ONLY_ONE and value not in (None, 1):
                yield f"stages {number}.{key} {value}: a model is not spread over GPUs"
            elif number == 1 and key in ("max_num_seqs", *OURS):
                yield f"stages 1.{key}: the codec follows the language model"
            elif key not in OF_STAGES:
                yield f"stages {number}.{key}: {_reason(key)}"


def _reason(key: str) -> str:
    return next((why for pattern, why in NO_EQUAL.items() if fnmatch(key, pattern)), "unknown here")
