"""An ONNX graph with dynamic int8 quantisation, run by torch in full precision on any device.

Weights are turned back into floats once, everything that depends on constants alone is computed once, what scales or
shifts a product by constants becomes part of its weights, and what is left is a list of calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.data.operators import OPERATORS, Value, host, lstm, on

FLOAT = 1  # ONNX's number of float32


@dataclass(slots=True)
class Call:
    """One operator: the names it reads and writes."""

    kind: str
    compute: Callable[..., Value]
    inputs: list[str]
    outputs: list[str]


class Product:
    """A matrix product or convolution with constant weights; constant factors and terms after it can be taken in."""

    def __init__(self, weight: Tensor, given: dict[str, Any] | None) -> None:
        self.given = given  # of a convolution; a matrix product has none
        self.weight = weight if given is not None else weight.mT.contiguous()  # outputs first
        self.bias: Tensor | None = None

    def per_output(self, x: Tensor) -> Tensor | None:
        """A constant as one number per output, if that is what it is."""
        count = len(self.weight)
        if x.numel() not in (1, count):
            return None
        return x.reshape(-1).expand(count)

    def scale(self, x: Tensor) -> bool:
        factor = self.per_output(x)
        if factor is None:
            return False
        self.weight = self.weight * factor.view(-1, *[1] * (self.weight.ndim - 1))
        self.bias = None if self.bias is None else self.bias * factor
        return True

    def shift(self, x: Tensor) -> bool:
        term = self.per_output(x)
        if term is None:
            return False
        self.bias = term.contiguous() if self.bias is None else self.bias + term
        return True

    def __call__(self, x: Tensor) -> Tensor:
        if self.given is None:
            return F.linear(x, self.weight, self.bias)
        step, around, apart = (self.given[name][0] for name in ("strides", "pads", "dilations"))
        return F.conv1d(x, self.weight, self.bias, step, around, apart, self.given["group"])


def attributes(node: Any) -> dict[str, Any]:
    from onnx import helper, numpy_helper

    found = {}
    for item in node.attribute:
        value = helper.get_attribute_value(item)
        if item.name == "value":
            value = numpy_helper.to_array(value)
        found[item.name] = value.decode() if isinstance(value, bytes) else value
    return found


def bound(kind: str, given: dict[str, Any]) -> Callable[..., Value]:
    """The operator with its attributes filled in."""
    operator = OPERATORS[kind]
    return (lambda *values: operator(*values, **given)) if given else operator


class Graph:
    """Runs a graph file: `graph(inputs, outputs)` with inputs by name as numpy arrays; `outputs` may be any of its tensors
    that `wanted` names."""

    def __init__(self, path: str | Path, device: torch.device, wanted: list[str]) -> None:
        import onnx
        from onnx import numpy_helper

        graph = onnx.load(str(path)).graph
        self.device, self.wanted = device, wanted
        self.raw = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
        self.known: dict[str, Value] = {name: self.placed(value) for name, value in self.raw.items()}
        self.same: dict[str, str] = {}  # tensors that are others under a new name
        self.calls: list[Call] = []
        self.uses = Counter(name for node in graph.node for name in node.input)
        self.makers: dict[str, Call] = {}
        for node in graph.node:
            self.add(node)
        self.raw.clear()
        read = {name for call in self.calls for name in call.inputs}
        self.known = {name: value for name, value in self.known.items() if name in read}
        self.last_use = {name: index for index, call in enumerate(self.calls) for name in call.inputs}
        kept = {self.same.get(name, name) for name in wanted}
        self.drop = [
            [n for n in set(c.inputs) if n and self.last_use[n] == i and n not in kept] for i, c in enumerate(self.calls)
        ]

    def placed(self, value: np.ndarray) -> Value:
        """Floats go to the device; whole numbers stay."""
        if value.dtype != np.float32:
            return value
        return torch.from_numpy(value.copy()).to(self.device)

    # -- reading -------------------------------------------------------------------------------------------------------

    def add(self, node: Any) -> None:
        """Takes in a node; computes it at once if nothing in it can change."""
        kind, given = node.op_type, attributes(node)
        inputs, outputs = [self.same.get(name, name) for name in node.input], list(node.output)
        if kind in ("MatMulInteger", "ConvInteger"):
            weight = self.weight(inputs[1], inputs[3])
            compute, inputs = Product(weight, given if kind == "ConvInteger" else None), inputs[:1]
        elif kind == "DynamicQuantizeLSTM":
            compute, inputs, outputs = self.recurrent(node), inputs[:1], outputs[:1]
        elif kind == "DynamicQuantizeLinear":
            self.known[outputs[1]], self.known[outputs[2]] = (self.placed(np.array(x, np.float32)) for x in (1, 0))
            self.rename(outputs[0], inputs[0])
            return
        elif self.fixed(inputs) and (kind == "Floor" or (kind == "Cast" and given["to"] != FLOAT and self.floats(inputs[0]))):
            compute = lambda x: x  # noqa: E731 - biases in whole steps: the steps are gone, and with them the rounding
        else:
            compute = bound(kind, given)
        call = Call(kind, compute, inputs, outputs)
        if self.fixed(inputs):
            self.run(call, self.known)
        elif not self.merged(call, given):
            self.calls.append(call)
            self.makers.update(dict.fromkeys(outputs, call))

    def fixed(self, inputs: list[str]) -> bool:
        return all(name in self.known or not name for name in inputs)

    def floats(self, name: str) -> bool:
        return isinstance(self.known[name], Tensor)

    def rename(self, name: str, other: str) -> None:
        self.same[name] = other
        self.uses[other] += self.uses[name] - 1

    def merged(self, call: Call, given: dict[str, Any]) -> bool:
        """Whether a product before this call does its work from now on."""
        if call.kind not in ("Cast", "Mul", "Add"):
            return False
        moving = [name for name in call.inputs if name not in self.known]
        if len(moving) != 1:
            return False
        maker = self.makers.get(moving[0])
        if maker is None or not isinstance(maker.compute, Product):
            return False
        if call.kind == "Cast":
            done = given["to"] == FLOAT
        else:
            fixed = [self.known[name] for name in call.inputs if name in self.known]
            change = maker.compute.scale if call.kind == "Mul" else maker.compute.shift
            done = self.uses[moving[0]] == 1 and len(fixed) == 1 and change(on(fixed[0], self.device))
        if done:
            self.rename(call.outputs[0], moving[0])
        return done

    def weight(self, name: str, zero: str) -> Tensor:
        """Whole numbers as floats, their zero point taken off. The graph multiplies by the scale itself."""
        value = self.raw[name].astype(np.float32) - self.raw[zero].astype(np.float32)
        return torch.from_numpy(value).to(self.device)

    def recurrent(self, node: Any) -> Callable[..., Value]:
        """A bidirectional LSTM. ONNX orders its gates input, output, forget, cell; torch input, forget, cell, output."""
        names = node.input
        both = [self.raw[names[i]] * self.raw[names[s]][:, None, None] for i, s in ((1, 8), (2, 10))]
        hidden = both[1].shape[1]
        order = np.concatenate([np.arange(hidden) + gate * hidden for gate in (0, 2, 3, 1)])
        module = nn.LSTM(both[0].shape[1], hidden, bidirectional=True)
        bias = self.raw[names[3]].reshape(2, 2, 4 * hidden)
        with torch.no_grad():
            for direction, suffix in enumerate(("", "_reverse")):
                for name, value in (("ih", both[0][direction].T), ("hh", both[1][direction].T)):
                    getattr(module, f"weight_{name}_l0{suffix}").copy_(torch.from_numpy(value[order]))
                for index, name in enumerate(("ih", "hh")):
                    getattr(module, f"bias_{name}_l0{suffix}").copy_(torch.from_numpy(bias[direction, index][order]))
        module = module.to(self.device).eval()
        return lambda x: lstm(module, x.contiguous())

    # -- running -------------------------------------------------------------------------------------------------------

    @staticmethod
    def run(call: Call, values: dict[str, Value]) -> None:
        found = call.compute(*(values[name] if name else None for name in call.inputs))
        if len(call.outputs) == 1:
            values[call.outputs[0]] = found
        else:
            values.update(zip(call.outputs, found, strict=True))

    @torch.inference_mode()
    def __call__(self, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The wanted tensors."""
        values = dict(self.known)
        values.update({name: self.placed(value) for name, value in inputs.items()})
        for call, done_with in zip(self.calls, self.drop, strict=True):
            self.run(call, values)
            for name in done_with:
                del values[name]
        return [host(values[self.same.get(name, name)]) for name in self.wanted]
