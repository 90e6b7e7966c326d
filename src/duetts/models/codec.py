"""The waveform codec: 44.1 kHz mono to codes at 21.5 frames a second and back, whole or as a stream.

Encoder -> downsample -> pre_module -> semantic book, then residual books on what it leaves. Back: sum of the books'
values -> post_module -> upsample -> decoder -> tanh. All of it is causal in both directions: the first n frames of a
longer signal are the same n frames, and each direction can go on from where a `StreamState` of its own left off. It knows
codes and samples, no text and no files.
"""

from __future__ import annotations

import hashlib

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

CODES_VERSION = 1  # counts changes of what the same weights make of the same samples, so that no cache serves older codes
DECODING_PARTS = ("decoder.", "quantizer.upsample.", "quantizer.post_module.")


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
        steps = config.frame_length  # of one frame, at the rate of what a block gives out
        for stride, transformer in zip(config.encoder_rates, config.encoder_transformers, strict=True):
            steps //= stride
            window = None if transformer is None else WindowTransformer(transformer, steps)
            layers.append(EncoderBlock(width, stride, window))
            width *= 2
        layers += [Snake(width), CausalConv(width, config.latent_dim, 3)]
        self.block = Chain(*layers)

    def forward(self, wave: Tensor, state: StreamView | None = None) -> Tensor:
        out: Tensor = self.block(wave, state)
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
        self._encoding_memory = _memory(self.encoder, self.quantizer.downsample, self.quantizer.pre_module)
        self._decoding_memory = _memory(self.quantizer.post_module, self.quantizer.upsample, self.decoder)

    def encode(self, wave: Tensor) -> Tensor:
        """Codes of a whole signal; its end is padded with zeros to a full frame."""
        return self.quantizer.search(self.latents(F.pad(wave, (0, -wave.shape[-1] % self.config.frame_length))))

    def latents(self, wave: Tensor, state: StreamView | None = None) -> Tensor:
        """What the codebooks are searched for [batch, latent_dim, frames]: whole frames of samples through the encoder.

        With `state`, a view of a `new_encoder_state`, they follow what its streams gave before; without, a signal begins.
        """
        z: Tensor = self.quantizer.downsample(self.encoder(wave[:, None], state), state)
        z = self.quantizer.pre_module(z, state)
        if state is not None:
            state.advance(z.shape[-1])
        return z

    def decode(self, codes: Tensor, state: StreamView | None = None) -> Tensor:
        """Samples of codes. With `state` the codes follow what its streams decoded before; without, a signal begins."""
        frames = codes.shape[-1]
        z = self.quantizer.post_module(self.quantizer.value(codes), state)
        wave: Tensor = self.decoder(self.quantizer.upsample(z, state), state)[:, 0]
        if state is not None:
            state.advance(frames)
        return wave

    def new_state(self, slots: int) -> StreamState:
        """Memory for `slots` streams that are decoded, on the decoder's device and in its type."""
        weight = self.quantizer.post_module.norm.weight
        return StreamState(slots, *self._decoding_memory, device=weight.device, dtype=weight.dtype)

    def new_encoder_state(self, slots: int) -> StreamState:
        """Memory for `slots` streams that are encoded, on the encoder's device and in its type."""
        weight = self.quantizer.pre_module.norm.weight
        return StreamState(slots, *self._encoding_memory, device=weight.device, dtype=weight.dtype)

    def encoding_id(self) -> str:
        """SHA-256 in hex of all that decides a signal's codes: dimensions, every bit of the encoding half's weights, and
        where and in which type they are computed. Random weights have an id like any others."""
        weight = self.quantizer.pre_module.norm.weight
        digest = hashlib.sha256(repr((CODES_VERSION, self.config, weight.dtype, weight.device.type)).encode())
        for name, parameter in self.named_parameters():
            if not name.startswith(DECODING_PARTS):
                digest.update(name.encode())
                digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _memory(*parts: nn.Module) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """Numbers the layers of one direction that look back, and says what each keeps, as `StreamState` takes it."""
    tails: list[tuple[int, int]] = []
    windows: list[tuple[int, int, int]] = []
    for layer in (layer for part in parts for layer in part.modules()):
        if isinstance(layer, CausalConv | CausalTransposedConv):
            layer.slot = len(tails)
            tails.append((layer.channels, layer.past))
        elif isinstance(layer, WindowLayer):
            layer.slot = len(windows)
            windows.append((layer.attention.sizes[0], layer.window - 1, layer.attention.head_dim))
    return tails, windows
