"""The dimensions of duetts-mini and the constants that data and trainers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duetts.embedded import MINI
from duetts.model_config import CodecConfig

SAMPLE_RATE = 44100
FRAME = 2048  # samples in one frame of codes
LABEL_HOP = 512  # samples in one phoneme label

# The windows of the quantiser's transformers are as long as what training can show them: crops of CROP_FRAMES frames.
CROP_FRAMES = 48

# The dimensions have one home, the package's own recipe, in the words of codec_config.json and config.json.
CODEC: dict[str, Any] = dict(MINI.codec)
TEXT: dict[str, Any] = dict(MINI.text)
AUDIO: dict[str, Any] = dict(MINI.audio)


def codec_config() -> CodecConfig:
    return CodecConfig.from_dict(CODEC)


SAMPLING: dict[str, float] = {"temperature": 0.7, "top_p": 0.9, "residual_temperature": 0.6}
# Of long texts: it has learned to say up to 200 characters of one line after one reference, and nothing as what follows
# something else.
PIECES: dict[str, int | bool] = {"longest_piece": 160, "condition_on_previous_chunks": False, "single_line": True}
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
