"""A byte tokenizer with a configuration that fits it, in both families."""

from pathlib import Path
from typing import Any

from duetts.model_config import ModelConfig
from duetts.text.byte_level import write_byte_tokenizer
from duetts.text.tokenizer import Tokenizer

from ..dimensions import AUDIO, TEXT

NUM_SEMANTIC = 64


def config_for(ids: dict[str, int], **changes: Any) -> ModelConfig:
    """A small configuration with the ids that `write_byte_tokenizer` gave, some of them changed."""
    named = {key: value for key, value in {**ids, **changes}.items() if key != "vocab_size"}
    text = {"vocab_size": changes.get("vocab_size", ids["vocab_size"]), **TEXT}
    return ModelConfig.from_dict({"model_type": "fish_qwen3_omni", "text_config": text, "audio_decoder_config": AUDIO, **named})


def flat_config_for(ids: dict[str, int]) -> ModelConfig:
    names = ("eos_token_id", "semantic_start_token_id", "semantic_end_token_id", "vocab_size")
    flat = {"codebook_size": 64, "num_codebooks": 4, "n_fast_layer": 1, **{name: ids[name] for name in names}}
    return ModelConfig.from_dict({"model_type": "dual_ar", **TEXT, **flat})


def byte_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder, config_for(write_byte_tokenizer(folder / "tokenizer.json", NUM_SEMANTIC)))
