"""The codec's decoding half as `stream_decoder.py` computes it: convolutions as products, gains folded in, pasts listed.

Weights are copied once, to one type; biases and Snake frequencies are float32. It reads modules and computes no signal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from duetts.models.codec import Codec, DecoderBlock
from duetts.models.codec_layers import (
    CausalConv,
    CausalTransposedConv,
    Chain,
    ConvNeXt,
    ResidualUnit,
    Snake,
    VectorQuantizer,
    WindowLayer,
)

Layers = TypeVar("Layers", bound=nn.Module)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A window layer, its layer scales folded into the rows of what they scale."""

    attention_norm: Tensor
    ffn_norm: Tensor
    wqkv: Tensor
    wo: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A convolution as a product: weight [taps * inputs, outputs], the oldest tap first, bias float32 [outputs]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Upsampling:
    """A transposed convolution without a past and a ConvNeXt, its gain folded into its last product."""

    conv: Product
    depthwise: Tensor  # [taps, channels]
    depthwise_bias: Tensor
    gain: Tensor
    shift: Tensor
    eps: float
    wide: Product
    narrow: Product


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A residual unit whose input is snaked already; `next_alpha` is of the Snake that its output meets first."""

    conv: Product
    dilation: int
    alpha: Tensor
    out: Product
    next_alpha: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A transposed convolution, `next_alpha` once for each of its phases, and residual units."""

    conv: Product
    taps: int
    next_alpha: Tensor
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """A signal that is looked back into: `past` steps, `steps` new ones in a frame."""

    channels: int
    past: int
    steps: int

    @property
    def kept(self) -> int:
        return self.past * self.channels


def of(kind: type[Layers], layers: Iterable[object]) -> list[Layers]:
    """Those of a kind, in their order."""
    return [layer for layer in layers if isinstance(layer, kind)]


def float_of(values: Tensor | None) -> Tensor:
    """A bias, which all layers here have, in float32."""
    assert values is not None
    return values.detach().float().contiguous()


def alpha_of(snake: Snake) -> Tensor:
    """Frequencies and their reciprocals [2, channels]."""
    alpha = float_of(snake.alpha).flatten()
    return torch.stack((alpha, 1 / (alpha + 1e-9)))


def pack_values(book: VectorQuantizer) -> Tensor:
    """What each code of a book adds to the latents: float32 [size, channels]."""
    return book.codebook.weight.float() @ book.out_proj.weight[:, :, 0].float().T + float_of(book.out_proj.bias)


def pack_layer(layer: WindowLayer, dtype: torch.dtype) -> Layer:
    """`x + gamma * (w y)` is `x + (gamma w) y`."""
    attention, feed_forward = layer.attention, layer.feed_forward
    wo = layer.attention_layer_scale.gamma[:, None] * attention.wo.weight
    w2 = layer.ffn_layer_scale.gamma[:, None] * feed_forward.w2.weight
    weights = (layer.attention_norm.weight, layer.ffn_norm.weight, attention.wqkv.weight, wo)
    return Layer(*(each.detach().to(dtype) for each in (*weights, feed_forward.w1.weight, feed_forward.w3.weight, w2)))


def pack_conv(layer: CausalConv, dtype: torch.dtype) -> Product:
    """[outputs, inputs, taps] -> [taps * inputs, outputs]."""
    weight = layer.conv.weight.detach().permute(2, 1, 0).flatten(0, 1)
    return Product(weight.to(dtype).contiguous(), float_of(layer.conv.bias))


def pack_transposed(layer: CausalTransposedConv, dtype: torch.dtype) -> tuple[Product, int]:
    """[inputs, outputs, taps * stride] -> [taps * inputs, stride * outputs], and the taps: output `stride * t + phase` is the
    input t through weight `phase`, the input before it through weight `phase + stride`, and so on."""
    stride = layer.stride
    assert layer.conv.kernel_size[0] % stride == 0, "every phase must have as many taps"
    inputs, outputs, _ = layer.conv.weight.shape
    phases = layer.conv.weight.detach().view(inputs, outputs, -1, stride).flip(2)
    weight = phases.permute(2, 0, 3, 1).flatten(2).flatten(0, 1)
    return Product(weight.to(dtype).contiguous(), float_of(layer.conv.bias).repeat(stride)), phases.shape[2]


def pack_linear(layer: nn.Linear, dtype: torch.dtype, gain: Tensor | None = None) -> Product:
    """[outputs, inputs] -> [inputs, outputs], with a gain for each output."""
    weight, bias = layer.weight.detach().T, float_of(layer.bias)
    if gain is not None:
        weight, bias = weight * gain.detach(), bias * gain.detach()
    return Product(weight.to(dtype).contiguous(), bias.float())


def pack_upsampling(chain: Chain, dtype: torch.dtype) -> Upsampling:
    """A transposed convolution and a ConvNeXt."""
    conv, block = chain
    assert isinstance(conv, CausalTransposedConv)
    assert isinstance(block, ConvNeXt)
    product, taps = pack_transposed(conv, dtype)
    assert taps == 1, "upsampling must not look back"
    depthwise = block.dwconv.conv
    return Upsampling(
        product, depthwise.weight.detach()[:, 0].T.float().contiguous(), float_of(depthwise.bias),
        float_of(block.norm.weight), float_of(block.norm.bias), block.norm.eps,
        pack_linear(block.pwconv1, dtype), pack_linear(block.pwconv2, dtype, block.gamma),
    )  # fmt: skip


def pack_stage(block: DecoderBlock, after: Tensor, dtype: torch.dtype) -> Stage:
    """`after`: the frequencies of the Snake behind the block."""
    conv, *units = list(block.block)[1:]
    assert isinstance(conv, CausalTransposedConv)
    product, taps = pack_transposed(conv, dtype)
    chains = [unit.block for unit in of(ResidualUnit, units)]
    alphas = [*(alpha_of(of(Snake, chain)[0]) for chain in chains), after]
    packed = tuple(pack_unit(chain, alpha, dtype) for chain, alpha in zip(chains, alphas[1:], strict=True))
    return Stage(product, taps, alphas[0].repeat(1, conv.stride), packed)


def pack_unit(chain: Chain, after: Tensor, dtype: torch.dtype) -> Unit:
    """Snake, dilated convolution, Snake, 1x1 convolution: all but the first Snake, which whoever makes the input applies."""
    _, wide, snake, narrow = chain
    assert isinstance(wide, CausalConv)
    assert isinstance(snake, Snake)
    assert isinstance(narrow, CausalConv)
    return Unit(pack_conv(wide, dtype), wide.conv.dilation[0], alpha_of(snake), pack_conv(narrow, dtype), after)


def count_bytes(packed: object) -> int:
    """Bytes of all tensors in packed layers."""
    if isinstance(packed, Tensor):
        return packed.nbytes
    if isinstance(packed, list | tuple):
        return sum(count_bytes(each) for each in packed)
    if is_dataclass(packed):
        return sum(count_bytes(getattr(packed, each.name)) for each in fields(packed))
    return 0


def list_looks(codec: Codec) -> list[Look]:
    """Every signal that is looked back into, in the order in which they are made."""
    looks, steps = [], 1
    for part in (codec.quantizer.upsample, codec.decoder):
        for layer in part.modules():
            if isinstance(layer, CausalConv | CausalTransposedConv) and layer.past:
                looks.append(Look(layer.channels, layer.past, steps))
            if isinstance(layer, CausalTransposedConv):
                steps *= layer.stride
    return looks
