"""The codec as it is trained: the engine's modules, a start that learns fast, and the whole loss of one step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duetts.models.codec import Codec
from duetts.models.codec_layers import ConvNeXt, LayerScale, ResidualUnit, VectorQuantizer
from training.codec.heads import Recogniser, SemanticHead, phoneme_loss
from training.codec.quantising import Quantised, books, quantise
from training.codec.spectra import LoudnessDistance, MagnitudeDistance, MelDistance
from training.recipe import codec_config

WEIGHTS = {
    "mel": 15.0, "magnitude": 3.0, "loudness": 10.0, "commitment": 0.25, "codebook": 1.0, "semantic": 1.0, "heard": 0.3,
    "reader": 1.0,
}  # fmt: skip


@dataclass(slots=True)
class Step:
    """One pass: the summed loss, its parts (for the log), and what the quantiser chose."""

    loss: Tensor
    parts: dict[str, Tensor]
    found: Quantised
    decoded: Tensor


def start_codec() -> Codec:
    """A codec whose signals keep their level from layer to layer before any training."""
    codec = Codec(codec_config())
    for module in codec.modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            fan_in = module.weight[0].numel() if isinstance(module, nn.Conv1d) else 2 * module.in_channels
            nn.init.normal_(module.weight, std=1 / math.sqrt(fan_in))
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, ConvNeXt | LayerScale):
            nn.init.constant_(module.gamma, 0.1)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
    with torch.no_grad():
        for module in codec.modules():
            if isinstance(module, ResidualUnit):
                module.block[3].conv.weight.mul_(0.3)
        share_subspaces(books(codec.quantizer), codec.config.latent_dim)
        codec.decoder.model[-1].conv.weight.mul_(0.03)
    return codec


@torch.no_grad()
def share_subspaces(quantizers: list[VectorQuantizer], dim: int) -> None:
    """Gives every book its own orthogonal directions, in and out, so that what a book takes is gone from the rest."""
    directions = torch.linalg.qr(torch.randn(dim, dim)).Q
    for quantizer in quantizers:
        mine, directions = directions[: quantizer.codebook.embedding_dim], directions[quantizer.codebook.embedding_dim :]
        quantizer.in_proj.weight.copy_(mine[:, :, None])
        quantizer.out_proj.weight.copy_(mine.T[:, :, None])
        nn.init.normal_(quantizer.codebook.weight)


class CodecTrainee(nn.Module):
    """The codec and the two readers. `front` and `back` are the parts worth compiling."""

    def __init__(self) -> None:
        super().__init__()
        self.codec = start_codec()
        self.semantic_head = SemanticHead(self.codec.config.latent_dim)
        self.recogniser = Recogniser()
        self.mel = MelDistance()
        self.magnitude = MagnitudeDistance()
        self.loudness = LoudnessDistance()
        self.front: Callable[[Tensor], Tensor] = self.analyse
        self.back: Callable[[Tensor], Tensor] = self.synthesise

    def analyse(self, wave: Tensor) -> Tensor:
        """[batch, samples] -> the quantiser's input [batch, dim, frames]."""
        quantizer = self.codec.quantizer
        return quantizer.pre_module(quantizer.downsample(self.codec.encoder(wave[:, None])))

    def synthesise(self, values: Tensor) -> Tensor:
        """Book values [batch, dim, frames] -> [batch, samples]."""
        quantizer = self.codec.quantizer
        return self.codec.decoder(quantizer.upsample(quantizer.post_module(values)))[:, 0]

    def forward(self, wave: Tensor, labels: Tensor, kept: Tensor | None, amp: bool) -> Step:
        kind = wave.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=amp):
            z = self.front(wave)
        with torch.autocast(kind, enabled=False):
            found = quantise(self.codec.quantizer, z.float(), kept)
        with torch.autocast(kind, torch.bfloat16, enabled=amp):
            decoded = self.back(found.values)
            said = self.semantic_head(found.semantic)
            real, heard = self.recogniser(wave), self.recogniser.judge(decoded)
        decoded = decoded.float()
        parts = {
            "mel": self.mel(decoded, wave),
            "magnitude": self.magnitude(decoded, wave),
            "loudness": self.loudness(decoded, wave),
            "commitment": found.commitment,
            "codebook": found.codebook,
            "semantic": phoneme_loss(said, labels),
            "heard": phoneme_loss(heard, labels),
            "reader": phoneme_loss(real, labels),
        }
        loss = torch.stack([WEIGHTS[name] * value for name, value in parts.items()]).sum()
        return Step(loss, {name: value.detach() for name, value in parts.items()}, found, decoded)


def kept_books(batch: int, num_residual: int, device: torch.device) -> Tensor:
    """Quantiser dropout: half of the signals use a random number of residual books, the others all."""
    some = torch.randint(0, num_residual + 1, (batch,), device=device)
    return torch.where(torch.rand(batch, device=device) < 0.5, some, num_residual)


def weight_groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Matrices decay; biases, gains, norms, Snake frequencies and codebooks do not."""
    plain, decayed = [], []
    for name, value in model.named_parameters():
        wanted = value.ndim >= 2 and "alpha" not in name and "codebook" not in name
        (decayed if wanted else plain).append(value)
    return [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
