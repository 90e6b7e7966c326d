"""What an engine is put together from: the model's side as the loop sees it. No torch; a null model fits as well."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from duetts.engine.pages import Block
from duetts.engine.playout import ChunkPolicy
from duetts.engine.scheduler import Room
from duetts.engine.sequence import Sequence
from duetts.errors import DuettsError
from duetts.types import Float32, Int32

UNSOUND = -1  # the token of a row whose numbers were not finite
MAX_FAULTS = 3  # of a device in a row, nothing done between them: one can be a request's, so many are not

log = logging.getLogger(__name__)


class Faults:
    """Of one device: whether it has failed for good, as after a lasting CUDA fault. As a context it sees how that ends."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self.lasting = False

    def saw(self, error: BaseException | None) -> None:
        """What a call has ended with. Errors of our own and cancellations say nothing of a device."""
        if error is None:
            self._in_a_row = 0
        elif isinstance(error, Exception) and not isinstance(error, DuettsError):
            self._in_a_row += 1
            if self._in_a_row >= MAX_FAULTS and not self.lasting:
                log.error("the device has failed for good: %d times in a row, at last with", self._in_a_row, exc_info=error)
                self.lasting = True

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.saw(error)


class Result(Protocol):
    """A step under way. Call it for its columns int32 [rows, 1 + codebooks], token first (`UNSOUND`: the row failed)."""

    def ready(self) -> bool:
        """Whether a call comes back at once. Raises nothing: a fault is ready, too."""
        ...

    def __call__(self) -> Int32:
        """Waits, and raises what a device raises."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A step that was done when it was made."""

    columns: Int32

    def ready(self) -> bool:
        return True

    def __call__(self) -> Int32:
        return self.columns


class Device(Protocol):
    """The language model: `Runner`."""

    lag: int  # steps that may be under way when the next is launched

    def read(self, sequence: Sequence, block: Block) -> None:
        """A block of a prompt into the cache. Raises whatever a device raises."""
        ...

    def launch(self, rows: list[Sequence]) -> Result:
        """Starts drawing a frame of each row. After an error nothing has changed for any of them."""
        ...


class Decoding(Protocol):
    """A call of the codec's decoder that is under way."""

    @property
    def seconds(self) -> float | None:
        """How long the device worked on it, if somebody knows; asked after `result`."""
        ...

    def ready(self) -> bool:
        """Whether `result` comes at once. Raises nothing: a fault is ready, too."""
        ...

    def result(self) -> list[bytes | None]:
        """PCM of each stream, 16-bit little-endian, or None where samples are not finite. Waits, and raises what a device
        raises."""
        ...


@dataclass(frozen=True, slots=True)
class Decoded:
    """A call that was done when it was made."""

    sounds: list[bytes | None]
    seconds: float | None = None

    def ready(self) -> bool:
        return True

    def result(self) -> list[bytes | None]:
        return self.sounds


@dataclass(frozen=True, slots=True, eq=False)
class DecodeCall:
    """A call as it travels: codes [streams, codebooks, frames] of the streams in `slots`, of which `fresh` begin."""

    slots: list[int]
    fresh: list[int]
    codes: Int32
    keep: bool


class Vocoder(Protocol):
    """The codec's decoder with a number of stream slots: `CodecVocoder`, `GraphedVocoder`."""

    quantum: int | None  # frames that every call decodes, of one stream; None: any number, of many
    slots: int

    def reset(self, slot: int) -> None:
        """A new stream begins in a slot."""
        ...

    def start(self, slots: list[int], codes: Int32, *, keep: bool) -> Decoding:
        """Begins to decode codes [streams, codebooks, frames] of the streams in these slots. Calls end in the order in which
        they began, and a slot's calls go on from one another. Without `keep` the streams have not moved. Raises `NotReady`
        when it has gone away: then nothing of the call has begun.
        """
        ...


class Encoder(Protocol):
    """References to codes, a bounded block at a time: `ReferenceEncoder`."""

    @property
    def waiting(self) -> int:
        """Clips whose codes are not out."""
        ...

    def submit(self, wave: Float32) -> Future[Int32]:
        """From any thread. Raises `Overloaded` or `NotReady`."""
        ...

    def step(self) -> bool:
        """One block of one clip. False if there was nothing to do."""
        ...

    def close(self) -> None:
        """Ends what waits as aborted."""
        ...


class EncoderDriver(Protocol):
    """A thread that steps the encoder: `EncoderThread`."""

    @property
    def alive(self) -> bool:
        """Whether it still steps."""
        ...

    def close(self) -> None:
        """Ends what waits as aborted, then the thread."""
        ...


@dataclass(frozen=True, slots=True)
class Threads:
    """The codec and the encoder run beside the loop. `patient`: the codec's thread waits for calls under way, else they wake
    it."""

    encoder: EncoderDriver
    patient: bool = True


@dataclass(frozen=True, slots=True)
class Parts:
    """An engine's parts and measures. Without `threads` the loop does all the work, one piece after another. Threads of the
    loop and of the codec call `prepare` first."""

    device: Device
    vocoder: Vocoder
    encoder: Encoder
    room: Room
    num_pages: int
    end_id: int
    max_queue: int
    policy: ChunkPolicy
    max_line_s: float | None = None  # a listener who would wait longer to be let in is refused
    threads: Threads | None = None
    prepare: Callable[[], None] = lambda: None
