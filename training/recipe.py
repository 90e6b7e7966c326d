"""The dimensions of duetts-mini and the constants that data and trainers share."""

from __future__ import annotations

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
