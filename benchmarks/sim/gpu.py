"""One engine in simulated time: the real scheduler, pages, pace and codec worker around a device that only takes time.

A turn is the engine's own (`Engine._advance`): blocks of prompts, one step, the landing of the step before, one codec call, all
in one queue of the device, one after another. The host keeps ahead of the device and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from benchmarks.sim.listeners import CODEBOOKS, LONGEST, Request
from benchmarks.sim.model import FRAME_S, Card
from benchmarks.sim.policies import Policy

from duetts.engine.codec_worker import LOOK_S, CodecWorker
from duetts.engine.pace import Pace
from duetts.engine.pages import PAGE, PagePool
from duetts.engine.parts import Decoded
from duetts.engine.playout import ChunkPolicy, Playout
from duetts.engine.scheduler import Room, Scheduler
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.types import Chunk, Int32, Outcome

SLOTS, ROWS, BLOCK = 1024, 256, 512
COLUMNS = np.repeat(np.arange(LONGEST + 1, dtype=np.int32)[:, None], 1 + CODEBOOKS, axis=1)  # the n-th frame is all n


class Clock:
    """Simulated seconds; call it for the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Timer:
    """The vocoder: it makes no sound, and time passes."""

    card: Card
    clock: Clock
    slots: int
    quantum: int | None = None
    busy_s: float = 0.0
    calls: int = 0

    def reset(self, slot: int) -> None:
        pass

    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> Decoded:
        seconds = self.card.decode_s(codes.shape[0] * codes.shape[2])
        self.clock.now += seconds
        self.busy_s += seconds
        self.calls += 1
        return Decoded([b""] * len(slots))


@dataclass(slots=True, eq=False)
class Ear:
    """Where an engine puts chunks: it sees that every frame comes once and in order, and notes when the first came."""

    request: Request
    gpu: Gpu

    def wake(self) -> None:
        """Nobody sleeps here."""

    def put(self, item: Chunk | Outcome) -> None:
        assert isinstance(item, Chunk)
        request = self.request
        numbers = item.codes[0]
        assert numbers[0] == request.heard, f"frame {numbers[0]} came instead of {request.heard}"
        assert numbers[-1] - numbers[0] == len(numbers) - 1, "frames are missing within a chunk"
        if request.first_audio_s is None:
            request.first_audio_s = self.gpu.clock.now - request.submitted
            self.gpu.on_first(request)
        request.heard += len(numbers)
        self.gpu.owed -= len(numbers)


@dataclass(slots=True)
class Work:
    """What a device did."""

    turns: int = 0
    steps: int = 0
    rows: int = 0
    busy_s: float = 0.0  # with the codec's
    read_s: float = 0.0
    frames: int = 0
    listened: int = 0  # of `frames`, those of listeners


