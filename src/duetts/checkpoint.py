"""From a model's name to modules with weights: find the folder, map names, stream tensors to their device, check all of it.

This is the only room besides `models/` and `text/` that knows how published checkpoints spell things.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn

from duetts.checkpoint_files import TensorFile, open_codec, open_language_model
from duetts.errors import CheckpointError, ModelNotFound
from duetts.model_config import CodecConfig, ModelConfig, read_codec_config, read_model_config
from duetts.models.codec import Codec
from duetts.models.codec_layers import CausalTransposedConv
from duetts.models.dual_ar import DualAR

HUB_FILES = ("*.json", "*.safetensors", "*.pth", "*.md", "LICENSE*")
CODEC_BUFFERS = ("causal_mask", "freqs_cis")  # masks and tables that the published codec stores and nobody needs

# Where a tensor goes: module parameter, and the range of its rows that this tensor fills (None: all of them).
Place = tuple[str, tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model: both parts and their dimensions."""

    config: ModelConfig
    codec_config: CodecConfig
    dual_ar: DualAR
    codec: Codec


def find_model(name: str, revision: str | None = None, cache: Path | None = None) -> Path:
    """The folder of a local path or hub id. A path never calls out. Raises `ModelNotFound`."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or path.exists() or name.count("/") > 1:
        raise ModelNotFound(f"{name}: is no folder")
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelNotFound(f"{name}: is no folder here and cannot be fetched from the hub: {reason}") from error


def read_configs(folder: Path) -> tuple[ModelConfig, CodecConfig]:
    """The model's and the codec's dimensions, checked against each other."""
    config = read_model_config(folder)
    codec = read_codec_config(folder)
    if codec.num_codebooks != config.num_codebooks:
        raise CheckpointError(f"the model has {config.num_codebooks} codebooks, its codec {codec.num_codebooks}")
    if codec.semantic_size != config.num_semantic:
        raise CheckpointError(f"the model has {config.num_semantic} semantic tokens, its codec {codec.semantic_size}")
    if codec.residual_size > config.fast.vocab_size:
        raise CheckpointError(f"the codec has {codec.residual_size} residual codes, the model {config.fast.vocab_size}")
    return config, codec


def load_model(
    folder: Path, *, device: torch.device, dtype: torch.dtype, codec_dtype: torch.dtype, max_positions: int | None = None,
    dummy_seed: int | None = None, quantization: str = "none",
) -> Model:  # fmt: skip
    """Both parts on one device, filled from the folder, or with seeded random weights if `dummy_seed` is given.

    Raises `CheckpointError` (one of its kinds) naming the file, key or tensor that is wrong.
    """
    config, codec_config = read_configs(folder)
    dual_ar = load_dual_ar(
        folder, device=device, dtype=dtype, max_positions=max_positions, dummy_seed=dummy_seed, quantization=quantization
    )
    return Model(config, codec_config, dual_ar, load_codec(folder, device=device, dtype=codec_dtype, dummy_seed=dummy_seed))


def load_dual_ar(
    folder: Path, *, device: torch.device, dtype: torch.dtype, max_positions: int | None = None,
    dummy_seed: int | None = None, quantization: str = "none",
) -> DualAR:  # fmt: skip
    """The language model alone. Raises as `load_model`."""
    config, codec_config = read_configs(folder)
    with torch.device("meta"):
        dual_ar = DualAR(config, codec_config.residual_size)
    dual_ar.to(dtype).to_empty(device=device)
    if dummy_seed is None:
        _fill(dual_ar, open_language_model(folder), lambda name: _language_model_place(name, dual_ar))
    else:
        randomise_language_model(dual_ar, torch.Generator(device).manual_seed(dummy_seed))
        spread_logits(dual_ar)
    dual_ar.requires_grad_(False)
    dual_ar.eval()
    if quantization != "none":
        dual_ar.quantize(quantization)
    dual_ar.prepare(min(config.slow.max_positions, max_positions or config.slow.max_positions))
    return dual_ar


def load_codec(folder: Path, *, device: torch.device, dtype: torch.dtype, dummy_seed: int | None = None) -> Codec:
    """The codec alone; random weights are the same wherever the language model is. Raises as `load_model`."""
    _, config = read_configs(folder)
    with torch.device("meta"):
        codec = Codec(config)
    codec.to(dtype).to_empty(device=device)
    if dummy_seed is None:
        _fill_codec(codec, open_codec(folder))
    else:
        randomise_codec(codec, torch.Generator(device).manual_seed(dummy_seed))
    codec.requires_grad_(False)
    codec.eval()
    return codec


# -- names ---------------------------------------------------------------------------------------------------------------


def _language_model_place(name: str, model: DualAR) -> Place:
    """Our parameter for a published name, nested or flat, with q, k and v in one tensor or in three."""
    nested, flat = "text_model.model.", "fast_"
    if name in ("audio_decoder.codebook_embeddings.weight", "codebook_embeddings.weight"):
        ours = "slow.codebook_embeddings.weight"
    elif name.startswith("audio_decoder."):
        ours = "fast." + name.removeprefix("audio_decoder.")
    elif name.startswith(flat):
        ours = "fast." + name.removeprefix(flat)
    else:
        ours = "slow." + name.removeprefix(nested)
    for part, kind in enumerate(("wq", "wk", "wv")):
        if f".attention.{kind}." in ours:
            decoder = model.config.fast if ours.startswith("fast.") else model.config.slow
            ends = [heads * decoder.head_dim for heads in (0, decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads)]
            start = sum(ends[: part + 1])
            return ours.replace(f".{kind}.", ".wqkv."), (start, start + ends[part + 1])
    return ours, None


def published_name(name: str) -> str:
    """The `fish_qwen3_omni` spelling of one of our language model parameters."""
    if name == "slow.codebook_embeddings.weight":
        return "audio_decoder.codebook_embeddings.weight"
    part, rest = name.split(".", 1)
    return ("text_model.model." if part == "slow" else "audio_decoder.") + rest


def published_codec_names(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """How the published codec stores one of our parameters: plain, or as weight norm's gain and direction."""
    gain = (shape[0], *(1 for _ in shape[1:]))
    if name.endswith(".conv.weight") and name.startswith(("encoder.", "decoder.")):
        stem = name.removesuffix("weight") + "parametrizations.weight.original"
        return {f"{stem}0": gain, f"{stem}1": shape}
    if name.endswith(("in_proj.weight", "out_proj.weight")):
        return {f"{name}_g": gain, f"{name}_v": shape}
    return {name: shape}


