"""Frames to PCM, the tensor side: state slots of many streams, and calls that decode for some of them.

`CodecVocoder` computes on the spot, as a CPU does; `GraphedVocoder` starts recorded work on a GPU and does not wait for it.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from duetts import kernels
from duetts.engine.parts import Decoded
from duetts.engine.recordings import Recordings
from duetts.model_config import CodecConfig
from duetts.models.codec import Codec
from duetts.models.stream_decoder import StreamDecoder
from duetts.types import Int32

STREAMS = (1, 2, 4, 8, 16, 32, 64)
FRAMES = (1, 2, 4, 8, 16)
GPU_DTYPE = torch.float16  # of the decoder; `stream_decoder.py` says why
MOST = 256  # frames of all streams in one recording: 4 to 5 ms of an H200, which more would not use better

log = logging.getLogger(__name__)


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
    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> Decoded:
        """Decodes codes [streams, codebooks, frames] after what the slots decoded before. Where samples are not finite, the
        other streams of the call lose nothing by that. Without `keep` the streams stay where they were, as if nothing had been
        decoded.

        A CPU's seconds are those of the processor: how long others kept it waiting says nothing of what the codec can carry.
        """
        device, began = self._state.position.device, time.thread_time()
        wave = self._codec.decode(torch.from_numpy(codes).to(device, torch.int64), self._state.view(slots, keep=keep))
        sounds = [to_pcm(row) if row.isfinite().all() else None for row in wave.float().cpu()]
        return Decoded(sounds, time.thread_time() - began if device.type == "cpu" else None)


def to_pcm(wave: Tensor) -> bytes:
    """Samples in -1..1 to signed 16-bit little-endian. Full scale is clipped, where the reference would wrap around."""
    return (wave * 32768.0).clamp(-32768, 32767).to(torch.int16).numpy().astype("<i2").tobytes()


@dataclass(frozen=True, slots=True)
class _Shuttle:
    """Memory of the host for one replay, page-locked for a GPU: what it reads, and what it makes."""

    size: int
    inputs: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class _Replay:
    """A replay under way for the streams `first`.. of a call."""

    first: int
    count: int
    shuttle: _Shuttle


class GraphedVocoder:
    """Calls of a stream decoder as replays of recordings on a stream of their own, which gives way to those of higher priority.

    A recording decodes so many `frames` of so many `streams`; a call is made of them: its frames one after another, its streams
    side by side, padded with the scratch slot. On a CPU, for tests, the work is called instead and done at once.
    """

    quantum: int | None = None

    def __init__(
        self, decoder: StreamDecoder, *, slots: int, streams: Sequence[int] = STREAMS, frames: Sequence[int] = FRAMES,
        most: int = MOST,
    ) -> None:  # fmt: skip
        self.slots = slots
        self._decoder = decoder
        self._state = decoder.new_state(slots)
        self._on_gpu = decoder.device.type == "cuda"
        self._frames = sorted(frames)
        counts = sorted(streams)
        counts = counts[: bisect_left(counts, slots) + 1]  # more are never due
        self._streams = {each: [count for count in counts if count * each <= most] for each in self._frames}
        shapes = [(count, each) for each in self._frames for count in self._streams[each]]
        self._shapes = sorted(shapes, key=lambda shape: shape[0] * shape[1])  # a size of the recordings is a place here
        sizes = range(len(self._shapes))
        self._recordings = Recordings(self._work, sizes, self._blank, decoder.device, replayed=self._on_gpu)
        self._own = torch.cuda.Stream(decoder.device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        if self._own is not None:  # weights and state may still be on their way there
            self._own.wait_stream(torch.cuda.current_stream(decoder.device))
        self._fresh: set[int] = set()
        self._spare: dict[int, list[_Shuttle]] = {size: [] for size in sizes}

    @property
    def nbytes(self) -> int:
        """Bytes of weights, of all slots and of the largest call's signals."""
        streams, frames = self._shapes[-1]
        return self._decoder.nbytes + self._state.nbytes + streams * frames * self._decoder.bytes_per_frame

    @torch.inference_mode()
    def prepare(self, seconds: float) -> None:
        """Records the most streams for each number of frames, with which any call can be made, then others, few streams first,
        as long as `seconds` last. What is not recorded by then is padded to what is."""
        began = time.monotonic()
        needed = [(self._streams[frames][-1], frames) for frames in reversed(self._frames)]
        rest = [shape for shape in self._shapes if shape not in needed]
        recorded = set[tuple[int, int]]()
        with self._lane():
            for shape in [*needed, *rest]:
                if shape in needed or time.monotonic() - began < seconds:
                    size = self._shapes.index(shape)
                    self._recordings.record(size)
                    self._spare[size].append(self._new_shuttle(size))  # page-locking memory is slow
                    recorded.add(shape)
        self._streams = {each: [s for s in counts if (s, each) in recorded] for each, counts in self._streams.items()}
        log.info("%d of %d codec calls recorded in %.1f s", len(recorded), len(self._shapes), time.monotonic() - began)

    def reset(self, slot: int) -> None:
        """The next call for a slot begins a stream."""
        self._fresh.add(slot)

    @torch.inference_mode()
    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> GraphedDecoding:
        """Starts to decode codes [streams, codebooks, frames] after what the slots decoded before, and its way to the host."""
        assert keep, "streams of a GPU always move on"
        with self._lane():
            began = self._now()
            replays = [
                self._replay(first, slots[first : first + count], codes[first : first + count, :, begin:end], size)
                for begin, end, first, count, size in self._cut(len(slots), codes.shape[2])
            ]
            return GraphedDecoding(len(slots), replays, self._spare, began, self._now())

    def _cut(self, streams: int, frames: int) -> Iterator[tuple[int, int, int, int, int]]:
        """The replays that make a call: begin and end of frames, first and number of streams, size of the recording."""
        begin = 0
        while begin < frames:
            part = max(size for size in self._frames if size <= frames - begin)
            counts = self._streams[part]
            for first in range(0, streams, counts[-1]):
                count = min(streams - first, counts[-1])
                padded = counts[bisect_left(counts, count)]
                yield begin, begin + part, first, count, self._shapes.index((padded, part))
            begin += part

    def _replay(self, first: int, slots: list[int], codes: Int32, size: int) -> _Replay:
        shuttle = self._spare[size].pop() if self._spare[size] else self._new_shuttle(size)
        inputs, count = shuttle.inputs.numpy(), len(slots)
        inputs[:2, count:] = self._state.scratch
        inputs[0, :count] = slots
        inputs[1, :count] = [slot if slot in self._fresh else self._state.scratch for slot in slots]
        inputs[2:].reshape(inputs.shape[1], -1)[:count] = codes.reshape(count, -1)
        samples = self._recordings(size, (shuttle.inputs,))
        shuttle.output[:count].copy_(samples[:count], non_blocking=True)
        self._fresh.difference_update(slots)
        return _Replay(first, count, shuttle)

    def _work(self, inputs: Tensor) -> Tensor:
        """Inputs int64 [2 + codebooks * frames, streams]: slots, those of them that begin (else scratch), and, as if this were
        [streams, codebooks, frames], codes -> samples int16 [streams, frames * frame_length + 1], the last for their
        soundness."""
        self._state.reset(inputs[1])
        codes = inputs[2:].view(inputs.shape[1], self._decoder.num_codebooks, -1)
        return kernels.pcm16(self._decoder.decode(codes, inputs[0], self._state))

    def _blank(self, size: int) -> tuple[Tensor]:
        streams, frames = self._shapes[size]
        inputs = torch.zeros(2 + self._decoder.num_codebooks * frames, streams, dtype=torch.int64, pin_memory=self._on_gpu)
        inputs[:2] = self._state.scratch
        return (inputs,)

    def _new_shuttle(self, size: int) -> _Shuttle:
        streams, frames = self._shapes[size]
        samples = frames * self._decoder.frame_length + 1
        output = torch.zeros(streams, samples, dtype=torch.int16, pin_memory=self._on_gpu)
        return _Shuttle(size, self._blank(size)[0], output)

    def _lane(self) -> AbstractContextManager[object]:
        return nullcontext() if self._own is None else torch.cuda.stream(self._own)

    def _now(self) -> torch.cuda.Event | None:
        """A mark in the device's stream."""
        if self._own is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._own)
        return event


