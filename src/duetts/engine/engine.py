"""The engine: a loop that chooses, runs and settles, and the one place where a request ends.

It knows token ids and codes. It never sees text, voices, files, formats or HTTP, and no tensors: those are the runner's, the
vocoder's and the encoder's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from duetts.engine.codec_worker import CodecWorker
from duetts.engine.pace import Pace
from duetts.engine.pages import Block, PagePool, pages_for
from duetts.engine.parts import UNSOUND, Faults, Parts, Result
from duetts.engine.playout import Playout
from duetts.engine.scheduler import Scheduler
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.errors import EngineFailure, NotReady, Overloaded
from duetts.types import FinishReason, Float32, Int32, Utterance

POLL_S = 1e-4  # between looks at what the device has done, while both a step and a codec call are under way

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step under way, and in which run its rows were."""

    rows: list[Sequence]
    runs: list[int]
    result: Result


class Engine:
    """One model on one device. `submit`, `cancel` and `encode` may be called from any thread.

    Tests drive an engine by hand: without `start` nothing runs until somebody calls `_turn`, at the times that `clock` gives.
    `effort` times steps where the clock also counts what the codec took meanwhile.
    """

    def __init__(
        self, parts: Parts, *, start: bool = True, clock: Callable[[], float] = time.monotonic,
        effort: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        assert pages_for(parts.room.length) <= parts.num_pages, f"{parts.num_pages} pages cannot hold one sequence"
        self._clock, self._effort = clock, effort or clock
        self._parts = parts
        self._device = parts.device
        self.pool = PagePool(parts.num_pages)
        self.pace = Pace()
        self._scheduler = Scheduler(parts.room, self.pool, self.pace)
        self._codec = CodecWorker(parts.vocoder, parts.policy, self.pace, self._settle, clock)
        self._flights: deque[_Flight] = deque()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._reading, self._stepping = Faults(), Faults()
        self._open = 0  # requests whose outcome is not out
        self._draining = False
        self._finished: Counter[str] = Counter()
        self._frames = self._steps = self._landed = self._rows = 0
        self._underruns = 0
        self._seconds_per_request = 1.0
        self._turned = clock()
        if parts.threads is not None:
            self._codec.start(parts.prepare, patient=parts.threads.patient)
        self._thread = threading.Thread(target=self._run, name="duetts-engine", daemon=True) if start else None
        if self._thread is not None:
            self._thread.start()

    # -- from any thread ---------------------------------------------------------------------------------------------

    def submit(self, utterance: Utterance, channel: Channel) -> Sequence:
        """Queues an utterance. Raises `Overloaded` when the line is full, but never for one that continues a request, and
        `NotReady` after `close`."""
        now = self._clock()
        playout = Playout(self._parts.room.frame_s)
        if utterance.continues:
            playout.began = now + utterance.lead_s
        blocks = [] if utterance.decode_only else self._scheduler.prepare(utterance)
        sequence = Sequence(utterance, channel, playout, blocks=blocks, submitted=now)
        needed = sequence.prompt_length + utterance.max_frames
        assert needed <= self._parts.room.length, f"{needed} positions are needed, a sequence has {self._parts.room.length}"
        with self._wake:
            if self._draining or not self._alive:
                raise NotReady("the engine takes nothing more")
            if not utterance.continues:
                self._check_room(utterance.streaming)
            self._open += 1
            begin = self._decode if utterance.decode_only else self._scheduler.add
            self._inbox.append(lambda: begin(sequence))
            self._wake.notify()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence as aborted before its next frame. Harmless if it has ended."""
        sequence.cancelled = True
        self._post(lambda: None)

    def encode(self, wave: Float32) -> Future[Int32]:
        """Codes int32 [codebooks, frames] of a mono signal [samples] at the codec rate. Raises as `submit` does."""
        if self._draining or not self._alive:
            raise NotReady("the engine takes nothing more")
        future = self._parts.encoder.submit(wave)
        self._post(lambda: None)
        return future

    def stats(self) -> dict[str, Any]:
        """Gauges and counters since the start: plain numbers, and `finished` by reason."""
        scheduler, pool = self._scheduler, self.pool
        now = self._clock()
        streams = [one.playout for one in list(scheduler.running) if one.streaming and one.playout.began is not None]
        return {
            "running": len(scheduler.running),
            "waiting": scheduler.num_waiting,
            "open": self._open,
            "encoding": self._parts.encoder.waiting,
            "decoding": self._codec.num_streams,
            "steps": self._steps,
            "frames": self._frames,
            "rows_per_step": self._rows / self._steps if self._steps else 0.0,
            "step_s": self.pace.step_s(1) or 0.0,
            "codec_frame_s": self.pace.codec_frame_s,
            "pages": pool.num_pages,
            "pages_used": pool.used,
            "pages_cached": pool.cached,
            "pages_evicted": pool.evicted,
            "prefix_positions_reused": scheduler.reused_positions,
            "preemptions": scheduler.preemptions,
            "smallest_buffer_s": min((playout.buffer_s(now) for playout in streams), default=0.0),
            "underruns": self._underruns,
            "finished": dict(self._finished),
            "stalled_s": 0.0 if scheduler.idle else now - self._turned,
            "alive": self._alive,
        }

    @property
    def codec_worker(self) -> CodecWorker:
        """For a vocoder that is elsewhere, which tells it what it can take."""
        return self._codec

    @property
    def _alive(self) -> bool:
        threads = self._parts.threads
        looping = self._thread is None or self._thread.is_alive()
        sound = not (self._reading.lasting or self._stepping.lasting)
        return looping and sound and self._codec.alive and (threads is None or threads.encoder.alive)

    def close(self) -> None:
        """Ends everything that runs as aborted, then stops the threads."""
        with self._wake:
            self._draining = True
            self._inbox.append(self._cancel_all)
            self._wake.notify()
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
        self._codec.close()
        (self._parts.threads or self._parts).encoder.close()

    def assert_idle(self) -> None:
        """With no request open, every slot of both parts is free and every page free or cached."""
        assert self._open == 0, f"{self._open} requests are open"
        self._scheduler.assert_idle()
        assert self._codec.idle, "the codec still holds streams"

    def _check_room(self, streaming: bool) -> None:
        slots, queue, limit_s = self._parts.room.slots, self._parts.max_queue, self._parts.max_line_s
        if self._open >= slots + queue:
            ahead = 1 + queue / slots  # how often every slot changes hands before a new one's turn
            wait_s = max(1.0, self._seconds_per_request * ahead)
            raise Overloaded(f"all {slots + queue} places are taken", retry_after_s=wait_s)
        line_s = self._scheduler.line_s
        if streaming and limit_s is not None and line_s > limit_s:
            wait_s = max(1.0, line_s - limit_s)
            raise Overloaded(f"a listener would wait for {line_s:.1f} s, {limit_s:g} s are allowed", retry_after_s=wait_s)

    def _post(self, message: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._parts.prepare()
            while self._turn():
                pass
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """After a fault of the loop itself: it takes nothing more, and nobody may wait for ever."""
        log.error("the engine's loop ends", exc_info=error)
        with self._wake:
            self._draining = True
        self._hear()
        for sequence in self._scheduler.everyone():
            sequence.fail(error)
            sequence.finished = "failed"
            self._codec.end(sequence)
        if self._parts.threads is None:
            self._codec.give_up(error)
            self._parts.encoder.close()

    def _hear(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _turn(self) -> bool:
        """Hears what is new, ends what must end, computes blocks and one frame. False when closed and empty."""
        with self._wake:
            self._wake.wait_for(self._has_work)
            if self._draining and not self._open:
                return False
        self._hear()
        self._end_due()
        self._advance()
        return True

    def _has_work(self) -> bool:
        if self._inbox or self._flights or not self._scheduler.idle or (self._draining and not self._open):
            return True
        return self._parts.threads is None and (self._codec.num_streams > 0 or self._parts.encoder.waiting > 0)

    def _has_only_audio(self) -> bool:
        """Nothing is left to do but what the codec has under way."""
        return not (self._inbox or self._flights or self._parts.encoder.waiting) and self._scheduler.idle

    def _cancel_all(self) -> None:
        for sequence in [*self._scheduler.everyone(), *self._codec.sequences()]:
            sequence.cancelled = True

    def _decode(self, sequence: Sequence) -> None:
        """Frames that are known go to the codec at once, and are all there are."""
        columns = list(sequence.utterance.prompt.T)
        for column in columns:
            sequence.keep(column)
        sequence.finished = "stop"
        self._codec.push([(sequence, column[1:]) for column in columns])
        self._codec.end(sequence)

    def _end_due(self) -> None:
        now = self._clock()
        for sequence in self._scheduler.everyone():
            reason = sequence.verdict(now)
            if reason is not None:
                self._finish(sequence, reason)

    def _advance(self) -> None:
        """Choose, run, settle: blocks of prompts, a frame of everybody whose turn it is, then the step before that one."""
        began, spent = self._clock(), self._effort()
        self._turned = began
        steps = self._landed
        blocks = self._scheduler.choose_blocks(began)
        reads = [self._read(sequence, block) for sequence, block in blocks]
        faults: list[Exception | None] = []
        rows = self._scheduler.choose_rows(self._clock())
        if rows:
            faults.append(self._launch(rows))
        landed = False
        while self._flights and (len(self._flights) > self._device.lag or not rows):
            faults.append(self._land(self._flights.popleft()))
            landed = True
        served = self._landed > steps
        _judge(self._reading, reads, served or None in reads)
        _judge(self._stepping, faults, served)
        timed = rows and landed and not blocks  # else it was not a step's time
        if timed:
            room = self._parts.room
            self.pace.saw_step(room.rows if room.padded else len(rows), self._effort() - spent)
        if self._parts.threads is None:
            self._codec.step(patient=self._has_only_audio())
        if timed:
            self._codec.made_s = (self._clock() - began) * max(1.0, len(self._scheduler.running) / len(rows))
        if self._parts.threads is None:
            self._parts.encoder.step()

    def _read(self, sequence: Sequence, block: Block) -> Exception | None:
        """A block into the cache. Gives the error that has failed its sequence, if one has."""
        try:
            self._device.read(sequence, block)
        except Exception as error:  # the next turn ends it, the loop goes on
            sequence.fail(error)
            return error
        self._scheduler.has_read(sequence, block)
        return None

    def _launch(self, rows: list[Sequence]) -> Exception | None:
        """Starts a step. If it cannot, each row is tried alone, so that only the one at fault is lost. Gives the error if none
        could be started."""
        try:
            result = self._device.launch(rows)
        except Exception as error:
            if len(rows) == 1:
                rows[0].fail(error)
                return error
            errors = [self._launch([sequence]) for sequence in rows]
            return None if None in errors else error
        now = self._clock()
        self._flights.append(_Flight(rows, [sequence.run for sequence in rows], result))
        self._steps += 1
        self._rows += len(rows)
        for sequence in rows:
            self._scheduler.has_launched(sequence, now)
        return None

    def _land(self, flight: _Flight) -> Exception | None:
        """Reads a step's frames: to the codec, and to their end those that have reached it. Gives the error that has failed
        them, if one has."""
        try:
            columns = self._wait_for(flight.result)
        except Exception as error:  # what a device reports late cannot be told apart by rows
            lost = [one for one, run in zip(flight.rows, flight.runs, strict=True) if one.finished is None and one.run == run]
            for sequence in lost:
                sequence.fail(error)
            return error if lost else None
        self._landed += 1
        now = self._clock()
        frames: list[tuple[Sequence, Int32]] = []
        ended: list[tuple[Sequence, FinishReason]] = []
        tokens = columns[:, 0].tolist()
        for sequence, run, token, column in zip(flight.rows, flight.runs, tokens, columns, strict=True):
            if sequence.finished is not None or sequence.run != run:
                continue  # one frame too many, or one that will be drawn again
            if sequence.read_at is None:
                sequence.read_at = now
            if token == UNSOUND:
                sequence.fail(EngineFailure("the model's numbers are not finite"))
            elif token == self._parts.end_id:
                ended.append((sequence, "stop"))
            elif sequence.settled < sequence.num_frames:
                assert np.array_equal(sequence.frames[sequence.settled], column), "a frame computed anew is not the same"
                sequence.settled += 1
            else:
                own = column.copy()  # the step's columns must not live as long as any of its rows
                sequence.keep(own)
                frames.append((sequence, own[1:]))
                if sequence.is_over:
                    ended.append((sequence, "length"))
        self._frames += len(frames)
        self._codec.push(frames)
        for sequence, reason in ended:
            self._finish(sequence, reason)
        return None

    def _wait_for(self, result: Result) -> Int32:
        """A step's columns. What the codec makes meanwhile is handed over at once, not when the step is done."""
        while self._parts.threads is None and self._codec.flying and not result.ready():
            if not self._codec.hand_over():
                time.sleep(POLL_S)
        return result()

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The one end of every sequence: frees its slot and pages and lets the codec send what is left. `_settle` follows."""
        sequence.finished = reason
        if sequence.streaming and sequence.admitted_at is not None and reason in ("stop", "length"):
            self.pace.saw_stay(self._clock() - sequence.admitted_at)
        self._scheduler.remove(sequence)
        self._codec.end(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """When the last audio is out: frees the place, counts the outcome and tells it."""
        outcome = sequence.outcome(self._clock())
        with self._wake:
            self._open -= 1
            self._finished[outcome.reason] += 1
            self._underruns += sequence.streaming and outcome.timings.worst_underrun_s > 0
            self._seconds_per_request += 0.1 * (outcome.timings.total_s - self._seconds_per_request)
            self._wake.notify()
        sequence.channel.put(outcome)
        sequence.channel.wake()


def _judge(device: Faults, errors: list[Exception | None], served: bool) -> None:
    """A turn in which somebody's work failed and nobody was served speaks against the device. Where others were served, what
    failed was a request's own."""
    error = next((one for one in errors if one is not None), None)
    if served or error is not None:
        device.saw(None if served else error)
