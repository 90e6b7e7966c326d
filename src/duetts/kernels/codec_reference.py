"""Torch twins of the codec decoder's kernels: the same names and arguments, for any device.

Signals are [streams, steps, channels]. What they compute is rounded once, to the type of the tensor that takes it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    """x + sin(alpha x)^2 / alpha: frequencies and their reciprocals are the rows of alpha [2, channels]."""
    return x + torch.sin(alpha[0] * x).square() * alpha[1]


def conv(
    x: Tensor, weight: Tensor, bias: Tensor, *, taps: int = 1, dilation: int = 1, alpha: Tensor | None = None,
    gelu: bool = False, residual: Tensor | None = None, raw: Tensor | None = None, ahead: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:  # fmt: skip
    """See `duetts.kernels.conv`."""
    steps = x.shape[1] - (taps - 1) * dilation
    columns = torch.cat([x[:, tap * dilation : tap * dilation + steps] for tap in range(taps)], dim=-1)
    y = _wide(columns) @ _wide(weight) + _wide(bias)
    if residual is not None:
        y = y + _wide(residual).reshape(y.shape)
    if raw is not None:
        raw.copy_(y.view(raw.shape))
    if ahead is not None:
        if alpha is not None:
            y = snake(y, _wide(alpha))
        elif gelu:
            y = F.gelu(y)
        ahead.copy_(y.view(ahead.shape))


def residual_unit(
    x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor, weight_out: Tensor, bias_out: Tensor, *, dilation: int,
    residual: Tensor, next_alpha: Tensor, ahead: Tensor, raw: Tensor | None = None, counts: Tensor | None = None,
) -> None:  # fmt: skip
    """See `duetts.kernels.residual_unit`."""
    inner = torch.empty(ahead.shape, dtype=x.dtype, device=x.device)
    conv(x, weight, bias, taps=weight.shape[0] // x.shape[2], dilation=dilation, alpha=alpha, ahead=inner)
    conv(inner, weight_out, bias_out, alpha=next_alpha, residual=residual, raw=raw, ahead=ahead)


def last_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See `duetts.kernels.last_conv`."""
    taps = weight.shape[0]
    steps = x.shape[1] - taps + 1
    wide, channels = _wide(x), weight.to(_wide(x).dtype)
    total = sum((wide[:, tap : tap + steps] @ channels[tap] for tap in range(1, taps)), wide[:, :steps] @ channels[0])
    return torch.tanh(total + bias)


def depthwise_norm(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """See `duetts.kernels.depthwise_norm`."""
    taps = weight.shape[0]
    steps = x.shape[1] - taps + 1
    wide, channels = _wide(x), _wide(weight)
    y = sum((wide[:, tap : tap + steps] * channels[tap] for tap in range(taps)), _wide(bias))
    return F.layer_norm(y, y.shape[-1:], _wide(gain), _wide(shift), eps).to(x.dtype)


def embed_codes(codes: Tensor, table: Tensor, starts: Tensor) -> Tensor:
    """See `duetts.kernels.embed_codes`."""
    rows = starts[:-1, None] + torch.minimum(codes, (starts.diff() - 1)[:, None])  # [streams, books, frames]
    return _wide(table[rows]).sum(dim=1).to(table.dtype)


def window_attention(
    qkv: Tensor, rope: Tensor, now: Tensor, slots: Tensor, keys: Tensor, values: Tensor, window: int
) -> Tensor:  # fmt: skip
    """See `duetts.kernels.window_attention`."""
    frames = qkv.shape[1]
    _, heads, ring, head_dim = keys.shape
    assert window - 1 + frames <= ring, f"{frames} new positions and a window of {window} do not fit a ring of {ring}"
    q, k, v = qkv.view(len(qkv), frames, 3, heads, head_dim).unbind(2)  # [streams, frames, heads, head_dim]
    positions = now[:, None] + torch.arange(frames, device=qkv.device)
    cos, sin = rope[positions % len(rope)].unsqueeze(2).unbind(-1)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    keys[slots[:, None], :, positions % ring] = k
    values[slots[:, None], :, positions % ring] = v
    last = positions[:, -1:]
    place = last - (last - torch.arange(ring, device=qkv.device)) % ring  # position that each row of the ring holds
    age = positions[:, :, None] - place[:, None, :]
    seen = (age >= 0) & (age < window) & (place >= 0)[:, None]
    there = (place >= 0)[:, None, :, None]  # rows of an earlier stream may hold anything, also what is not finite
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys[slots].where(there, 0), values[slots].where(there, 0), attn_mask=seen[:, None]
    )
    return y.transpose(1, 2).flatten(2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns interleaved pairs; the result has all first halves of pairs before all second ones, as the ring keeps them."""
    even, odd = _wide(x)[..., ::2], _wide(x)[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1).to(x.dtype)


def load_tails(tails: Tensor, halo: Tensor, layout: Tensor, slots: Tensor, position: Tensor, now: Tensor) -> None:
    """See `duetts.kernels.load_tails`."""
    now.copy_(position[slots])
    kept = tails[slots].where((now > 0)[:, None], 0)
    for offset, past, _, stride, count in layout.tolist():
        halo.as_strided((len(slots), count), (stride, 1), past).copy_(kept[:, offset : offset + count])


def store_tails(
    tails: Tensor, halo: Tensor, layout: Tensor, slots: Tensor, position: Tensor, now: Tensor, frames: int
) -> None:  # fmt: skip
    """See `duetts.kernels.store_tails`."""
    for offset, _, end, stride, count in layout.tolist():
        tails[slots, offset : offset + count] = halo.as_strided((len(slots), count), (stride, 1), end)
    position[slots] = now + frames


def pcm16(wave: Tensor) -> Tensor:
    """See `duetts.kernels.pcm16`."""
    sound = wave.isfinite().all(dim=-1, keepdim=True)
    samples = (wave * 32768.0).clamp(-32768, 32767).where(sound, 0).to(torch.int16)
    return torch.cat((samples, sound.to(torch.int16)), dim=1)
