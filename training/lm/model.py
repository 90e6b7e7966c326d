"""The engine's own decoders in one training pass over packed rows, and the losses.

Slow decoder: cross entropy of the next frame's semantic code or the end. Fast decoder: cross entropy of the residual codes
of a random choice of frames. Two heads are led to the text byte that sounds next, so that reading on is learnt early.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetts.model_config import ModelConfig
from duetts.models.blocks import Attend
from duetts.models.dual_ar import DualAR
from training.lm.attention import Core, TensorBatch, masked, visible
from training.recipe import CODEC, ROW

SMOOTHING = 0.05  # of the semantic code's label
LED_LAYERS = (2, 3)  # of these layers the first head is led
BAND = 2  # bytes beside the wanted one that are as good
LED_ROWS = 4  # one in so many rows takes part
HEAD_ROUNDING = 64  # the head's rows are padded to a multiple, which matrix units like


class Losses(NamedTuple):
    """The sum to be minimised and its parts, each a mean: nats, of the books one by one."""

    total: Tensor
    slow: Tensor
    books: Tensor
    led: Tensor


Caught = list[tuple[Tensor, Tensor]]  # queries and keys of the led heads, [rows, n, d]


def start_model(config: ModelConfig) -> DualAR:
    """Random weights; branches that are added to the stream start small."""
    model = DualAR(config, int(CODEC["residual_codebook_size"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            layers = config.slow.num_layers if name.startswith("slow.") else config.fast.num_layers
            small = name.endswith(("wo.weight", "w2.weight"))
            parameter.normal_(0.0, 0.02 / (2 * layers) ** 0.5 if small else 0.02)
    return model


def causal_short(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over a handful of positions and very many rows, in products and sums that compile into one kernel."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q[:, :, :, None] * k[:, :, None]).sum(-1, dtype=torch.float32) * q.shape[-1] ** -0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype)
    return (shares[..., None] * v[:, :, None]).sum(-2)


def causal_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Trainee(nn.Module):
    """Both decoders and their losses. `core` is how the slow one attends; `fast_scale` weighs the residual books' sum.
    `dropout` is the share of what a slow layer adds to the stream that is left out in training."""

    book_weights: Tensor

    def __init__(self, config: ModelConfig, fast_scale: float = 0.4, core: Core = masked, dropout: float = 0.0) -> None:
        super().__init__()
        self.config, self.core, self.fast_scale, self.dropout = config, core, fast_scale, dropout
        self.model = start_model(config)
        self.register_buffer("book_weights", torch.linspace(1.0, 0.5, config.num_codebooks - 1), persistent=False)
        self.prepare()

    def prepare(self) -> None:
        """Tables of the engine's modules; needed again after a move to another device."""
        self.model.prepare(ROW)

    def forward(self, batch: TensorBatch, led_weight: Tensor, smoothing: float, amp: bool) -> Losses:
        with torch.autocast(batch["tokens"].device.type, torch.bfloat16, enabled=amp):
            hidden, caught = self.hidden(batch)
            slow = self.slow_loss(hidden, batch, smoothing)
            books = self.fast_losses(hidden, batch)
        led = self.led_loss(caught, batch)
        total = slow + self.fast_scale * (self.book_weights * books).sum() + led_weight * led
        return Losses(total, slow.detach(), books.detach(), led.detach())

    # -- slow decoder --------------------------------------------------------------------------------------------------

    def hidden(self, batch: TensorBatch) -> tuple[Tensor, Caught]:
        """Normed hidden states [rows, n, dim]."""
        slow = self.model.slow
        caught: Caught = []
        x = slow.embed(torch.cat((batch["tokens"][..., None], batch["codes"].transpose(1, 2)), dim=-1))
        rope = slow.rope[batch["position"]]
        for index, layer in enumerate(slow.layers):
            after = layer(x, rope, self.attend(batch, caught if index in LED_LAYERS else None))
            x = x + F.dropout(after - x, self.dropout) if self.training and self.dropout else after
        return slow.norm(x), caught

    def attend(self, batch: TensorBatch, caught: Caught | None) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if caught is not None:
                caught.append((q[:, 0], k[:, 0]))
            return self.core(q, k, v, batch)

        return attend

    def choice_logits(self, hidden: Tensor) -> Tensor:
        """As the engine's, with a head that has gradients: [..., num_semantic + 1]."""
        config, weight = self.config, self.model.slow.output_weight
        rows = torch.cat((weight[config.semantic_start : config.semantic_end + 1], weight[config.end_id : config.end_id + 1]))
        padded = F.pad(rows, (0, 0, 0, -len(rows) % HEAD_ROUNDING))
        return F.linear(hidden, padded)[..., : len(rows)].float()

    def slow_loss(self, hidden: Tensor, batch: TensorBatch, smoothing: float) -> Tensor:
        logits, weight = self.choice_logits(hidden).flatten(0, 1), batch["weight"].flatten()
        each = F.cross_entropy(logits, batch["choice"].flatten(), ignore_index=-1, label_smoothing=smoothing, reduction="none")
        return (each * weight).sum() / weight.sum().clamp(min=1e-6)

    # -- fast decoder --------------------------------------------------------------------------------------------------

    def fast_logits(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Hidden states [frames, dim] and the frames' codes [frames, books] -> logits [frames, books - 1, width]."""
        fast = self.model.fast
        first = fast.project_in(hidden) if self.config.fast_project else hidden
        known = fast.embeddings(codes[:, :-1])
        x = torch.cat((first[:, None].to(known.dtype), known), dim=1)
        short = causal_short if x.device.type == "cuda" else causal_plain
        rope = fast.rope[None, : x.shape[1]]
        for layer in fast.layers:
            x = layer(x, rope, short)
        return fast.logits(fast.norm(x[:, 1:]), self.model.residual_width).float()

    def fast_losses(self, hidden: Tensor, batch: TensorBatch) -> Tensor:
        """Cross entropy of each residual book: [books - 1]."""
        index, weight = batch["fast_index"], batch["fast_weight"]
        codes = batch["clean"].transpose(1, 2).flatten(0, 1)[index + 1]
        logits = self.fast_logits(hidden.flatten(0, 1)[index], codes)
        labels = codes[:, 1:].clamp(max=logits.shape[-1] - 1)  # frames without weight may hold anything
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return (each * weight[:, None]).sum(0) / weight.sum().clamp(min=1e-6)

    # -- led heads -----------------------------------------------------------------------------------------------------

    def led_loss(self, caught: Caught, batch: TensorBatch) -> Tensor:
        """-log of the share of attention that falls on bytes near the wanted one, over positions where it is known."""
        rows = -(-len(batch["align"]) // LED_ROWS)
        wanted, mask = batch["align"][:rows], batch["visible"][:rows]
        known = (wanted >= 0).float()
        near = wanted[..., None] + torch.arange(-BAND, BAND + 1, device=wanted.device)
        near = near.clamp(0, mask.shape[-1] - 1)
        losses = []
        for q, k in caught:
            scores = (q[:rows] @ k[:rows].transpose(1, 2)).float() * q.shape[-1] ** -0.5
            scores = scores.masked_fill(~mask, -1e4)
            share = scores.gather(-1, near).logsumexp(-1) - scores.logsumexp(-1)
            losses.append(-(share * known).sum() / known.sum().clamp(min=1.0))
        return torch.stack(losses).mean()


def to_device(batch: dict[str, Tensor], device: torch.device) -> TensorBatch:
    """Indices as int64, and what every pass derives from a batch: the mask, and the codes as they were."""
    moved = {name: value.to(device, non_blocking=True) for name, value in batch.items() if name != "pairs"}
    for name in ("tokens", "codes", "position", "choice", "align", "fast_index"):
        moved[name] = moved[name].long()
    moved["visible"] = visible(moved["document"])
    moved["clean"] = moved["codes"]
    return moved
