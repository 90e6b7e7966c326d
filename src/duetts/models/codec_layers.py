"""Layers of the waveform codec: causal convolutions, residual units, window transformer, vector quantisers.

All signals are [batch, channels, time]. Every layer that looks back takes an optional `StreamView`; without it the past
is silence, with it the past is what the stream left there, so whole-signal and streaming use are one code path.
Convolution weights are plain: checkpoints with weight norm are folded when they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetts.model_config import WindowConfig
from duetts.models.blocks import Attention, GatedMLP, RMSNorm, grouped_attention, rope_table
from duetts.models.codec_state import StreamView


class Chain(nn.Sequential):
    """Layers one after another, each called with (x, state)."""

    def forward(self, x: Tensor, state: StreamView | None = None) -> Tensor:
        for layer in self:
            x = layer(x, state)
        return x


class Snake(nn.Module):
    """x + sin(alpha x)^2 / alpha, a periodic activation with a learned frequency per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor, state: StreamView | None = None) -> Tensor:
        return x + torch.sin(self.alpha * x).square() / (self.alpha + 1e-9)


class CausalConv(nn.Module):
    """Convolution that sees no future: `past` samples of history on the left, the last window completed with zeros."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride=stride, dilation=dilation, groups=groups)
        self.channels = inputs
        self.stride = stride
        self.past = (kernel - 1) * dilation + 1 - stride
        self.slot = -1  # place of this layer's tail in a StreamState, given by `Codec`

    def forward(self, x: Tensor, state: StreamView | None = None) -> Tensor:
        missing = -x.shape[-1] % self.stride
        if state is None:
            x = F.pad(x, (self.past, missing))
        else:
            assert missing == 0, f"a streamed chunk of {x.shape[-1]} is no multiple of the stride {self.stride}"
            x = state.extend(self.slot, x)
        out: Tensor = self.conv(x)
        return out


class CausalTransposedConv(nn.Module):
    """Transposed convolution, n -> n * stride samples, whose outputs depend on inputs up to their own only."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride=stride)
        self.channels = inputs
        self.stride = stride
        self.past = -(-kernel // stride) - 1  # earlier inputs that still reach an output
        self.slot = -1

    def forward(self, x: Tensor, state: StreamView | None = None) -> Tensor:
        length = x.shape[-1] * self.stride
        x = F.pad(x, (self.past, 0)) if state is None else state.extend(self.slot, x)
        start = self.past * self.stride
        out: Tensor = self.conv(x)[..., start : start + length]
        return out


class ResidualUnit(nn.Module):
    """x + conv1(snake(conv7(snake(x)))), the wide convolution dilated."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.block = Chain(
            Snake(channels), CausalConv(channels, channels, 7, dilation=dilation),
            Snake(channels), CausalConv(channels, channels, 1),
        )  # fmt: skip

    def forward(self, x: Tensor, state: StreamView | None = None) -> Tensor:
        out: Tensor = x + self.block(x, state)
        return out


class ConvNeXt(nn.Module):
    """Depthwise convolution, layer norm over channels, two linear layers with GELU, scaled and added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(channels, channels, 7, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: Tensor, state: StreamView | None = None) -> Tensor:
        y = self.norm(self.dwconv(x, state).transpose(1, 2))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        out: Tensor = x + y.transpose(1, 2)
        return out


class LayerScale(nn.Module):
    """A learned gain per channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class WindowLayer(nn.Module):
    """Pre-norm transformer layer with layer scales; it sees a window of past positions."""

    def __init__(self, config: WindowConfig) -> None:
        super().__init__()
        self.attention = Attention(config.dim, config.num_heads, config.num_heads, config.head_dim)
        self.feed_forward = GatedMLP(config.dim, config.ffn_dim)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention_layer_scale = LayerScale(config.dim)
        self.ffn_layer_scale = LayerScale(config.dim)
        self.window = config.window
        self.slot = -1

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor, state: StreamView | None) -> Tensor:
        attend = partial(self._attend, mask=mask, state=state)
        x = x + self.attention_layer_scale(self.attention(self.attention_norm(x), rope, attend))
        out: Tensor = x + self.ffn_layer_scale(self.feed_forward(self.ffn_norm(x)))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, state: StreamView | None) -> Tensor:
        if state is not None:
            k, v = state.extend_window(self.slot, k, v)
        return grouped_attention(q, k, v, mask)


class WindowTransformer(nn.Module):
    """A causal transformer over [batch, channels, time] whose positions see themselves and window - 1 before.

    `steps_per_frame` of its positions make one frame, which is what a `StreamView` counts.
    """

    def __init__(self, config: WindowConfig, steps_per_frame: int = 1) -> None:
        super().__init__()
        self.config = config
        self.steps_per_frame = steps_per_frame
        self.layers = nn.ModuleList(WindowLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, state: StreamView | None = None) -> Tensor:
        window = self.config.window
        steps = torch.arange(x.shape[-1], device=x.device)
        if state is None:
            positions, key_positions = steps[None], steps[None]
        else:
            positions = state.positions()[:, None] * self.steps_per_frame + steps
            key_positions = torch.cat((positions[:, :1] + torch.arange(1 - window, 0, device=x.device), positions), dim=1)
        age = positions[:, :, None] - key_positions[:, None, :]  # [batch, queries, keys]
        mask = ((age >= 0) & (age < window) & (key_positions >= 0)[:, None, :])[:, None]
        rope = rope_table(positions, self.config.head_dim, self.config.rope_base)
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = layer(x, rope, mask, state)
        out: Tensor = self.norm(x).transpose(1, 2)
        return out


class VectorQuantizer(nn.Module):
    """One codebook of `size` short vectors, reached and left through 1x1 projections."""

    def __init__(self, channels: int, size: int, code_dim: int) -> None:
        super().__init__()
        self.in_proj = nn.Conv1d(channels, code_dim, 1)
        self.out_proj = nn.Conv1d(code_dim, channels, 1)
        self.codebook = nn.Embedding(size, code_dim)

    def search(self, x: Tensor) -> Tensor:
        """Codes [batch, time] of x [batch, channels, time]: the codebook row of the closest direction."""
        query = F.normalize(self.in_proj(x).transpose(1, 2), dim=-1)
        return (query @ F.normalize(self.codebook.weight, dim=-1).T).argmax(-1)

    def value(self, codes: Tensor) -> Tensor:
        """codes [batch, time] -> [batch, channels, time]. Codes above the last entry count as the last."""
        rows = self.codebook(codes.clamp(max=self.codebook.num_embeddings - 1))
        out: Tensor = self.out_proj(rows.transpose(1, 2))
        return out


class ResidualQuantizer(nn.Module):
    """Codebooks in a row, each quantising what the ones before left over."""

    def __init__(self, channels: int, sizes: Sequence[int], code_dim: int) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(VectorQuantizer(channels, size, code_dim) for size in sizes)

    @property
    def books(self) -> list[VectorQuantizer]:
        """The quantisers in their order."""
        return [book for book in self.quantizers if isinstance(book, VectorQuantizer)]

    def search(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [batch, books, time] and what is left over of x [batch, channels, time]."""
        codes = []
        for book in self.books:
            codes.append(book.search(x))
            x = x - book.value(codes[-1])
        return torch.stack(codes, dim=1), x

    def value(self, codes: Tensor) -> Tensor:
        """The sum of all books' values: codes [batch, books, time] -> [batch, channels, time]."""
        first, *others = self.books
        total = first.value(codes[:, 0])
        for index, book in enumerate(others, start=1):
            total = total + book.value(codes[:, index])
        return total