def count_graphed_bytes(config: CodecConfig, *, slots: int) -> int:
    """What a graphed vocoder takes on its device beside the codec that it is made from, without making it."""
    with torch.device("meta"):
        return GraphedVocoder(StreamDecoder(Codec(config), GPU_DTYPE), slots=slots).nbytes


class GraphedDecoding:
    """A call that is under way on a GPU."""

    def __init__(
        self, streams: int, replays: list[_Replay], spare: dict[int, list[_Shuttle]], began: torch.cuda.Event | None,
        ended: torch.cuda.Event | None,
    ) -> None:  # fmt: skip
        self._streams = streams
        self._replays = replays
        self._spare = spare
        self._began = began
        self._ended = ended

    @property
    def seconds(self) -> float | None:
        """The device's own time, with what else it did meanwhile."""
        if self._began is None or self._ended is None:
            return None
        return float(self._began.elapsed_time(self._ended)) / 1e3

    def ready(self) -> bool:
        if self._ended is None:
            return True
        try:
            return bool(self._ended.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # the device has failed: `result` says how
            return True

    def result(self) -> list[bytes | None]:
        """PCM of each stream. Call it once: the memory it lies in is for other calls then."""
        if self._ended is not None:
            self._ended.synchronize()
        pieces: list[list[bytes] | None] = [[] for _ in range(self._streams)]
        for replay in self._replays:
            found = replay.shuttle.output.numpy()[: replay.count].astype("<i2", copy=False)
            for stream, row in enumerate(found, start=replay.first):
                piece = pieces[stream]
                if not row[-1]:
                    pieces[stream] = None
                elif piece is not None:
                    piece.append(row[:-1].tobytes())
            self._spare[replay.shuttle.size].append(replay.shuttle)
        return [None if each is None else b"".join(each) for each in pieces]
