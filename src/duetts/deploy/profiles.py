"""Profiles: settings that ship with the package for a type of model and a kind of machine. They lie under the file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from duetts.config import EMBEDDED
from duetts.deploy.sizing import ENGINES_OF_A_WORKER, QUEUE, SHARE, places
from duetts.errors import ConfigError, DuettsError
from duetts.machine import Gpu, local_gpus
from duetts.model_config import read_model_config
from duetts.settings.files import READERS, load
from duetts.settings.values import DEFAULT, Value, hint, resolve, unknown_variables

FOLDER = Path(__file__).parent
AUTO, NONE = "auto", "none"
VERSION = 1
KNOWN_MODELS = {"fishaudio/s2-pro": "fish_qwen3_omni"}
LEAST_WIDTH = 2048  # of the slow decoder; for smaller models the defaults are made
SMALL, SMALLEST = 28e9, 20e9  # bytes of GPUs below which 8-bit weights are chosen
PEER_FOLDER = Path("vllm_omni/deploy")

Layer = tuple[str, Mapping[str, Any]]


def profile_names() -> list[str]:
    """Those that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_profile(name: str) -> dict[str, Any]:
    """The content of a profile. Raises `ConfigError` for an unknown name."""
    known = profile_names()
    if name not in known:
        raise ConfigError(f"profile {name} is unknown; there are {', '.join((AUTO, NONE, *known))}{hint(name, known)}")
    return dict(_shipped(name))


@cache
def _shipped(name: str) -> Mapping[str, Any]:
    return load(FOLDER / f"{name}.yaml")


def read_files(path: str | None) -> tuple[str | None, list[Layer]]:
    """A configuration file and those that it is based on, the base first; and the profile below them, if one is named.

    A name without a folder that is no file is a profile of that name; so is one in vLLM-Omni's own folder, as its users write.
    Raises `ConfigError`.
    """
    layers: list[Layer] = []
    seen: set[Path] = set()
    here = Path()
    while path:
        found = here / Path(path).expanduser()
        stem = found.stem if found.suffix in READERS else found.name
        if not found.exists() and Path(path).parent in (Path(), PEER_FOLDER) and (stem in profile_names() or not found.suffix):
            load_profile(stem)
            return stem, layers
        if found.resolve() in seen:
            raise ConfigError(f"{found.name}: its base leads back to itself")
        seen.add(found.resolve())
        content = dict(load(found))
        path, here = _take_head(found.name, content), found.parent
        layers.insert(0, (found.name, content))
    return None, layers


def settle(
    flags: Mapping[str, tuple[str, list[str]]],
    variables: Mapping[str, str],
    config: str | None,
    profile: str | None,
    *more: Layer,
) -> tuple[dict[str, Value], list[str]]:
    """Every setting of flags, variables, `more`, the file that one of them names and a profile, in this order; and what should
    be told of them. Raises `ConfigError`."""
    base, files = read_files(config or variables.get("config"))
    layers = [*files, *more]
    named = profile or variables.get("profile") or base or AUTO
    chosen, told = choose(named, resolve(flags, variables, *layers))
    return resolve(flags, variables, chosen, *layers), [*unknown_variables(variables), *told]


def _take_head(name: str, content: dict[str, Any]) -> str | None:
    """Takes out what is no setting; returns the base."""
    if "stages" in content or "base_config" in content:
        raise ConfigError(f"{name} is a deploy file of vLLM-Omni: `duetts config --from-vllm-omni {name}` makes one for duetts")
    version = content.pop("version", VERSION)
    if version != VERSION:
        raise ConfigError(f"{name}: version is {version!r}; this duetts reads version {VERSION}")
    kind = content.pop("model_type", None)
    if kind not in (None, *KNOWN_MODELS.values(), "dual_ar"):
        supported = ", ".join(sorted({*KNOWN_MODELS.values(), "dual_ar"}))
        raise ConfigError(f"{name}: model_type {kind!r} is not supported; supported are {supported}")
    base = content.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{name}: base must be the name of a profile or a file")
    return base


