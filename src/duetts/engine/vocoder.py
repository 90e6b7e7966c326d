"""Frames to PCM, the tensor side: state slots of many streams, and one call that decodes for some of them."""

from __future__ import annotations

import torch
from torch import Tensor

from duetts.models.codec import Codec
from duetts.types import Int32


class CodecVocoder:
    """The codec's decoder with `slots` streams. On a CPU every call decodes `quantum` frames of one stream, so that a stream's
    bytes depend on its own codes only; elsewhere any number of frames of many streams (`quantum` None)."""

    def __init__(self, codec: Codec, *, slots: int, quantum: int | None) -> None:
        self.quantum = quantum
        self.slots = slots
        self._codec = codec
        self._state = codec.new_state(slots)

    @torch.inference_mode()
    def reset(self, slot: int) -> None:
        """Makes a slot a stream that has not begun."""
        self._state.reset(slot)

    @torch.inference_mode()
    def decode(self, slots: list[int], codes: Int32, *, keep: bool) -> list[bytes | None]:
        """codes [streams, codebooks, frames] after what the slots decoded before -> PCM of each stream, 16-bit little-endian,
        or None where samples are not finite: the other streams of the call lose nothing by that.

        Without `keep` the streams stay where they were, as if nothing had been decoded.
        """
        device = self._state.position.device
        wave = self._codec.decode(torch.from_numpy(codes).to(device, torch.int64), self._state.view(slots, keep=keep))
        return [to_pcm(row) if row.isfinite().all() else None for row in wave.float().cpu()]


def to_pcm(wave: Tensor) -> bytes:
    """Samples in -1..1 to signed 16-bit little-endian. Full scale is clipped, where the reference would wrap around."""
    return (wave * 32768.0).clamp(-32768, 32767).to(torch.int16).numpy().astype("<i2").tobytes()
