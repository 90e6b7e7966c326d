"""The codec's decoding half for streams, as few passes over memory as it can be: `Codec.decode` for many streams at once.

The same layers as `codec.py` has, written for speed: signals are [streams, steps, channels], every activation is applied by
whoever makes its input, and a transposed convolution is a convolution with one group of outputs per phase. Every signal that a
later convolution looks back into lies in one buffer, the halo, behind room for its past: each call loads the past of its
streams there, and stores the end of what lies there as the new past. Nothing is read on the host, so a call can be captured
in a CUDA graph. It knows codes and samples, no text and no files; whole signals, encoding and training are `codec.py`'s.

Types: weights and signals in `dtype` (float16 on a GPU); sums of products, biases, residual sums and Snake in float32, rounded
once; norms, softmax, the sum of a frame's codes and the last convolution with its tanh in float32. A residual signal is stored
in `dtype` too: wider storage would not widen the range, because Snake(x) >= x is what the next convolution reads, and its
rounding (2^-12 of a value in each unit) is that of every other signal. Where weights make values beyond 65,504, that stream's
samples are not finite and its owner says so; bfloat16 then has the range, at an eighth of the precision.

Measured with the twins, which round where the kernels do, at S2 Pro's dimensions with random weights (12 frames, a CPU): the
error's root mean square is 1.5e-6 of the samples' in float32, 1.5e-3 in float16 and 1.2e-2 in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duetts import kernels
from duetts.models.blocks import rope_table
from duetts.models.codec import Codec, DecoderBlock
from duetts.models.codec_layers import CausalConv, Chain, Snake, WindowLayer
from duetts.models.codec_packing import (
    Product,
    alpha_of,
    count_bytes,
    float_of,
    list_looks,
    of,
    pack_conv,
    pack_layer,
    pack_stage,
    pack_upsampling,
    pack_values,
)

MAX_FRAMES = 16  # of a stream in one call
MAX_POSITIONS = 32768  # frames before positions of a stream begin anew: 25 minutes
COUNTS = 1024  # tiles of one product that several programs may share


class DecoderState:
    """Memory of `slots` streams and of a scratch slot behind them, which rows without a stream use: what it holds is
    written and never heard. `tails` [slots + 1, values] are the pasts of all convolutions, `keys` and `values`
    [layers, slots + 1, heads, ring, head_dim] hold position p in row p % ring, `position` int64 counts frames."""

    def __init__(self, slots: int, values: int, window: tuple[int, int, int, int], *, device: torch.device, dtype: torch.dtype):
        layers, heads, ring, head_dim = window
        self.scratch = slots
        self.tails = torch.zeros(slots + 1, values, device=device, dtype=dtype)
        self.keys = torch.zeros(layers, slots + 1, heads, ring, head_dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.position = torch.zeros(slots + 1, device=device, dtype=torch.int64)

    def reset(self, slots: Tensor) -> None:
        """Streams that have not begun, in these slots (int64 on the state's device): what their places held is not read
        again."""
        self.position.index_fill_(0, slots, 0)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.tails, self.keys, self.values, self.position))


class StreamDecoder:
    """The decoding half of a codec, packed. `codec` itself is not changed and not kept."""

    @torch.no_grad()
    def __init__(self, codec: Codec, dtype: torch.dtype, max_positions: int = MAX_POSITIONS) -> None:
        quantizer, config = codec.quantizer, codec.config
        self.frame_length = config.frame_length
        self.num_codebooks = config.num_codebooks
        self._dtype = dtype
        self._window = config.post_module
        self.device = quantizer.post_module.norm.weight.device
        books = [*quantizer.semantic_quantizer.books, *quantizer.quantizer.books]
        self._table = torch.cat([pack_values(book) for book in books]).to(dtype)
        sizes = [0, *(book.codebook.num_embeddings for book in books)]
        self._starts = torch.tensor(sizes, device=self.device).cumsum(0)
        positions = torch.arange(max_positions, device=self.device)
        self._rope = rope_table(positions, self._window.head_dim, self._window.rope_base)
        self._layers = [pack_layer(layer, dtype) for layer in of(WindowLayer, quantizer.post_module.layers)]
        self._norm = quantizer.post_module.norm.weight.to(dtype)
        self._upsampling = [pack_upsampling(chain, dtype) for chain in of(Chain, quantizer.upsample)]
        first, *blocks = codec.decoder.model
        *blocks, snake, last = blocks
        assert isinstance(first, CausalConv)
        assert isinstance(snake, Snake)
        assert isinstance(last, CausalConv)
        self._first, self._first_taps = pack_conv(first, dtype), first.conv.kernel_size[0]
        snakes = [alpha_of(of(Snake, block.block)[0]) for block in of(DecoderBlock, blocks)] + [alpha_of(snake)]
        self._first_alpha = snakes[0]
        self._stages = [
            pack_stage(block, after, dtype) for block, after in zip(of(DecoderBlock, blocks), snakes[1:], strict=True)
        ]
        self._last = last.conv.weight[0].T.float().contiguous()  # [taps, channels]
        self._last_bias = float_of(last.conv.bias)
        self._looks = list_looks(codec)
        self._counts = torch.zeros(COUNTS, device=self.device, dtype=torch.int32)
        self._layouts: dict[tuple[int, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of weights and tables, beside those of the codec that they were made from."""
        return count_bytes(list(vars(self).values()))

    @property
    def bytes_per_frame(self) -> int:
        """Of the signals of a call: all that are looked back into, and the largest twice more (a residual and an inner one)."""
        sizes = [look.steps * look.channels for look in self._looks]
        return (sum(sizes) + 2 * max(sizes)) * self._dtype.itemsize

    def new_state(self, slots: int) -> DecoderState:
        """Memory for `slots` streams that have not begun."""
        window = self._window
        ring = window.window - 1 + MAX_FRAMES
        kept = sum(look.kept for look in self._looks)
        return DecoderState(
            slots, kept, (window.num_layers, window.num_heads, ring, window.head_dim), device=self.device, dtype=self._dtype
        )

    @torch.inference_mode()
    def decode(self, codes: Tensor, slots: Tensor, state: DecoderState) -> Tensor:
        """codes int64 [streams, books, frames], at most `MAX_FRAMES`, of the streams in `slots` int64 [streams] -> wave float32
        [streams, frames * frame_length]. The streams go on from where they were; only the scratch slot may be there twice."""
        streams, _, frames = codes.shape
        assert 0 < frames <= MAX_FRAMES, f"a call decodes 1 to {MAX_FRAMES} frames, not {frames}"
        halo, pasts, news = self._open_halo(streams, frames)
        layout = self._layout(streams, frames)
        now = torch.empty_like(slots)
        kernels.load_tails(state.tails, halo, layout, slots, state.position, now)
        h = kernels.embed_codes(codes, self._table, self._starts)
        h = self._transform(h, now, slots, state)
        self._upsample(h, pasts, news)
        wave = self._synthesise(pasts[len(self._upsampling) :], news[len(self._upsampling) :])
        kernels.store_tails(state.tails, halo, layout, slots, state.position, now, frames)
        return wave

    def _transform(self, h: Tensor, now: Tensor, slots: Tensor, state: DecoderState) -> Tensor:
        """The window transformer over h [streams, frames, dim]."""
        window, eps = self._window.window, self._window.norm_eps
        for layer, keys, values in zip(self._layers, state.keys, state.values, strict=True):
            qkv = kernels.norm_linear(h, layer.attention_norm, eps, layer.wqkv)
            y = kernels.window_attention(qkv, self._rope, now, slots, keys, values, window)
            h = kernels.linear_add(y, layer.wo, h)
            y = kernels.norm_gate(h, layer.ffn_norm, eps, layer.w1, layer.w3)
            h = kernels.linear_add(y, layer.w2, h)
        return kernels.rms_norm(h, self._norm, eps)

    def _upsample(self, h: Tensor, pasts: list[Tensor], news: list[Tensor]) -> None:
        """h [streams, frames, dim] through the upsampling into the signal that the first convolution looks into."""
        for index, up in enumerate(self._upsampling):
            new, steps = news[index], news[index].shape[1]
            self._conv(h, up.conv, ahead=new)
            y = kernels.depthwise_norm(pasts[index], up.depthwise, up.depthwise_bias, up.gain, up.shift, up.eps)
            wide = h.new_empty(len(h), steps, len(up.wide.bias))
            self._conv(y, up.wide, gelu=True, ahead=wide)
            is_last = index + 1 == len(self._upsampling)
            h = news[index + 1] if is_last else torch.empty_like(y)
            self._conv(wide, up.narrow, residual=new, ahead=h)

    def _synthesise(self, pasts: list[Tensor], news: list[Tensor]) -> Tensor:
        """The convolution stack: each signal with its past -> the next one, snaked -> wave."""
        self._conv(pasts[0], self._first, taps=self._first_taps, alpha=self._first_alpha, ahead=news[1])
        index = 1
        for stage in self._stages:
            streams, steps, channels = news[index + 1].shape
            x = news[index].new_empty(streams, steps, channels)  # the residual signal; each unit changes it in place
            self._conv(pasts[index], stage.conv, taps=stage.taps, alpha=stage.next_alpha, raw=x, ahead=news[index + 1])
            for unit in stage.units:
                index += 1
                kernels.residual_unit(
                    pasts[index], unit.conv.weight, unit.conv.bias, unit.alpha, unit.out.weight, unit.out.bias,
                    dilation=unit.dilation, residual=x, raw=None if unit is stage.units[-1] else x,
                    next_alpha=unit.next_alpha, ahead=news[index + 1], counts=self._counts,
                )  # fmt: skip
            index += 1
        return kernels.last_conv(pasts[index], self._last, self._last_bias)

    def _conv(
        self, x: Tensor, product: Product, *, taps: int = 1, alpha: Tensor | None = None, gelu: bool = False,
        residual: Tensor | None = None, raw: Tensor | None = None, ahead: Tensor | None = None,
    ) -> None:  # fmt: skip
        kernels.conv(
            x, product.weight, product.bias, taps=taps, alpha=alpha, gelu=gelu, residual=residual, raw=raw, ahead=ahead,
            counts=self._counts,
        )  # fmt: skip

    def _open_halo(self, streams: int, frames: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """All signals that are looked back into in one buffer: each with its past, and its new part alone."""
        sizes = [(look.past + look.steps * frames) * look.channels for look in self._looks]
        halo = torch.empty(streams * sum(sizes), device=self.device, dtype=self._dtype)
        parts = torch.split(halo, [streams * size for size in sizes])
        pasts = [part.view(streams, -1, look.channels) for part, look in zip(parts, self._looks, strict=True)]
        return halo, pasts, [past[:, look.past :] for past, look in zip(pasts, self._looks, strict=True)]

    def _layout(self, streams: int, frames: int) -> Tensor:
        """Where `load_tails` and `store_tails` find each signal's past, in pieces; made once for a shape, since it is copied to
        the device."""
        if (streams, frames) not in self._layouts:
            rows, offset, base = [], 0, 0
            for look in self._looks:
                stride = (look.past + look.steps * frames) * look.channels
                for begin in range(0, look.kept, kernels.TAIL_PIECE):
                    count = min(kernels.TAIL_PIECE, look.kept - begin)
                    rows.append((offset + begin, base + begin, base + stride - look.kept + begin, stride, count))
                offset, base = offset + look.kept, base + streams * stride
            self._layouts[streams, frames] = torch.tensor(rows, device=self.device)
        return self._layouts[streams, frames]
