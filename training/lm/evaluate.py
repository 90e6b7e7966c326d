"""Held-out cross entropy, book by book, in nats: of the averaged weights, without noise and smoothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.lm.attention import TensorBatch
from training.lm.model import Trainee


@dataclass(frozen=True, slots=True)
class Held:
    """Means over the held-out batches. `led`: -log of the led heads' share near the right byte."""

    slow: float
    books: list[float]
    led: float

    def line(self) -> str:
        books = " ".join(f"{value:.2f}" for value in self.books)
        return f"held out: book 0 {self.slow:.3f}  books 1.. {books}  led {self.led:.2f}"


@torch.no_grad()
def evaluate(trainee: Trainee, batches: list[TensorBatch], amp: bool) -> Held:
    none = torch.zeros((), device=batches[0]["tokens"].device)
    found = [trainee(batch, none, 0.0, amp) for batch in batches]
    books = torch.stack([losses.books for losses in found]).mean(0).tolist()
    slow, led = (torch.stack(values).mean().item() for values in zip(*((f.slow, f.led) for f in found), strict=True))
    return Held(slow, books, led)
