"""Names and shapes of a published checkpoint, from dimensions alone."""

import torch

from duetts.checkpoint import published_codec_names, published_name
from duetts.model_config import CodecConfig, ModelConfig
from duetts.models.codec import Codec
from duetts.models.dual_ar import DualAR

Shapes = dict[str, tuple[int, ...]]


def describe_layout(config: ModelConfig, codec: CodecConfig) -> tuple[Shapes, Shapes]:
    """Every tensor of the language model's and of the codec's files."""
    with torch.device("meta"):
        modules = DualAR(config), Codec(codec)
    language = {published_name(name): tuple(p.shape) for name, p in modules[0].named_parameters()}
    waveform: Shapes = {}
    for name, parameter in modules[1].named_parameters():
        waveform |= published_codec_names(name, tuple(parameter.shape))
    return language, waveform