# -- filling -------------------------------------------------------------------------------------------------------------


def _refuse(kind: str, names: list[str], where: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(f"{where}: {kind} tensor {names[0]!r}{more}")


def _fill(module: nn.Module, files: list[TensorFile], place: Callable[[str], Place]) -> None:
    """Checks every name and shape before the first tensor is read, then copies tensor by tensor."""
    parameters = dict(module.named_parameters())
    missing_rows = {name: parameter.shape[0] for name, parameter in parameters.items()}
    where = files[0].path.name if len(files) == 1 else f"{len(files)} weight files"
    extra: list[str] = []
    doubled: list[str] = []
    places: set[Place] = set()
    for file in files:
        for name, shape in file.shapes.items():
            target = place(name)
            ours, rows = target
            if ours not in parameters:
                extra.append(name)
                continue
            own = tuple(parameters[ours].shape)
            expected = own if rows is None else (rows[1] - rows[0], *own[1:])
            if shape != expected:
                raise CheckpointError(
                    f"{file.path.name}: tensor {name!r} is {list(shape)}; the config makes it {list(expected)}"
                )
            if target in places:  # else two shards with the same rows would make up for rows that are missing
                doubled.append(name)
            places.add(target)
            missing_rows[ours] -= shape[0]
    _refuse("unknown", sorted(extra), where)
    doubled += [published_name(name) for name, count in missing_rows.items() if count < 0]
    _refuse("doubled", sorted(doubled), where)
    _refuse("missing", [published_name(name) for name, count in sorted(missing_rows.items()) if count > 0], where)
    with torch.no_grad():
        for file in files:
            for name, tensor in file.read():
                ours, rows = place(name)
                parameter = parameters[ours]
                (parameter if rows is None else parameter[slice(*rows)]).copy_(tensor)


def _fill_codec(codec: Codec, file: TensorFile) -> None:
    """Copies the codec's tensors, folding weight norm: w = g v / |v|, the norm over all but the first dimension."""
    names = {name for name in file.shapes if name.rsplit(".", 1)[-1] not in CODEC_BUFFERS}
    plan: list[tuple[nn.Parameter, list[str]]] = []
    for name, parameter in codec.named_parameters():
        spellings: list[Mapping[str, tuple[int, ...]]] = [
            {name: tuple(parameter.shape)},
            published_codec_names(name, tuple(parameter.shape)),
        ]
        found = next((spelling for spelling in spellings if spelling.keys() <= names), None)
        if found is None:
            raise CheckpointError(f"{file.path.name}: missing tensor {min(spellings[1].keys() - names)!r}")
        for stored, shape in found.items():
            if file.shapes[stored] != shape:
                actual = list(file.shapes[stored])
                raise CheckpointError(f"{file.path.name}: tensor {stored!r} is {actual}; the config makes it {list(shape)}")
        names -= found.keys()
        plan.append((parameter, list(found)))
    _refuse("unknown", sorted(names), file.path.name)
    waiting: dict[str, Tensor] = {}
    targets = {stored: (parameter, group) for parameter, group in plan for stored in group}
    with torch.no_grad():
        for name, tensor in file.read():
            if name not in targets:
                continue
            waiting[name] = tensor
            target, group = targets[name]
            if all(stored in waiting for stored in group):
                parts = [waiting.pop(stored) for stored in group]
                target.copy_(parts[0] if len(parts) == 1 else torch._weight_norm(parts[1].float(), parts[0].float(), 0))


# -- random weights ------------------------------------------------------------------------------------------------------


def randomise_language_model(model: DualAR, generator: torch.Generator, std: float = 0.02) -> None:
    """Normal weights, gains of one, and an end token whose logit is 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        model.slow.output_weight[model.config.end_id] = 0.0


def spread_logits(model: DualAR, deviation: float = 3.0) -> None:
    """Makes random logits of any width near N(0, 9): the end's 0 is then out of reach among 64 choices as among 4,096.

    States come out of the last norm with a mean square of one, so logits deviate by the weights' norm.
    """
    with torch.no_grad():
        weight = model.slow.output_weight
        weight.mul_(deviation / (weight.std() * model.config.slow.dim**0.5))


def randomise_codec(codec: Codec, generator: torch.Generator) -> None:
    """Weights scaled by fan-in, residual branches small: signals keep their size, stay finite in half precision and are
    no more sensitive to rounding than a trained codec's."""
    last = f"decoder.model.{len(codec.decoder.model) - 1}.conv.weight"
    transposed = {f"{name}.conv.weight" for name, module in codec.named_modules() if isinstance(module, CausalTransposedConv)}
    with torch.no_grad():
        for name, parameter in codec.named_parameters():
            if name.endswith("gamma"):
                parameter.fill_(0.1)
            elif name.endswith(("alpha", "norm.weight")):
                parameter.fill_(1.0)
            elif parameter.ndim == 1:
                parameter.zero_()
            else:
                fan_in = 2 * parameter.shape[0] if name in transposed else parameter[0].numel()
                gain = 0.3 if name.endswith("block.3.conv.weight") else 3.0 if name == last else 0.7
                parameter.normal_(0.0, gain * fan_in**-0.5, generator=generator)
