"""Frames to PCM: a thread of its own that decodes the frames of many streams, each from where it left off.

Every call decodes exactly `quantum` frames of a stream, the last ones padded and cut, whatever the listener is handed
and whoever else is speaking: so a stream's bytes depend on its own codes only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from duetts.engine.sequence import Sequence
from duetts.errors import EngineFailure
from duetts.models.codec import Codec
from duetts.types import Chunk, Int32


@dataclass(slots=True)
class _Stream:
    """Frames of one sequence that wait to be decoded."""

    sequence: Sequence
    frames: list[Int32] = field(default_factory=list)
    slot: int | None = None
    ended: bool = False


class CodecWorker:
    """Owns the codec's decoder, its state slots and the thread that runs them, on which it calls `on_end` once a sequence."""

    def __init__(
        self, codec: Codec, *, slots: int, quantum: int, threads: int | None, on_end: Callable[[Sequence], None]
    ) -> None:  # fmt: skip
        self._codec = codec
        self._state = codec.new_state(slots)
        self._free = list(range(slots))
        self._num_slots = slots
        self._quantum = quantum
        self._threads = threads
        self._on_end = on_end
        self._device = self._state.position.device
        self._together = self._device.type != "cpu"
        self._streams: dict[Sequence, _Stream] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="duetts-codec", daemon=True)
        self._thread.start()

    def push(self, sequence: Sequence, codes: Int32) -> None:
        """Codes [codebooks] of the next frame of a sequence."""
        with self._changed:
            self._streams.setdefault(sequence, _Stream(sequence)).frames.append(codes)
            self._changed.notify()

    def end(self, sequence: Sequence) -> None:
        """No more frames; call it once. After a stop or a limit what waits is still decoded, otherwise it is dropped."""
        with self._changed:
            stream = self._streams.setdefault(sequence, _Stream(sequence))
            stream.ended = True
            if sequence.finished not in ("stop", "length"):
                stream.frames.clear()
            self._changed.notify()

    @property
    def idle(self) -> bool:
        with self._changed:
            return not self._streams and len(self._free) == self._num_slots

    def sequences(self) -> list[Sequence]:
        """Those whose outcome is still to come and that have sent a frame or their end."""
        with self._changed:
            return list(self._streams)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Waits for what is still decoded, then stops the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while True:
            with self._changed:
                ended = self._take_ended()
                batch = self._ready() if self._together else self._ready()[:1]
                if not ended and not batch:
                    if self._closed and not self._streams:
                        return
                    self._changed.wait()
                    continue
                parts = [self._take(stream) for stream in batch]
            for sequence in ended:
                self._on_end(sequence)
            if batch:
                self._decode(batch, parts)

    def _take_ended(self) -> list[Sequence]:
        """Drops frames that nobody waits for any more, then takes out the streams that have nothing left."""
        now = time.monotonic()
        for stream in self._streams.values():
            reason = stream.sequence.verdict(now)
            if reason is not None and stream.frames:
                stream.frames.clear()
                if stream.ended:  # else the loop, which sees the same verdict, ends it
                    stream.sequence.finished = reason
        done = [stream for stream in self._streams.values() if stream.ended and not stream.frames]
        for stream in done:
            del self._streams[stream.sequence]
            if stream.slot is not None:
                self._free.append(stream.slot)
        return [stream.sequence for stream in done]

    def _ready(self) -> list[_Stream]:
        """Streams with a full quantum, or with a last partial one, and with a slot; those served longest ago first."""
        ready = []
        for stream in self._streams.values():
            if len(stream.frames) >= self._quantum or (stream.ended and stream.frames):
                if stream.slot is None and self._free:
                    stream.slot = self._free.pop()
                    self._state.reset(stream.slot)
                if stream.slot is not None:
                    ready.append(stream)
        return ready

    def _take(self, stream: _Stream) -> list[Int32]:
        part, stream.frames = stream.frames[: self._quantum], stream.frames[self._quantum :]
        self._streams[stream.sequence] = self._streams.pop(stream.sequence)  # last in line
        return part

    def _decode(self, batch: list[_Stream], parts: list[list[Int32]]) -> None:
        try:
            waves = self._run_codec([stream.slot for stream in batch if stream.slot is not None], parts)
        except Exception as error:  # the streams of this call are lost, the worker goes on
            for stream in batch:
                stream.sequence.fail(error)
            return
        now = time.monotonic()
        for stream, part, wave in zip(batch, parts, waves, strict=True):
            if stream.sequence.first_audio_at is None:
                stream.sequence.first_audio_at = now
            samples = len(part) * self._codec.config.frame_length
            if stream.sequence.finished in (None, "stop", "length"):
                stream.sequence.channel.put(Chunk(to_pcm(wave[:samples]), np.stack(part, axis=1)))

    @torch.inference_mode()
    def _run_codec(self, slots: list[int], parts: list[list[Int32]]) -> list[Tensor]:
        codes = np.zeros((len(parts), self._codec.config.num_codebooks, self._quantum), dtype=np.int64)
        for row, part in enumerate(parts):
            codes[row, :, : len(part)] = np.stack(part, axis=1)
        wave = self._codec.decode(torch.from_numpy(codes).to(self._device), self._state.view(slots))
        if not torch.isfinite(wave).all():
            raise EngineFailure("the codec made samples that are not finite")
        return list(wave.float().cpu())


def to_pcm(wave: Tensor) -> bytes:
    """Samples in -1..1 to signed 16-bit little-endian. Full scale is clipped, where the reference would wrap around."""
    return (wave * 32768.0).clamp(-32768, 32767).to(torch.int16).numpy().astype("<i2").tobytes()
