"""A recipe: how to install and serve a model on given hardware, with a reason for each flag and an estimate of what to expect.

The same request gives the same recipe, byte for byte. Every number of time is an estimate from `roofline.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from duetts.config import EMBEDDED
from duetts.deploy import sizing
from duetts.deploy.profiles import SMALL, SMALLEST, load_profile, model_type
from duetts.errors import ConfigError
from duetts.machine import Gpu, local_gpus
from duetts.recipe.cards import DEFAULT, HARDWARE, Hardware, recognise
from duetts.recipe.examples import GUIDE, docker_argv, examples, install, verify
from duetts.roofline import FRAME_S, S2_PRO, Card, Sizes, frame_floor_s, prefill_floor_s
from duetts.settings.values import hint

SCHEMA = "duetts.recipe/1"
S2_PRO_ID = "fishaudio/s2-pro"
VARIANTS = ("default", "bf16", "int8", "fp8")
TASKS = ("t2a",)
GOALS = ("balanced", "latency", "throughput")
QUANTIZATIONS = {"bf16": "none", "fp32": "none", "int8": "int8", "fp8": "fp8"}
# What a good engine reaches of the floor, and its gaps between kernels: so the H200 comes near the targets of roofline.py.
REACHED, GAPS_S = 0.8, 0.0006
CONTEXT, PROMPT = 500, 265  # positions: of a speech on average; of a clip of 10 s and a sentence
DOORS_S = 0.004  # of a first chunk, outside of the engine
LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # batch sizes that the engine records
BUSY = {"latency": 0.15, "balanced": 0.35, "throughput": 0.9}  # share of a frame's time that a full batch may take
LINE = {"latency": 1, "balanced": sizing.QUEUE, "throughput": 2 * sizing.QUEUE}
APART = "_2gpu"  # the end of the profile whose codec has a GPU of its own
SLOW_ALONE = 0.5  # RTF of one request above which a card needs weights in 8 bits


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of a model. Without `sizes` there are no estimates of time."""

    id: str
    parameters: int
    license: str
    sizes: Sizes | None


MODELS = {
    S2_PRO_ID: Model(S2_PRO_ID, 4_560_000_000, "Fish Audio Research License: research, not commercial use", S2_PRO),
    EMBEDDED: Model(EMBEDDED, 14_300_000, "Apache-2.0", None),
}


@dataclass(frozen=True, slots=True)
class Request:
    """What a recipe is asked for. None is the default."""

    model: str | None = None
    hardware: str | None = None
    gpus: str | None = None
    variant: str | None = None
    task: str | None = None
    goal: str | None = None


@dataclass(slots=True)
class Reading:
    """Values of a request as they can be: what is unknown or impossible becomes the default with a warning, or with `strict` a
    `ConfigError`."""

    strict: bool
    warnings: list[str]

    def one_of(self, name: str, value: str | None, known: Sequence[str], default: str) -> str:
        if value is None or value in known:
            return value or default
        return self.instead(name, value, f"it can be {', '.join(known)}{hint(value, list(known))}", default)

    def instead(self, name: str, value: str, why: str, default: str) -> str:
        if self.strict:
            raise ConfigError(f"{name} {value[:64]!r} has no recipe: {why}")
        self.warnings.append(f"{name} {value[:64]!r} has no recipe: {why}. This one is for {default}")
        return default


def make(request: Request, strict: bool = False, gpus: Callable[[], list[Gpu] | None] = local_gpus) -> dict[str, Any]:
    """The recipe as plain values in the order of docs/recipe.schema.json. `gpus` are asked for hardware "auto" only.

    Raises `ConfigError` for values that have none, if `strict`.
    """
    reading = Reading(strict, [])
    model = _model(reading, request.model)
    hardware_id, hardware, count = _hardware(reading, request, "cpu" if model.sizes is None else DEFAULT, gpus)
    variant = reading.one_of("variant", request.variant, VARIANTS, "default")
    task = reading.one_of("task", request.task, TASKS, TASKS[0])
    goal = reading.one_of("goal", request.goal, GOALS, GOALS[0])
    variant, precision = _precision(reading, variant, hardware, model)
    if not (hardware.measured or model.sizes is None):
        reading.warnings.append(f"untested: nobody has run {model.id} on {hardware.card.name} with duetts")
    flags, profile = _flags(model, hardware, count, precision, goal)
    argv = ["duetts", "serve", model.id, "--profile", profile or "none"]
    argv += [word for name, value, _ in flags for word in ("--" + name.replace("_", "-"), str(value))]
    visible = ",".join(map(str, range(count))) if 0 < count < hardware.gpus else ""
    places = next(value for name, value, _ in flags if name == "max_num_seqs")
    replicas = 1 if profile.endswith(APART) else max(1, count)
    estimates = _estimates(model, hardware, precision, int(places), goal, replicas, profile.endswith(APART), reading.warnings)
    docker = docker_argv(argv, hardware.brand, visible)
    about = load_profile(profile)["about"] if profile else "The model is so small that the defaults do"
    return {
        "schema": SCHEMA,
        "model": {"id": model.id, "model_type": "fish_qwen3_omni", "parameters": model.parameters, "license": model.license},
        "configuration": {
            "hardware": hardware_id, "gpu_count": count, "gpu_name": hardware.card.name, "vram_gb_per_gpu": hardware.memory_gb,
            "variant": variant, "precision": precision, "task": task, "goal": goal,
        },
        "requested": {name: getattr(request, name) for name in Request.__slots__},
        "warnings": reading.warnings,
        "options": {"hardware": ["auto", *HARDWARE], "variant": [*VARIANTS], "task": [*TASKS], "goal": [*GOALS]},
        "install": install(hardware.brand),
        "serve": {
            "command": ("CUDA_VISIBLE_DEVICES=" + visible + " " if visible else "") + shlex.join(argv), "argv": argv,
            "env": {"CUDA_VISIBLE_DEVICES": visible} if visible else {},
            "docker_command": shlex.join(docker), "docker_argv": docker,
            "reasons": {"--profile": about} | {"--" + name.replace("_", "-"): reason for name, _, reason in flags},
        },
        "deploy_config": _deploy_config(model.id, profile, flags),
        "verify": verify(model.id),
        "examples": examples(model.id, task),
        "estimates": estimates,
        "guide_md": GUIDE,
    }  # fmt: skip


