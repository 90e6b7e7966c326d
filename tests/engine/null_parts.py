"""Parts without a model that notice what a model would not: a cache that remembers what was written where, a codec that counts.

A frame's column is a function of (seed, frame), so every utterance's solo run is known without an engine.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from duetts.engine.pages import PAGE, Block, PagePool
from duetts.engine.parts import UNSOUND, Result
from duetts.engine.sequence import Sequence
from duetts.errors import Aborted, DuettsError, NotReady, Overloaded
from duetts.types import Chunk, FinishReason, Float32, Int32, Outcome, Utterance

END = 1
BOOKS = 3
FRAME_BYTES = 4 * (1 + BOOKS)
FAULTS = ("read", "launch", "landing", "unsound", "decode", "mute")
FAULT_FRAME = 3  # the frame at which a faulty utterance of most kinds breaks


def fault_of(seed: int) -> str | None:
    """Seeds say what is wrong with an utterance: 1,000,000 and more are faulty."""
    return FAULTS[seed // 1_000_000 - 1] if seed >= 1_000_000 else None


def column(seed: int, frame: int) -> Int32:
    """The frame that a seed draws [1 + codebooks]. A third of the seeds end by themselves, a seventh repeat a token."""
    mixed = (seed * 2654435761 + frame * 40503 + (seed ^ frame) * 97) % 1021
    token = 7 if seed % 7 == 3 else 10 + mixed % 50
    if seed % 3 == 1 and frame == seed % 29:
        token = END
    return np.array([token, seed, frame, mixed], np.int32)


def solo(utterance: Utterance) -> tuple[list[Int32], FinishReason]:
    """What an utterance says when nothing goes wrong."""
    frames: list[Int32] = []
    repeats = 0
    for frame in range(utterance.max_frames):
        drawn = column(utterance.seed, frame)
        if drawn[0] == END:
            return frames, "stop"
        repeats = repeats + 1 if frames and frames[-1][0] == drawn[0] else 0
        frames.append(drawn)
        if 0 < utterance.max_repeats <= repeats:
            break
    return frames, "length"


def sound(place: int, codes: Int32) -> bytes:
    """One frame's bytes: its place in the stream and its codes [codebooks]."""
    return struct.pack("<4i", place, *codes.tolist())


def solo_bytes(utterance: Utterance) -> bytes:
    return b"".join(sound(place, frame[1:]) for place, frame in enumerate(solo(utterance)[0]))


def mark(drawn: Int32) -> int:
    """What the cache holds of a column."""
    return hash(drawn.tobytes())


class Complaints(list[str]):
    """What parts found wrong. The engine takes their errors for a device's, so that a test must look here."""

    def demand(self, condition: bool, message: str) -> None:
        if not condition:
            self.append(message)
            raise AssertionError(message)


@dataclass(eq=False, slots=True)
class _State:
    """A slot of the device: the marks of every position so far, the column that the next step goes on from."""

    occupant: tuple[Sequence, int]
    marks: list[int]
    last: Int32
    frame: int


class NullResult:
    """A step that is ready at the third look, if the device has steps under way at all."""

    def __init__(self, lag: int, columns: Callable[[], Int32]) -> None:
        self._looks = 3 if lag else 1
        self._columns = columns

    def ready(self) -> bool:
        self._looks -= 1
        return self._looks <= 0

    def __call__(self) -> Int32:
        return self._columns()


