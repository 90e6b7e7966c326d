"""duetts-mini: the small model that needs no download, inside the package. Until its weights are there, its real dimensions
with random ones.

`write_random_checkpoint` makes a complete model folder of any dimensions; the tests' tiny model comes from it too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from duetts.checkpoint import published_name, randomise_codec, randomise_language_model
from duetts.config import cache_folder
from duetts.errors import CheckpointError
from duetts.model_config import CodecConfig, ModelConfig
from duetts.models.codec import Codec
from duetts.models.dual_ar import DualAR
from duetts.text.byte_level import write_byte_tokenizer

MODEL_ID = "duetts-mini"
SHIPPED = Path(__file__).parent / "mini"  # used where it is, and never written to
SUMS = "SHA256SUMS"  # of all files that it cannot do without, as sha256sum writes them
WRITER_VERSION = 2  # counts changes of what the same recipe writes, so that no cache serves an older folder


@dataclass(frozen=True, slots=True)
class Recipe:
    """Dimensions and seed of a random checkpoint, in the words of its configuration files.

    `end_scale` multiplies the end token's row: 0 means it is never drawn, a few times one makes sentences stop.
    """

    text: Mapping[str, Any]
    audio: Mapping[str, Any]
    codec: Mapping[str, Any]
    seed: int = 0
    end_scale: float = 0.0
    std: float = 0.02
    dtype: str = "bfloat16"


MINI = Recipe(
    text={
        "n_layer": 6, "dim": 384, "n_head": 6, "n_local_heads": 2, "head_dim": 64, "intermediate_size": 896,
        "max_seq_len": 4096, "rope_base": 100000, "norm_eps": 1e-6, "attention_qk_norm": True, "tie_word_embeddings": True,
    },
    audio={
        "n_layer": 2, "dim": 256, "text_dim": 384, "n_head": 4, "n_local_heads": 2, "head_dim": 64,
        "intermediate_size": 704, "num_codebooks": 8, "vocab_size": 1024, "attention_qk_norm": False,
    },
    codec={
        "sample_rate": 44100, "frame_length": 2048, "encoder_dim": 16, "encoder_rates": [2, 4, 8, 8],
        "encoder_transformer_layers": [0, 0, 0, 0], "latent_dim": 256, "decoder_dim": 256, "decoder_rates": [8, 8, 4, 2],
        "downsample_factor": [2, 2], "codebook_dim": 8, "semantic_codebook_size": 1024, "residual_codebook_size": 512,
        "n_residual_codebooks": 7, "pre_module_layers": 1, "post_module_layers": 2,
        "quantizer_transformer": {"n_layer": 2, "n_head": 4, "head_dim": 64, "intermediate_size": 512, "window": 32},
    },
    seed=20261130,
    std=0.05,
)  # fmt: skip


def mini_folder() -> Path:
    """The folder of duetts-mini. Raises `CheckpointError` if a file of it is not what was shipped."""
    if not is_trained():
        return _untrained_folder()
    check_sums(SHIPPED)
    return SHIPPED


def is_trained() -> bool:
    """Whether the weights are in the package."""
    return (SHIPPED / SUMS).exists()


def check_sums(folder: Path) -> None:
    """Compares every file with its sum: 40 MB take less than 0.2 s. Raises `CheckpointError` for the first that differs."""
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        wanted, name = line.split(maxsplit=1)
        try:
            with open(folder / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{MODEL_ID}: {name} cannot be read: {error.strerror}; install duetts again") from error
        if found != wanted:
            raise CheckpointError(f"{MODEL_ID}: {name} is not what was shipped; install duetts again")


def _untrained_folder() -> Path:
    """Random weights, written to the cache at first use. Two processes at once write the same bytes."""
    recipe = json.dumps([asdict(MINI), WRITER_VERSION], sort_keys=True)
    folder = cache_folder() / f"{MODEL_ID}-untrained-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
        write_random_checkpoint(fresh, MINI)
        try:
            os.replace(fresh, folder)
        except OSError:  # another process was first
            shutil.rmtree(fresh)
    return folder


def write_random_checkpoint(folder: Path, recipe: Recipe) -> None:
    """Writes config, tokenizer and seeded random weights of a `fish_qwen3_omni` model with a byte tokenizer."""
    semantic = int(recipe.codec["semantic_codebook_size"])
    tokens = write_byte_tokenizer(folder / "tokenizer.json", semantic)
    config = {
        "model_type": "fish_qwen3_omni",
        "dtype": recipe.dtype,
        "untrained": True,
        **{key: value for key, value in tokens.items() if key != "vocab_size"},
        "text_config": {"model_type": "fish_qwen3", "vocab_size": tokens["vocab_size"], **recipe.text},
        "audio_decoder_config": {"model_type": "fish_qwen3_audio_decoder", **recipe.audio},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "codec_config.json").write_text(json.dumps(dict(recipe.codec), indent=1) + "\n")
    generator = torch.Generator().manual_seed(recipe.seed)
    dual_ar, codec = DualAR(ModelConfig.from_dict(config)), Codec(CodecConfig.from_dict(recipe.codec))
    randomise_language_model(dual_ar, generator, recipe.std)
    randomise_codec(codec, generator)
    with torch.no_grad():
        end = dual_ar.slow.output_weight[dual_ar.config.end_id]
        end.normal_(0.0, recipe.std, generator=generator).mul_(recipe.end_scale)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[recipe.dtype]
    language = {published_name(name): value.detach().to(dtype) for name, value in dual_ar.named_parameters()}
    save_file(language, folder / "model.safetensors", {"format": "pt"})
    waveform = {name: value.detach().to(dtype).contiguous() for name, value in codec.named_parameters()}
    save_file(waveform, folder / "codec.safetensors", {"format": "pt"})