def _model(reading: Reading, name: str | None) -> Model:
    if name is not None and name not in MODELS and model_type(name)[0] is not None:
        return replace(MODELS[S2_PRO_ID], id=name)  # a folder of the same type
    return MODELS[reading.one_of("model", name, [*MODELS], S2_PRO_ID)]


def _hardware(
    reading: Reading, request: Request, default: str, gpus: Callable[[], list[Gpu] | None]
) -> tuple[str, Hardware, int]:
    """Id, hardware and how many GPUs of it."""
    name, here = request.hardware, 0
    if name == "auto":
        found = gpus()
        name, here = recognise(found)
        if name is None:
            told = found[0].name if found else "GPUs of which nothing can be told"
            name = reading.instead("hardware", "auto", f"this machine has {told}", default)
        elif found:
            chosen = replace(HARDWARE[name], gpus=len(found), memory_gb=round(min(gpu.total for gpu in found) / 1e9))
            return name, chosen, _count(reading, request.gpus, chosen, here)
    name = reading.one_of("hardware", name, ["auto", *HARDWARE], default)
    return name, HARDWARE[name], _count(reading, request.gpus, HARDWARE[name], HARDWARE[name].gpus)


def _count(reading: Reading, text: str | None, hardware: Hardware, default: int) -> int:
    known = [str(number) for number in range(min(1, hardware.gpus), hardware.gpus + 1)]
    return int(reading.one_of("gpus", text, known, str(default)))


def _precision(reading: Reading, variant: str, hardware: Hardware, model: Model) -> tuple[str, str]:
    """The variant as it can be, and its precision: bf16 where the card can, 8 bits where its memory is small or slow. One
    request alone decides what is too slow."""
    if hardware.brand == "cpu" or model.sizes is None:
        usual = "fp32" if hardware.brand == "cpu" else "bf16"
        return reading.one_of("variant", variant, ["default"], "default"), usual
    small = hardware.memory_gb * 1e9 < SMALL or _busy(1, "bf16", hardware.card) > SLOW_ALONE
    usual = "int8" if small else "bf16"
    if variant == "fp8" and not hardware.fp8:
        variant = reading.instead("variant", variant, f"{hardware.card.name} has no such type; int8 is as small", "int8")
    elif variant != "default" and _room(hardware, variant) < 1:
        variant = reading.instead("variant", variant, f"it does not fit into {hardware.memory_gb:g} GB", "default")
    return variant, usual if variant == "default" else variant


Flag = tuple[str, Any, str]