class NullDevice:
    """Draws columns, and checks that a row's pages hold exactly what the row has read and said."""

    def __init__(self, pages: int, *, lag: int = 0, rows: int = 1 << 20, tick: Callable[[], None] = lambda: None) -> None:
        self.lag = lag
        self.pool: PagePool | None = None  # set it to have writes to shared pages noticed
        self.lost: set[int] = set()  # seeds that failed with others
        self.complaints = Complaints()
        self._demand = self.complaints.demand
        self.calls = 0
        self._rows = rows
        self._tick = tick  # called at every call, for clocks that tests hold
        self._memory = np.zeros((pages, PAGE), np.int64)
        self._states: dict[int, _State] = {}

    def read(self, sequence: Sequence, block: Block) -> None:
        self.calls += 1
        self._tick()
        assert sequence.slot is not None
        self._demand(sequence.blocks[sequence.num_blocks] is block, "a block out of turn is read")
        if fault_of(sequence.utterance.seed) == "read" and block is sequence.blocks[-1]:
            raise RuntimeError("the device lost its mind")
        marks = [mark(column) for column in sequence.columns().T[: block.end]]
        self._check(sequence, marks[: block.start])
        for place in range(block.start, block.end):
            self._write(sequence, place, marks[place])

    def launch(self, rows: list[Sequence]) -> Result:
        self.calls += 1
        self._tick()
        self._demand(0 < len(rows) <= self._rows, "too many rows, or none")
        self._demand(len(set(rows)) == len(rows), "a row is there twice")
        self._demand(len({sequence.slot for sequence in rows}) == len(rows), "two rows in one slot")
        if any(fault_of(one.utterance.seed) == "launch" and one.launched == FAULT_FRAME for one in rows):
            raise RuntimeError("the device lost its mind")
        drawn = np.stack([self._step(sequence) for sequence in rows])
        kinds = [fault_of(one.utterance.seed) if one.launched == FAULT_FRAME else None for one in rows]
        if "landing" in kinds:
            runs = [sequence.run for sequence in rows]
            return NullResult(self.lag, lambda: self._crash(rows, runs))
        for row, kind in enumerate(kinds):
            if kind == "unsound":
                drawn[row, 0] = UNSOUND
        return NullResult(self.lag, lambda: drawn)

    def _crash(self, rows: list[Sequence], runs: list[int]) -> Int32:
        """Those for whom this step is of no use any more have lost nothing."""
        pairs = zip(rows, runs, strict=True)
        self.lost |= {one.utterance.seed for one, run in pairs if one.finished is None and one.run == run}
        raise RuntimeError("the device lost its mind")

    def _step(self, sequence: Sequence) -> Int32:
        state = self._enter(sequence)
        self._demand(len(state.marks) == sequence.position, "device and host disagree on a position")
        self._demand(state.frame == sequence.launched, "device and host disagree on a frame")
        state.marks.append(mark(state.last))
        self._write(sequence, sequence.position, state.marks[-1])
        self._check(sequence, state.marks)
        state.last = column(sequence.utterance.seed, state.frame)
        state.frame += 1
        return state.last

    def _enter(self, sequence: Sequence) -> _State:
        assert sequence.slot is not None
        self._demand(sequence.is_read, "a row whose prompt is not read")
        state = self._states.get(sequence.slot)
        if state is None or state.occupant != (sequence, sequence.run):
            columns = sequence.columns().T[: sequence.position + 1]
            state = _State((sequence, sequence.run), [mark(one) for one in columns[:-1]], columns[-1], sequence.launched)
            self._states[sequence.slot] = state
        return state

    def _write(self, sequence: Sequence, place: int, value: int) -> None:
        page = sequence.pages[place // PAGE]
        if self.pool is not None:
            self._demand(self.pool._holders[page] == 1, "a page that others read is written")
            self._demand(page not in self.pool._key_of, "a known page is written")
        self._memory[page, place % PAGE] = value

    def _check(self, sequence: Sequence, marks: list[int]) -> None:
        found = self._memory[sequence.pages].ravel()[: len(marks)]
        self._demand(found.tolist() == marks, "a row's pages hold something else")


class NullDecoding:
    """A call that is ready once somebody has asked so many times, or once its result is waited for."""

    def __init__(self, vocoder: NullVocoder, lag: int, sounds: list[bytes | None] | None) -> None:
        self._vocoder = vocoder
        self._lag = lag
        self._sounds = sounds

    @property
    def seconds(self) -> float | None:
        return None

    def ready(self) -> bool:
        self._vocoder.asked += 1
        self._lag -= 1
        return self._lag < 0

    def result(self) -> list[bytes | None]:
        self._vocoder.landed += 1
        if self._sounds is None:
            raise RuntimeError("the device lost its mind")
        return self._sounds


class NullVocoder:
    """Packs a frame's place in its stream and its codes; the place is the slot's state. Calls take `lag` looks."""

    def __init__(
        self, slots: int, quantum: int | None = None, tick: Callable[[], None] = lambda: None, *, lag: int = 0
    ) -> None:
        self.slots = slots
        self._tick = tick
        self._lag = lag
        self.asked = self.landed = 0
        self.quantum = quantum
        self.lost: set[int] = set()  # seeds that failed with others
        self.complaints = Complaints()
        self._demand = self.complaints.demand
        self.calls = 0
        self._places = [-1] * slots

    def reset(self, slot: int) -> None:
        self._places[slot] = 0

    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> NullDecoding:
        self.calls += 1
        self._tick()
        self._demand(0 < len(slots) == len(codes), "a call without streams, or codes that are not theirs")
        self._demand(len(set(slots)) == len(slots), "a slot is used twice in one call")
        if self.quantum is not None:
            self._demand(codes.shape == (1, BOOKS, self.quantum), "a call of another shape than the quantum's")
        faulty = [(int(seed), fault_of(int(seed)), int(codes[row, 1].max())) for row, seed in enumerate(codes[:, 0, 0])]
        if any(kind == "decode" and frame >= FAULT_FRAME for _, kind, frame in faulty):
            self.lost |= {seed for seed, _, _ in faulty}
            if self._lag:  # such a device tells its faults late
                return NullDecoding(self, self._lag, None)
            raise RuntimeError("the device lost its mind")
        made = [
            b"".join(sound(self._places[slot] + place, frame) for place, frame in enumerate(stream.T))
            for slot, stream in zip(slots, codes, strict=True)
        ]
        if keep:
            for slot in slots:
                self._places[slot] += codes.shape[2]
        sounds = [
            None if kind == "mute" and frame >= FAULT_FRAME else pcm
            for pcm, (_, kind, frame) in zip(made, faulty, strict=True)
        ]  # fmt: skip
        return NullDecoding(self, self._lag, sounds)


class NullEncoder:
    """A bounded line; a clip takes as many steps as it has samples, its code is that number."""

    def __init__(self, max_waiting: int = 4) -> None:
        self._line: deque[tuple[int, Future[Int32]]] = deque()
        self._max_waiting = max_waiting
        self._closed = False
        self._done = 0  # steps of the first

    @property
    def waiting(self) -> int:
        return len(self._line)

    def submit(self, wave: Float32) -> Future[Int32]:
        if self._closed:
            raise NotReady("closed")
        if len(self._line) >= self._max_waiting:
            raise Overloaded("full", retry_after_s=1.0)
        future: Future[Int32] = Future()
        self._line.append((len(wave), future))
        return future

    def step(self) -> bool:
        if not self._line:
            return False
        length, future = self._line[0]
        self._done += 1
        if self._done >= length:
            self._line.popleft()
            self._done = 0
            if future.set_running_or_notify_cancel():
                future.set_result(np.full((BOOKS, 1), length, np.int32))
        return True

    def close(self) -> None:
        self._closed = True
        while self._line:
            _, future = self._line.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(Aborted("closed"))


@dataclass(eq=False)
class Ear:
    """A channel without an event loop: notes what comes, and that nothing comes after the outcome."""

    pcm: bytearray = field(default_factory=bytearray)
    sizes: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    on_outcome: Callable[[], None] | None = None

    def put(self, item: Chunk | Outcome) -> None:
        assert self.outcome is None, "something comes after the outcome"
        if isinstance(item, Outcome):
            self.outcome = item
            if self.on_outcome is not None:
                self.on_outcome()
            return
        assert len(item.pcm) == FRAME_BYTES * item.num_frames
        assert item.num_frames > 0
        self.pcm += item.pcm
        self.sizes.append(item.num_frames)

    def wake(self) -> None:
        pass

    @property
    def error(self) -> DuettsError | None:
        return self.outcome.error if self.outcome is not None else None
