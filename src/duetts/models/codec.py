"""The waveform codec: 44.1 kHz mono to codes at 21.5 frames a second and back, whole or as a stream.

Encoder -> downsample -> pre_module -> semantic book, then residual books on what it leaves. Back: sum of the books'
values -> post_module -> upsample -> decoder -> tanh. All of it is causal, so the first n frames of a longer signal
decode to the first n * frame_length samples. It knows codes and samples, no text and no files.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetts.model_config import CodecConfig
from duetts.models.codec_layers import (
    CausalConv,
    CausalTransposedConv,
    Chain,
    ConvNeXt,
    ResidualQuantizer,
    ResidualUnit,
    Snake,
    WindowLayer,
    WindowTransformer,
)
from duetts.models.codec_state import StreamState, StreamView


class EncoderBlock(nn.Module):
    """Residual units, then a strided convolution that doubles the channels, then in some blocks a transformer."""

    def __init__(self, channels: int, stride: int, transformer: WindowTransformer | None) -> None:
        super().__init__()
        layers: list[nn.Module] = [ResidualUnit(channels, dilation) for dilation in (1, 3, 9)]
        layers += [Snake(channels), CausalConv(channels, 2 * channels, 2 * stride, stride=stride)]
        if transformer is not None:
            layers.append(transformer)
        self.block = Chain(*layers)

    def forward(self, x: Tensor, state: StreamView | None = None) -> Tensor:
        out: Tensor = self.block(x, state)
        return out


class Encoder(nn.Module):
    """Waveform [batch, 1, samples] to latents [batch, latent_dim, samples / product of rates]."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        width = config.encoder_dim
        layers: list[nn.Module] = [CausalConv(1, width, 7)]
        for stride, transformer in zip(config.encoder_rates, config.encoder_transformers, strict=True):
            window = None if transformer is None else WindowTransformer(transformer)
            layers.append(EncoderBlock(width, stride, window))
            width *= 2
        layers += [Snake(width), CausalConv(width, config.latent_dim, 3)]
        self.block = Chain(*layers)

    def forward(self, wave: Tensor) -> Tensor:
        out: Tensor = self.block(wave)
        return out


class DecoderBlock(nn.Module):
    """A transposed convolution that halves the channels, then residual units."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        half = channels // 2
        self.block = Chain(
            Snake(channels), CausalTransposedConv(channels, half, 2 * stride, stride),
            *(ResidualUnit(half, dilation) for dilation in (1, 3, 9)),
        )  # fmt: skip

    def forward(self, x: Tensor, state: StreamView | None = None) -> Tensor:
        out: Tensor = self.block(x, state)
        return out


class Decoder(nn.Module):
    """Latents [batch, latent_dim, n] to a waveform [batch, 1, n * product of rates] within -1..1."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        width = config.decoder_dim
        layers: list[nn.Module] = [CausalConv(config.latent_dim, width, 7)]
        for stride in config.decoder_rates:
            layers.append(DecoderBlock(width, stride))
            width //= 2
        layers += [Snake(width), CausalConv(width, 1, 7)]
        self.model = Chain(*layers)

    def forward(self, latents: Tensor, state: StreamView | None = None) -> Tensor:
        return torch.tanh(self.model(latents, state))


class Quantizer(nn.Module):
    """Between latents and codes: resampling to the frame rate, a transformer on each side, semantic and residual books."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        dim = config.latent_dim
        self.downsample = Chain(
            *(Chain(CausalConv(dim, dim, factor, stride=factor), ConvNeXt(dim)) for factor in config.downsample)
        )
        self.pre_module = WindowTransformer(config.pre_module)
        self.semantic_quantizer = ResidualQuantizer(dim, (config.semantic_size,), config.codebook_dim)
        self.quantizer = ResidualQuantizer(dim, (config.residual_size,) * config.num_residual, config.codebook_dim)
        self.post_module = WindowTransformer(config.post_module)
        self.upsample = Chain(
            *(Chain(CausalTransposedConv(dim, dim, factor, factor), ConvNeXt(dim)) for factor in reversed(config.downsample))
        )

    def search(self, z: Tensor) -> Tensor:
        """Pre-module output [batch, latent_dim, frames] -> codes [batch, books, frames], the semantic book first."""
        semantic, rest = self.semantic_quantizer.search(z)
        residual, _ = self.quantizer.search(rest)
        return torch.cat((semantic, residual), dim=1)

    def value(self, codes: Tensor) -> Tensor:
        """codes [batch, books, frames] -> [batch, latent_dim, frames]."""
        return self.semantic_quantizer.value(codes[:, :1]) + self.quantizer.value(codes[:, 1:])


class Codec(nn.Module):
    """Encoder, quantiser and decoder. Codes are int64 [batch, books, frames], waveforms [batch, samples]."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.quantizer = Quantizer(config)
        self.decoder = Decoder(config)
        self._tails: list[tuple[int, int]] = []
        for layer in self._decoding_layers():
            if isinstance(layer, CausalConv | CausalTransposedConv):
                layer.slot = len(self._tails)
                self._tails.append((layer.channels, layer.past))
        for index, layer in enumerate(self.quantizer.post_module.layers):
            assert isinstance(layer, WindowLayer)
            layer.slot = index

    def _decoding_layers(self) -> Iterator[nn.Module]:
        yield from self.quantizer.upsample.modules()
        yield from self.decoder.modules()

    def encode(self, wave: Tensor) -> Tensor:
        """Codes of a whole signal; its end is padded with zeros to a full frame."""
        wave = F.pad(wave, (0, -wave.shape[-1] % self.config.frame_length))
        latents = self.encoder(wave[:, None])
        return self.quantizer.search(self.quantizer.pre_module(self.quantizer.downsample(latents)))

    def decode(self, codes: Tensor, state: StreamView | None = None) -> Tensor:
        """Samples of codes. With `state` the codes follow what its streams decoded before; without, a signal begins."""
        frames = codes.shape[-1]
        z = self.quantizer.post_module(self.quantizer.value(codes), state)
        wave: Tensor = self.decoder(self.quantizer.upsample(z, state), state)[:, 0]
        if state is not None:
            state.advance(frames)
        return wave

    def new_state(self, slots: int) -> StreamState:
        """Memory for `slots` streams, on the decoder's device and in its type."""
        window = self.config.post_module
        weight = self.quantizer.post_module.norm.weight
        shape = (window.num_heads, window.window - 1, window.head_dim)
        return StreamState(slots, self._tails, [shape] * window.num_layers, device=weight.device, dtype=weight.dtype)