def _flags(model: Model, hardware: Hardware, count: int, precision: str, goal: str) -> tuple[list[Flag], str]:
    """Name, value and reason of each flag over the profile, and the profile."""
    if model.sizes is None:
        device = ("device", "cuda" if count else "cpu", "The hardware that was asked for")
        return [("max_num_seqs", 8, "The default"), device, ("engines", max(1, count), "One on each GPU")], ""
    if count == 0:
        reason = "A CPU is slower than one listens: few at a time"
        return [("max_num_seqs", 1 if goal == "latency" else 2, reason)], "fish_qwen3_omni_cpu"
    memory = hardware.memory_gb * 1e9
    suffix = "_16gb" if memory < SMALLEST else "_24gb" if memory < SMALL else {2: APART, 8: "_8gpu"}.get(count, "")
    profile = load_profile("fish_qwen3_omni" + suffix)
    flags: list[Flag] = []
    if "processes" not in profile:
        flags.append(("engines", count, "A whole engine on each GPU; a model is not spread over several"))
    kind = QUANTIZATIONS[precision]
    if kind != profile.get("engine", {}).get("quantization", "none"):
        why = "Asked for" if kind == "none" else "Half as much to read for each frame, and half the memory"
        flags.append(("quantization", kind, why))
    apart = suffix == APART
    room, time = _room(hardware, precision, apart), _in_time(precision, hardware.card, BUSY[goal], apart)
    places = max([1, *(step for step in LADDER if step <= min(room, time))])
    bound = f"{BUSY[goal]:.0%} of a frame's 46 ms" if time <= room else f"{hardware.memory_gb:g} GB of memory"
    few = f"One: by estimate even it takes more than {bound}"
    flags.append(("max_num_seqs", places, f"As many as {bound} allow by estimate, for {goal}" if time else few))
    flags.append(("max_queue", LINE[goal] * places, f"{LINE[goal]} may wait for each place, for {goal}"))
    if goal == "latency":
        flags.append(("first_chunk", 1, "The first audio is one frame, 46 ms"))
        flags.append(("max_wait", 1, "Who would wait longer is told at once, and can ask another server"))
    if goal == "throughput":
        flags.append(("first_chunk", 4, "Fewer calls of the codec; the first audio is later by two frames"))
    return flags, "fish_qwen3_omni" + suffix


def _deploy_config(model: str, profile: str, flags: Sequence[Flag]) -> dict[str, Any]:
    """The same as a file for --config."""
    sections: dict[str, dict[str, Any]] = {"model": {"model": model}, "engine": {}, "processes": {}}
    for name, value, _ in flags:
        sections["processes" if name == "engines" else "engine"][name] = value
    head = {"version": 1, "model_type": "fish_qwen3_omni", **({"base": profile} if profile else {})}
    return {**head, **{name: section for name, section in sections.items() if section}}


# -- estimates -----------------------------------------------------------------------------------------------------------


def _sizes(precision: str) -> Sizes:
    return replace(S2_PRO, weight_bytes={"bf16": 2, "fp32": 4}.get(precision, 1))


def _frame_s(streams: int, precision: str, card: Card) -> float:
    return frame_floor_s(streams, CONTEXT, _sizes(precision), card) / REACHED + GAPS_S


def _busy(streams: int, precision: str, card: Card, apart: bool = False) -> float:
    """RTF of so many streams, language model and codec, one after another or on a card each."""
    frame_s, codec_s = _frame_s(streams, precision, card), streams * S2_PRO.codec_flop / card.codec_flops / REACHED
    return (max(frame_s, codec_s) if apart else frame_s + codec_s) / FRAME_S


def _in_time(precision: str, card: Card, share: float, apart: bool) -> int:
    return max([0, *(step for step in LADDER if _busy(step, precision, card, apart) <= share)])


def _room(hardware: Hardware, precision: str, apart: bool = False) -> int:
    memory = hardware.memory_gb * 1e9
    return sizing.places(memory, memory, sizing.SHARE, QUANTIZATIONS[precision], codec=not apart)


def _estimates(
    model: Model, hardware: Hardware, precision: str, places: int, goal: str, replicas: int, apart: bool,
    warnings: list[str],
) -> dict[str, Any]:  # fmt: skip
    if model.sizes is None:
        source = "no estimate: so small a model is bound by the gaps between its operations. `duetts bench` measures"
        return {"weights_gb": 0.06, "kv_gb": None, "max_num_seqs": places, "ttfa_ms": None, "rtf": None, "rtf_full": None,
                "audio_seconds_per_second": None, "source": source}  # fmt: skip
    card = hardware.card
    alone, full = _busy(1, precision, card, apart), _busy(places, precision, card, apart)
    if alone > 1:
        warnings.append(
            f"{card.name} is estimated to need {alone:.1f} s for a second of speech: no stream would play without gaps"
        )
    frames = {"latency": 1, "throughput": 4}.get(goal, 2)
    first = DOORS_S + prefill_floor_s(PROMPT, _sizes(precision), card) / REACHED + frames * _busy(1, precision, card) * FRAME_S
    numbers = "measured bandwidth and arithmetic" if hardware.measured else "its data sheet"
    return {
        "weights_gb": 18.25 if precision == "fp32" else round(sizing.WEIGHTS[QUANTIZATIONS[precision]] / 1e9, 2),
        "kv_gb": round(max(4, places) * sizing.PLACE * sizing.POSITION * (2 if precision == "fp32" else 1) / 1e9, 2),
        "max_num_seqs": places,
        "ttfa_ms": round(1000 * first),
        "rtf": round(alone, 3),
        "rtf_full": round(full, 3),
        "audio_seconds_per_second": round(replicas * places / full, 1),
        "source": f"an estimate, not a measurement: the roofline with {numbers}, of which {REACHED:.0%} are reached, and "
        f"{1000 * GAPS_S:g} ms of gaps a frame; {CONTEXT} positions a speech, a clip of 10 s whose codes are known",
    }  # fmt: skip
