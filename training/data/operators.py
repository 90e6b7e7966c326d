"""The ONNX operators of the second teacher's graph, on torch tensors (floats, on the device) and numpy arrays (shapes).

Whole numbers start on the host, where shape arithmetic belongs; an operator runs on the device as soon as one of its
inputs lies there. Dynamic quantisation is left out: inputs pass as they are, in steps of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Of a bin that ought to be empty, onnxruntime's STFT leaves this much, at these angles (rounding, the same in every frame).
# The graph turns it into an input of full size, so the voice depends on it.
EMPTY = 8e-8
EMPTY_ANGLES = (3.14, 0.0, 2.4904, -2.1254, 0.7935, -2.1292, 0.1730, 2.9268, -1.3449, 2.7360, -1.5468)
DTYPES: dict[int, tuple[Any, torch.dtype]] = {  # ONNX number -> numpy's and torch's type
    1: (np.float32, torch.float32),
    6: (np.int32, torch.int32),
    7: (np.int64, torch.int64),
    9: (np.bool_, torch.bool),
}
Value = Any  # Tensor, np.ndarray or None
Operator = Callable[..., Value]


def host(x: Value) -> np.ndarray:
    return x.cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)


def ints(x: Value) -> list[int]:
    return [int(value) for value in host(x).reshape(-1)]


def device_of(*values: Value) -> torch.device | None:
    """The device, when one of the values lies there."""
    return next((value.device for value in values if isinstance(value, Tensor)), None)


def on(x: Value, device: torch.device) -> Tensor:
    return x if isinstance(x, Tensor) else torch.from_numpy(np.array(x)).to(device)


def both(on_host: Callable[..., Any], on_device: Callable[..., Any]) -> Operator:
    """An elementwise operator that runs where its inputs are."""

    def run(*values: Value) -> Value:
        device = device_of(*values)
        if device is None:
            return np.asarray(on_host(*values))
        return on_device(*(on(value, device) for value in values))

    return run


def divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def divide_host(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a / b if a.dtype.kind == "f" else a // b


def cast(x: Value, *, to: int, **_: Any) -> Value:
    on_host, on_device = DTYPES[to]
    return x.to(on_device) if isinstance(x, Tensor) else x.astype(on_host)


def gather(x: Value, index: Value, *, axis: int = 0) -> Value:
    if not isinstance(x, Tensor) and not isinstance(index, Tensor):
        return np.asarray(np.take(x, index, axis=axis))
    device = device_of(x, index)
    assert device is not None
    x = on(x, device)
    if not isinstance(index, Tensor) and index.ndim == 0:
        return x.select(axis, int(index))
    index = on(index, device)
    found = x.index_select(axis, index.reshape(-1).long() % x.shape[axis])
    return found.view(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def unsqueeze(x: Value, axes: Value) -> Value:
    for axis in ints(axes):
        x = x.unsqueeze(axis) if isinstance(x, Tensor) else np.expand_dims(x, axis)
    return x


def squeeze(x: Value, axes: Value) -> Value:
    for axis in sorted(ints(axes), reverse=True):
        x = x.squeeze(axis) if isinstance(x, Tensor) else np.squeeze(x, axis)
    return x


def cut(x: Value, starts: Value, ends: Value, axes: Value = None, steps: Value = None) -> Value:
    first, last = ints(starts), ints(ends)
    which = ints(axes) if axes is not None else list(range(len(first)))
    places: list[slice] = [slice(None)] * x.ndim
    for index, (axis, start, end) in enumerate(zip(which, first, last, strict=True)):
        places[axis] = slice(start, end, 1 if steps is None else ints(steps)[index])
    return x[tuple(places)]


def reshape(x: Value, shape: Value, **_: Any) -> Value:
    wanted = [x.shape[i] if size == 0 else size for i, size in enumerate(ints(shape))]
    return x.reshape(wanted)


def concat(*values: Value, axis: int) -> Value:
    device = device_of(*values)
    if device is None:
        return np.concatenate(values, axis)
    return torch.cat([on(value, device) for value in values], axis)


def split(x: Tensor, sizes: Value, *, axis: int) -> tuple[Tensor, ...]:
    return x.split(ints(sizes), axis)


def expand(x: Value, shape: Value) -> Value:
    size = np.broadcast_shapes(tuple(x.shape), tuple(ints(shape)))
    return x.expand(size) if isinstance(x, Tensor) else np.broadcast_to(x, size)


def constant_of_shape(shape: Value, *, value: np.ndarray) -> np.ndarray:
    return np.full(ints(shape), value.reshape(-1)[0], value.dtype)


def transpose(x: Value, *, perm: list[int]) -> Value:
    return x.permute(perm) if isinstance(x, Tensor) else x.transpose(perm)


def mean(x: Tensor, axes: Value, *, keepdims: int, **_: Any) -> Tensor:
    return x.mean(ints(axes), keepdim=bool(keepdims))


def total(x: Tensor, axes: Value, *, keepdims: int, **_: Any) -> Tensor:
    return x.sum(ints(axes), keepdim=bool(keepdims))


def power(x: Tensor, exponent: Tensor) -> Tensor:
    return x.square() if exponent.ndim == 0 or exponent.numel() == 1 else x**exponent


def clip(x: Tensor, low: Value = None, high: Value = None) -> Tensor:
    return x.clamp(None if low is None else float(host(low)), None if high is None else float(host(high)))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float, **_: Any) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def skip_layer_norm(x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float) -> Tensor:
    return F.layer_norm(x + skip, weight.shape, weight, bias, epsilon)


def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def fused_matmul(a: Tensor, b: Tensor, *, transA: int, transB: int, alpha: float, **_: Any) -> Tensor:
    return alpha * ((a.mT if transA else a) @ (b.mT if transB else b))


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pads: list[int], strides: list[int],
             dilations: list[int], group: int, **_: Any) -> Tensor:  # fmt: skip
    return F.conv1d(x, weight, bias, strides[0], pads[0], dilations[0], group)


def convolve_back(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pads: list[int], strides: list[int],
                  dilations: list[int], group: int, output_padding: tuple[int, ...] = (0,), **_: Any) -> Tensor:  # fmt: skip
    return F.conv_transpose1d(x, weight, bias, strides[0], pads[0], output_padding[0], group, dilations[0])


def unquantised(x: Value) -> tuple[Value, np.ndarray, np.ndarray]:
    """In the place of dynamic quantisation: the value itself, step 1 and zero point 0."""
    return x, np.float32(1), np.float32(0)


def dequantised(x: np.ndarray, scale: Tensor, zero: np.ndarray) -> Tensor:
    return on(x.astype(np.float32) - zero.astype(np.float32), scale.device) * scale


def resize(x: Tensor, _: Value, scales: Value, *, mode: str, **__: Any) -> Tensor:
    factor = float(host(scales)[-1])
    if mode == "nearest":
        return x.repeat_interleave(int(factor), -1)
    return F.interpolate(x, scale_factor=factor, mode="linear", align_corners=False, recompute_scale_factor=False)


def pad(x: Tensor, pads: Value, *_: Value, mode: str) -> Tensor:
    sizes = ints(pads)
    return F.pad(x, (sizes[x.ndim - 1], sizes[-1]), mode=mode)


def stft(x: Tensor, step: Value, window: Tensor, length: Value, *, onesided: int) -> Tensor:
    """The graph takes angles of bins that are empty where nothing hums; see `EMPTY_ANGLES`."""
    frames = x.squeeze(-1).unfold(-1, ints(length)[0], ints(step)[0])
    return torch.view_as_real(torch.fft.rfft(frames * window) + empty_bins(x.device))


@cache
def empty_bins(device: torch.device) -> Tensor:
    return torch.polar(torch.full((len(EMPTY_ANGLES),), EMPTY), torch.tensor(EMPTY_ANGLES)).to(device)


def lstm(module: nn.LSTM, x: Tensor) -> Tensor:
    """[n, batch, size] -> [n, 2, batch, hidden], as ONNX orders it. The first state is zero."""
    out, _ = module(x)
    return out.unflatten(-1, (2, -1)).transpose(1, 2)


def arange(start: Value, end: Value, step: Value) -> np.ndarray:
    return np.arange(ints(start)[0], ints(end)[0], ints(step)[0], dtype=np.int64)


def scatter(x: Value, index: Value, updates: Value, **_: Any) -> Value:
    device = device_of(x, index, updates)
    assert device is not None
    out = on(x, device).clone()
    out[on(index, device).long().unbind(-1)] = on(updates, device)
    return out


OPERATORS: dict[str, Operator] = {
    "Add": both(np.add, torch.add), "Sub": both(np.subtract, torch.sub), "Mul": both(np.multiply, torch.mul),
    "Div": both(divide_host, divide), "Pow": both(np.power, power), "Sqrt": both(np.sqrt, torch.sqrt),
    "Floor": both(np.floor, torch.floor), "Round": torch.round, "Sin": torch.sin, "Cos": torch.cos, "Exp": torch.exp,
    "Atan": torch.atan, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "And": both(np.logical_and, torch.logical_and),
    "Equal": both(np.equal, torch.eq), "Greater": both(np.greater, torch.gt), "Less": both(np.less, torch.lt),
    "GreaterOrEqual": both(np.greater_equal, torch.ge), "Where": both(np.where, torch.where),
    "Cast": cast, "Gather": gather, "Unsqueeze": unsqueeze, "Squeeze": squeeze, "Slice": cut, "Reshape": reshape,
    "Concat": concat, "Split": split, "Expand": expand, "ConstantOfShape": constant_of_shape, "Transpose": transpose,
    "Shape": lambda x, **_: np.array(x.shape, np.int64), "Range": arange, "NonZero": lambda x: np.stack(np.nonzero(host(x))),
    "ReduceMean": mean, "ReduceSum": total, "Clip": clip, "CumSum": lambda x, axis, **_: on(x, x.device).cumsum(ints(axis)[0]),
    "LeakyRelu": lambda x, alpha: F.leaky_relu(x, alpha), "Softmax": lambda x, axis: x.softmax(axis),
    "LayerNormalization": layer_norm, "SkipLayerNormalization": skip_layer_norm, "FastGelu": fast_gelu,
    "MatMul": lambda a, b: a @ b, "FusedMatMul": fused_matmul, "Conv": convolve, "ConvTranspose": convolve_back,
    "DynamicQuantizeLinear": unquantised, "DequantizeLinear": dequantised, "Resize": resize, "Pad": pad, "STFT": stft,
    "ScatterND": scatter,
}  # fmt: skip