class Gpu:
    """One device and its engine. The fleet gives it requests and calls `turn`, and hears of each first chunk and each end."""

    def __init__(
        self, index: int, card: Card, policy: Policy, on_first: Callable[[Request], None], on_end: Callable[[Request], None]
    ) -> None:
        self.index = index
        self.on_first = on_first
        self.room = Room(SLOTS, ROWS, BLOCK, card.num_positions, FRAME_S, rereads=True, shared_thread=True)
        self.clock = Clock()
        self.work = Work()
        self.owed = 0  # frames that open requests may still need
        self.open: dict[Sequence, Request] = {}
        self.inbox: list[Sequence] = []
        self._card = card
        self._policy = policy
        self._on_end = on_end
        self.pool = PagePool(card.num_positions // PAGE)
        self.pace = Pace()
        self.scheduler = Scheduler(
            self.room, self.pool, self.pace, policy.order,
            watch_lateness=policy.admits_by_lateness, stand_back=policy.stands_back,
        )  # fmt: skip
        self.vocoder = Timer(card, self.clock, 2 * SLOTS)
        self.codec = CodecWorker(self.vocoder, cast(ChunkPolicy, policy.chunks), self.pace, self._settle, self.clock)
        self._flight: list[tuple[Sequence, int]] = []

    @property
    def num_open(self) -> int:
        return len(self.open)

    def line_s(self) -> float:
        """How long a new listener would wait outside, those counted who come at the next turn."""
        return self.scheduler.line_s + len(self.inbox) * self.pace.stay_s / max(1, len(self.scheduler.running))

    def submit(self, request: Request, now: float) -> Sequence:
        """A request reaches the engine; it is heard at the next turn."""
        utterance = request.utterance
        ear = cast(Channel, Ear(request, self))
        sequence = Sequence(
            utterance, ear, Playout(FRAME_S), blocks=self.scheduler.prepare(utterance), submitted=now
        )  # fmt: skip
        self.open[sequence] = request
        self.owed += utterance.max_frames
        self.inbox.append(sequence)
        return sequence

    def turn(self, now: float) -> float | None:
        """One turn of the loop -> when the next one begins, or None if it waits for somebody to come."""
        self.clock.now = now
        for sequence in self.inbox:
            self.scheduler.add(sequence)
        self.inbox.clear()
        for sequence in [sequence for sequence in self.scheduler.everyone() if sequence.cancelled]:
            self._finish(sequence, "aborted")
        timed = self._advance(now)
        decoded = self.codec.step()
        if timed:
            self.codec.made_s = (self.clock.now - now) * max(1.0, len(self.scheduler.running) / len(self._flight))
        self.work.busy_s += self.clock.now - now
        self.work.turns += 1
        if self.clock.now > now:
            return self.clock.now
        if decoded or self._flight or not self.scheduler.idle or self.codec.num_streams:
            return now + LOOK_S / 4
        return None

    def _advance(self, now: float) -> bool:
        """Everything before the codec -> whether the turn was one that the engine measures."""
        read_s = 0.0
        blocks = self.scheduler.choose_blocks(now)
        for sequence, block in blocks:
            read_s += self._card.read_s(block.end - block.start, block.start)
            self.scheduler.has_read(sequence, block)
        rows = self.scheduler.choose_rows(now)
        landing, self._flight = self._flight, [(sequence, sequence.run) for sequence in rows]
        step_s = 0.0
        if rows:
            step_s = self._card.step_s(len(rows), sum(sequence.position + 1 for sequence in rows))
            for sequence in rows:
                self.scheduler.has_launched(sequence, now)
        self.clock.now += read_s + step_s
        self.work.read_s += read_s
        self.work.steps += bool(rows)
        self.work.rows += len(rows)
        self._land(landing)
        timed = bool(rows) and not blocks
        if timed:
            self.pace.saw_step(len(rows), step_s)
        return timed

    def _land(self, flight: list[tuple[Sequence, int]]) -> None:
        """The frames of a step are known. The step after a speech's last frame is the one that says so."""
        frames: list[tuple[Sequence, Int32]] = []
        ended: list[Sequence] = []
        for sequence, run in flight:
            if sequence.finished is not None or sequence.run != run:
                continue
            if sequence.num_frames == self.open[sequence].frames:
                ended.append(sequence)
                continue
            column = COLUMNS[sequence.num_frames]
            sequence.keep(column)
            frames.append((sequence, column[1:]))
            self.work.listened += self.open[sequence].listening
        self.work.frames += len(frames)
        self.codec.push(frames)
        for sequence in ended:
            self._finish(sequence, "stop")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        assert reason in ("stop", "aborted")
        sequence.finished = "stop" if reason == "stop" else "aborted"
        self.scheduler.remove(sequence)
        self.codec.end(sequence)
        if sequence.streaming and reason == "stop" and sequence.admitted_at is not None:
            self.pace.saw_stay(self.clock.now - sequence.admitted_at)

    def _settle(self, sequence: Sequence) -> None:
        request = self.open.pop(sequence)
        self.owed -= request.utterance.max_frames - request.heard
        request.ended = self.clock.now
        request.hear(sequence.playout, self.clock.now)
        if sequence.finished == "stop":
            assert request.heard == request.frames, f"{request.heard} of {request.frames} frames were delivered"
            request.state = "done"
        else:
            request.state = "left" if request.first_audio_s is None else "interrupted"
        self._on_end(request)
