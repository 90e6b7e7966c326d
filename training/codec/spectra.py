"""Losses on spectra: how far a decoded wave is from the original, in float32, over many window lengths."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.recipe import SAMPLE_RATE

MEL_WINDOWS = {32: 5, 64: 10, 128: 20, 256: 40, 512: 80, 1024: 160, 2048: 320}  # window -> bands
MAGNITUDE_WINDOWS = (512, 1024, 2048)
LOUDNESS_BANDS = 8
LOUDNESS_FLOOR = 1e-4  # of full scale
FLOOR = 1e-5  # of full scale, as the mean amplitude in a band: what is quieter counts as silence


def mel_filters(window: int, bands: int) -> Tensor:
    """Triangles on the mel scale, each a weighted mean of bins: [bands, window / 2 + 1]. No triangle is empty."""
    top = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, bands + 2, dtype=torch.float64) / 2595) - 1)
    bins = torch.linspace(0, SAMPLE_RATE / 2, window // 2 + 1, dtype=torch.float64)
    width = edges.diff().clamp(min=SAMPLE_RATE / window)
    rising = (bins - edges[1:-1, None]) / width[:-1, None] + 1
    falling = (edges[1:-1, None] - bins) / width[1:, None] + 1
    triangles = torch.minimum(rising, falling).clamp(min=0)
    return (triangles / triangles.sum(1, keepdim=True)).float()


def spectrum(wave: Tensor, window: Tensor) -> Tensor:
    """Complex [batch, bins, time] of [batch, samples], a quarter window apart."""
    size = window.shape[0]
    return torch.stft(wave, size, size // 4, window=window, center=True, pad_mode="reflect", return_complex=True)


def magnitude(z: Tensor) -> Tensor:
    """|z| with a gradient that stays finite at 0."""
    return (z.real.square() + z.imag.square() + 1e-9).sqrt()


class LogMel(nn.Module):
    """log10 mel magnitudes of [batch, samples]: [batch, bands, time]."""

    def __init__(self, window: int, bands: int) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(window), persistent=False)
        self.register_buffer("filters", mel_filters(window, bands) * (2 / self.window.sum()), persistent=False)

    def forward(self, wave: Tensor) -> Tensor:
        return (self.filters @ magnitude(spectrum(wave, self.window))).clamp(min=FLOOR).log10()


class MelDistance(nn.Module):
    """Mean absolute difference of log mels, summed over seven windows."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(LogMel(window, bands) for window, bands in MEL_WINDOWS.items())

    def forward(self, wave: Tensor, target: Tensor) -> Tensor:
        total = wave.new_zeros(())
        for scale in self.scales:
            with torch.no_grad():
                wanted = scale(target)
            total = total + F.l1_loss(scale(wave), wanted)
        return total


class MagnitudeDistance(nn.Module):
    """Distance of magnitudes relative to the target's, both as lengths over a signal, mean over windows.

    It asks for the mean of what is likely where logarithms ask for the median, and most of it comes from what is loud.
    Complex spectra are not compared: of a phase that cannot be foretold the best guess is a quieter sound.
    """

    def __init__(self) -> None:
        super().__init__()
        for size in MAGNITUDE_WINDOWS:
            self.register_buffer(f"window_{size}", torch.hann_window(size), persistent=False)

    def forward(self, wave: Tensor, target: Tensor) -> Tensor:
        total = wave.new_zeros(())
        for size in MAGNITUDE_WINDOWS:
            window = self.get_buffer(f"window_{size}")
            with torch.no_grad():
                wanted = magnitude(spectrum(target, window))
            apart = (magnitude(spectrum(wave, window)) - wanted).square().mean((1, 2))
            total = total + ((apart + 1e-9) / (wanted.square().mean((1, 2)) + 1e-3)).sqrt().mean()
        return total / len(MAGNITUDE_WINDOWS)


class LoudnessDistance(nn.Module):
    """Mean absolute difference of log10 levels in a few broad bands: power is summed before anything is compared."""

    def __init__(self, window: int = 1024) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(window), persistent=False)
        self.register_buffer("filters", mel_filters(window, LOUDNESS_BANDS), persistent=False)

    def levels(self, wave: Tensor) -> Tensor:
        power = magnitude(spectrum(wave, self.window)).square() * (2 / self.window.sum()).square()
        return 0.5 * (self.filters @ power + LOUDNESS_FLOOR**2).log10()

    def forward(self, wave: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.levels(target)
        return F.l1_loss(self.levels(wave), wanted)
