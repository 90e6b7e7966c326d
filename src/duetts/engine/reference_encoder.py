"""Reference clips to codes beside running speech: one bounded block of one clip at a time, whoever drives it.

Every block has the same number of frames, the last one padded with zeros and cut, so on a CPU a clip's codes depend on
nothing else. It knows samples and codes, no text and no files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from duetts.engine.parts import Faults
from duetts.errors import Aborted, EngineFailure, NotReady, Overloaded
from duetts.models.codec import Codec
from duetts.types import Float32, Int32

log = logging.getLogger(__name__)

# Frames in a block, measured (docs/performance-log.md). On a CPU larger ones gain little. On a GPU without graphs every block
# takes 19 ms to launch, up to this size.
CPU_BLOCK, GPU_BLOCK = 16, 108
OLDEST_EVERY = 4  # every so many blocks the oldest clip is served, however long it is
NOT_FINITE = -1  # stands in the codes for a frame that came to no number


@dataclass(eq=False, slots=True)
class _Job:
    """A clip in the line, its samples and the codes [codebooks, block] of its blocks so far. Once begun it has a slot."""

    wave: Float32
    num_blocks: int
    future: Future[Int32]
    blocks: list[Tensor] = field(default_factory=list)
    slot: int | None = None

    @property
    def blocks_left(self) -> int:
        return self.num_blocks - len(self.blocks)


@dataclass(eq=False, slots=True)
class _Answer:
    """Codes of a clip on their way to host memory; they are there when the event has happened."""

    job: _Job
    codes: Tensor
    arrived: torch.cuda.Event | None

    @property
    def has_arrived(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]


class ReferenceEncoder:
    """Owns the line of clips and the encoder's state slots. One thread calls `step` and `wait`, any the rest.

    The clip with the fewest blocks left goes first, so that a short one does not wait for a long one; every fourth block is
    the oldest clip's, and one slot is kept for it, so that none waits for ever. A future that is cancelled before its first
    block leaves the line; from then on it cannot be cancelled, since callers that come back later want what was begun.
    On a GPU a step neither waits for the device nor reads from it; all steps must be issued on the same stream.
    """

    def __init__(
        self, codec: Codec, *, max_waiting: int, block_frames: int | None = None, slots: int = 4,
        on_work: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`on_work` is called on the submitting thread after a clip joined the line, to wake whoever calls `step`."""
        self._codec = codec
        self._device = codec.quantizer.pre_module.norm.weight.device
        self._dtype = codec.quantizer.pre_module.norm.weight.dtype
        self._block_frames = block_frames or (CPU_BLOCK if self._device.type == "cpu" else GPU_BLOCK)
        self._block_samples = self._block_frames * codec.config.frame_length
        self._state = codec.new_encoder_state(slots)
        self._views = [self._state.view([slot]) for slot in range(slots)]  # made once: making one copies to the device
        self._free = list(range(slots))
        self._max_waiting = max_waiting
        self._on_work = on_work
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []  # the oldest first
        self._answers: list[_Answer] = []
        self._closed = False
        self._turn = 0
        self._faults = Faults()
        self._last_step: float | None = None  # seconds, while blocks follow each other
        self._seconds_per_block = 0.1
        self.num_blocks = 0
        self.num_clips = 0

    # -- from any thread ---------------------------------------------------------------------------------------------

    def submit(self, wave: Float32) -> Future[Int32]:
        """Codes int32 [codebooks, frames] of a mono signal [samples] at the codec rate.

        Raises `Overloaded` when the line is full, `NotReady` after `close`. The future fails with `EngineFailure` or `Aborted`.
        """
        assert len(wave) > 0, "a reference has at least one sample"
        job = _Job(np.array(wave, np.float32), -(-len(wave) // self._block_samples), Future())
        with self._changed:
            if self._closed:
                raise NotReady("the engine takes no more references")
            self._drop_cancelled()
            if len(self._jobs) >= self._max_waiting:
                left = sum(waiting.blocks_left for waiting in self._jobs)
                raise Overloaded(
                    f"{len(self._jobs)} references wait to be encoded", retry_after_s=max(1.0, left * self._seconds_per_block)
                )
            if not self._jobs:
                self._last_step = None  # the time since then was idle
            self._jobs.append(job)
            self._changed.notify()
        self._on_work()
        return job.future

    @property
    def waiting(self) -> int:
        """Clips whose codes are not out."""
        with self._changed:
            return len(self._jobs) + len(self._answers)

    @property
    def idle(self) -> bool:
        """Nothing waits and every slot is free."""
        with self._changed:
            return not self._jobs and not self._answers and len(self._free) == self._state.num_slots

    def close(self) -> None:
        """Takes no more and ends all that wait as aborted. Waits for nothing."""
        with self._changed:
            self._closed = True
            jobs = [*self._jobs, *(answer.job for answer in self._answers)]
            self._free += [job.slot for job in self._jobs if job.slot is not None]
            self._jobs, self._answers = [], []
            self._changed.notify()
        for job in jobs:
            if job.slot is not None or job.future.set_running_or_notify_cancel():
                job.future.set_exception(Aborted("the engine is closing"))

    # -- the one thread ----------------------------------------------------------------------------------------------

    def wait(self) -> bool:
        """Blocks until `step` has something to do. False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._jobs or self._answers)
            return not self._closed

    @torch.inference_mode()
    def step(self) -> bool:
        """Encodes one block of one clip, and hands out what is complete. False if there was nothing to do.

        A block that fails ends its clip only. Such failures are torch's own; any other is a fault of this program: it goes on
        to the caller, whose end must call `close`. So does the failure of a device that fails again and again.
        """
        job = self._choose()
        if job is not None:
            try:
                with self._faults:
                    self._encode_block(job)
            except RuntimeError as error:
                if self._faults.lasting:
                    raise
                self._fail(job, error)
        return self._hand_out() or job is not None

    def _choose(self) -> _Job | None:
        """Whose block is next, with a slot to go on in."""
        with self._changed:
            self._drop_cancelled()
            self._clock()
            while self._jobs:
                oldest = self._jobs[0]
                kept = 1 if oldest.slot is None else 0
                able = [job for job in self._jobs if job is oldest or job.slot is not None or len(self._free) > kept]
                turn_of_oldest = self._turn % OLDEST_EVERY == OLDEST_EVERY - 1
                job = oldest if turn_of_oldest else min(able, key=lambda each: each.blocks_left)
                if job.slot is None:
                    if not job.future.set_running_or_notify_cancel():
                        self._jobs.remove(job)
                        continue
                    job.slot = self._free.pop()
                    self._state.reset(job.slot)
                self._turn += 1
                return job
            return None

    def _encode_block(self, job: _Job) -> None:
        assert job.slot is not None, "a block of a clip without a slot"
        start = len(job.blocks) * self._block_samples
        part = torch.from_numpy(job.wave[start : start + self._block_samples])
        part = F.pad(part, (0, self._block_samples - len(part)))
        if self._device.type == "cuda":
            part = part.pin_memory()  # else the copy would wait for the device
        wave = part.to(self._device, self._dtype, non_blocking=True)
        z = self._codec.latents(wave[None], self._views[job.slot])
        codes = self._codec.quantizer.search(z)[0]
        job.blocks.append(codes.where(z[0].isfinite().all(dim=0), NOT_FINITE))
        self.num_blocks += 1
        if job.blocks_left == 0:
            self._send(job)

    def _send(self, job: _Job) -> None:
        """Starts the way of a complete clip's codes to the host; its slot is free."""
        num_frames = -(-len(job.wave) // self._codec.config.frame_length)
        codes = torch.cat(job.blocks, dim=1)[:, :num_frames].to(torch.int32)
        arrived = None
        if self._device.type == "cuda":
            codes = torch.empty(codes.shape, dtype=codes.dtype, pin_memory=True).copy_(codes, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        with self._changed:
            if self._take(job):
                self._answers.append(_Answer(job, codes, arrived))

    def _hand_out(self) -> bool:
        """Resolves what has arrived. True if anything was on its way."""
        with self._changed:
            answers = self._answers
            arrived = [answer for answer in answers if answer.has_arrived]
            self._answers = [answer for answer in answers if answer not in arrived]
        for answer in arrived:
            codes = answer.codes.numpy()
            if (codes == NOT_FINITE).any():
                answer.job.future.set_exception(EngineFailure("the codec's encoder gave values that are not finite"))
            else:
                self.num_clips += 1
                answer.job.future.set_result(codes)
        return bool(answers)

    def _fail(self, job: _Job, error: RuntimeError) -> None:
        log.error("a reference could not be encoded", exc_info=error)
        with self._changed:
            if not self._take(job):
                return
        job.future.set_exception(EngineFailure(f"a reference could not be encoded: {type(error).__name__}"))

    def _take(self, job: _Job) -> bool:
        """Takes a begun job out of the line, unless `close` was first: who takes it out resolves it. Holds the lock."""
        if job not in self._jobs:
            return False
        self._jobs.remove(job)
        assert job.slot is not None, "a job without a slot has not begun"
        self._free.append(job.slot)
        return True

    def _drop_cancelled(self) -> None:
        """Holds the lock."""
        for job in [job for job in self._jobs if job.future.cancelled()]:
            job.future.set_running_or_notify_cancel()  # tells those who wait for several futures
            self._jobs.remove(job)

    def _clock(self) -> None:
        """Follows the seconds from block to block, whatever runs between them, for honest retry times. Holds the lock."""
        now = time.monotonic()
        if self._last_step is not None:
            self._seconds_per_block += 0.1 * (now - self._last_step - self._seconds_per_block)
        self._last_step = now if self._jobs else None


class EncoderThread:
    """Drives an encoder on a thread of its own: for a CPU, where a block takes longer than a frame."""

    def __init__(self, encoder: ReferenceEncoder, num_threads: int) -> None:
        self._encoder = encoder
        self._num_threads = num_threads
        self._thread = threading.Thread(target=self._run, name="duetts-encode", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends what waits as aborted and stops the thread after its block."""
        self._encoder.close()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while self._encoder.wait():
                self._encoder.step()
        finally:  # whatever went wrong, nobody may wait for ever
            self._encoder.close()
