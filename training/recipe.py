"""The dimensions of duetts-mini and the constants that data and trainers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duetts.model_config import CodecConfig

SAMPLE_RATE = 44100
FRAME = 2048  # samples in one frame of codes
LABEL_HOP = 512  # samples in one phoneme label

# The windows of the quantiser's transformers are as long as what training can show them: crops of CROP_FRAMES frames.
WINDOW = 32
CROP_FRAMES = 48

CODEC: dict[str, Any] = {
    "sample_rate": SAMPLE_RATE,
    "encoder_dim": 16,
    "encoder_rates": [2, 4, 8, 8],
    "encoder_transformer_layers": [0, 0, 0, 0],
    "latent_dim": 256,
    "decoder_dim": 256,
    "decoder_rates": [8, 8, 4, 2],
    "downsample_factor": [2, 2],
    "quantizer_transformer": {"n_layer": 2, "n_head": 4, "head_dim": 64, "intermediate_size": 512, "window": WINDOW},
    "pre_module_layers": 1,
    "post_module_layers": 2,
    "codebook_dim": 8,
    "semantic_codebook_size": 1024,
    "residual_codebook_size": 512,
    "n_residual_codebooks": 7,
}


def codec_config() -> CodecConfig:
    return CodecConfig.from_dict(CODEC)


# The language model, in the words of config.json. With the codec it stays below 45 MB in bf16.
TEXT: dict[str, Any] = {
    "n_layer": 6,
    "dim": 384,
    "n_head": 6,
    "n_local_heads": 2,
    "head_dim": 64,
    "intermediate_size": 896,
    "max_seq_len": 4096,
    "rope_base": 100000,
    "norm_eps": 1e-6,
    "attention_qk_norm": True,
    "tie_word_embeddings": True,
}
AUDIO: dict[str, Any] = {
    "n_layer": 2,
    "dim": 256,
    "text_dim": 384,
    "n_head": 4,
    "n_local_heads": 2,
    "head_dim": 64,
    "intermediate_size": 704,
    "num_codebooks": 8,
    "vocab_size": 1024,
    "attention_qk_norm": False,
}
SAMPLING: dict[str, float] = {"temperature": 0.7, "top_p": 0.9, "residual_temperature": 0.6}
ROW = 1024  # positions that training shows at once: the longest pair of clips


def language_model_values(tokens: Mapping[str, int], text: Mapping[str, Any] = TEXT) -> dict[str, Any]:
    """The content of config.json. `tokens` is what `write_byte_tokenizer` returns."""
    return {
        "model_type": "fish_qwen3_omni",
        "dtype": "bfloat16",
        **{key: value for key, value in tokens.items() if key != "vocab_size"},
        "text_config": {"model_type": "fish_qwen3", "vocab_size": tokens["vocab_size"], **text},
        "audio_decoder_config": {"model_type": "fish_qwen3_audio_decoder", **AUDIO, "text_dim": text["dim"]},
    }