def choose(name: str, values: Mapping[str, Value]) -> tuple[Layer | None, list[str]]:
    """The profile of that name as this machine has room for it, and what is to be told. "auto" goes by model and GPUs.

    `values` are the settings without it. Raises `ConfigError` for what is unknown, or for too few GPUs.
    """
    model, device = values["model"].value, values["device"].value
    kind, notes = model_type(model, values["revision"].value)
    if name == NONE or (name == AUTO and kind is None):
        return None, notes if name == AUTO else []
    gpus = _usable(local_gpus(), device)
    chosen = automatic(gpus) if name == AUTO else name
    content = load_profile(chosen)
    made_for, about = content.pop("model_type"), content.pop("about")
    if kind not in (None, made_for):
        raise ConfigError(f"profile {chosen} is for models of type {made_for}; {model} is {kind}")
    if gpus is not None and device != "cpu":
        _check_count(chosen, content.get("processes", {}), values, len(gpus))
    layer = (f"profile {chosen}", fitted(content, gpus or [], values["gpu_memory_utilization"].value))
    sizes = {**layer[1]["engine"], **layer[1].get("processes", {})}
    told = ", ".join(f"{key} {value}" for key, value in sizes.items())
    return layer, [f"profile {chosen}: {about}. It sets {told or 'nothing else'}; --profile none leaves it out"]


def _check_count(name: str, processes: Mapping[str, Any], values: Mapping[str, Value], count: int) -> None:
    """Raises `ConfigError` for a profile that needs more GPUs than there are, where nobody has said otherwise."""
    engines = processes.get("engines", 1)
    if count < engines > 1 and values["engines"].source == DEFAULT:
        raise ConfigError(f"profile {name} starts {engines} engines, one on each GPU; GPUs here: {count}")
    if count < 2 and processes.get("codec_device") == "next" and values["codec_device"].source == DEFAULT:
        raise ConfigError(f"profile {name} puts the codec on a second GPU; GPUs here: {count}")


def automatic(gpus: list[Gpu] | None) -> str:
    """The profile of S2 Pro for these GPUs. Where nothing is known of them, the one that most have room for."""
    if gpus is None:
        return "fish_qwen3_omni"
    if not gpus:
        return "fish_qwen3_omni_cpu"
    least = min(gpu.total for gpu in gpus)
    return "fish_qwen3_omni" + ("_16gb" if least < SMALLEST else "_24gb" if least < SMALL else "")


def fitted(content: Mapping[str, Any], gpus: list[Gpu], share: float = SHARE) -> dict[str, Any]:
    """A profile's settings with `at_most` made numbers: engines for GPUs with room for one, HTTP processes that carry what
    these make, places for the memory that is free on each. Without known GPUs the defaults hold."""
    parts = {key: value for key, value in content.items() if key not in ("version", "at_most")}
    engine, most = dict(parts.get("engine", {})), content.get("at_most", {})
    apart = parts.get("processes", {}).get("codec_device") == "next"
    kind = engine.get("quantization", "none")
    rooms = [places(gpu.free, gpu.total, share, kind, codec=not apart) for gpu in gpus[:: 2 if apart else 1]]
    if most and rooms:
        first_full = next((number for number, room in enumerate(rooms) if room == 0), len(rooms))
        engines = max(1, min(first_full, most.get("engines", 0) or parts.get("processes", {}).get("engines", 1)))
        engine["max_num_seqs"] = max(1, min(most["max_num_seqs"], *rooms[:engines]))
        engine["max_queue"] = QUEUE * engine["max_num_seqs"]
        if "engines" in most and engines > 1:
            parts["processes"] = {"engines": engines}
            if engines > ENGINES_OF_A_WORKER:
                parts["server"] = {"workers": -(-engines // ENGINES_OF_A_WORKER)}
    return {**parts, "engine": engine}


def _usable(gpus: list[Gpu] | None, device: str) -> list[Gpu] | None:
    """The GPUs that engines would run on."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return []
    return gpus[int(index) : int(index) + 1] if gpus and index.isdecimal() else gpus


def model_type(model: str | None, revision: str | None = None) -> tuple[str | None, list[str]]:
    """The type of a large model, by its config.json on this machine; None for small ones and those that cannot be told, and
    then why. What is wrong with a model is told where it is loaded."""
    if model is None or model == EMBEDDED:
        return None, []
    if model in KNOWN_MODELS and not Path(model).is_dir():
        return KNOWN_MODELS[model], []
    folder = Path(model).expanduser()
    if not folder.is_dir():
        try:
            cached = try_to_load_from_cache(model, "config.json", revision=revision)
        except ValueError:  # no name of the hub's
            cached = None
        if not isinstance(cached, str):
            return None, [f"no profile: the type of {model} is not known before it is fetched; --profile names one"]
        folder = Path(cached).parent
    try:
        found = read_model_config(folder)
    except (DuettsError, OSError):
        return None, []
    return (found.model_type if found.slow.dim >= LEAST_WIDTH else None), []
