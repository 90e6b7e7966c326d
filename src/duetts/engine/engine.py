"""The engine: a loop on a thread of its own that admits, prefills and steps, and the one place where a request ends.

It knows token ids and codes. It never sees text, voices, files, formats or HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from duetts.checkpoint import Model
from duetts.config import EngineConfig
from duetts.engine.codec_worker import CodecWorker
from duetts.engine.runner import Runner
from duetts.engine.scheduler import Scheduler
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.errors import Aborted, NotReady, Overloaded
from duetts.types import FinishReason, Float32, Int32, Utterance


class Engine:
    """One model on one device. `submit`, `cancel` and `encode` may be called from any thread."""

    def __init__(self, model: Model, config: EngineConfig, max_model_len: int) -> None:
        self._model = model
        self._config = config
        self._device = model.dual_ar.slow.embeddings.weight.device
        self._runner = Runner(model.dual_ar, config, max_model_len)
        self._scheduler = Scheduler(config.max_num_seqs, self._runner.rows)
        self._threads = config.cpu_threads if self._device.type == "cpu" else None
        self._codec = CodecWorker(
            model.codec,
            slots=2 * config.max_num_seqs,
            quantum=config.codec_quantum,
            threads=self._threads,
            on_end=self._settle,
        )
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="duetts-encode", initializer=self._limit_threads)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._max_model_len = max_model_len
        self._open = 0  # requests whose outcome is not out
        self._encoding = 0  # references that wait or are being encoded
        self._draining = False
        self._finished: Counter[str] = Counter()
        self._frames = 0
        self._steps = 0
        self._seconds_per_request = 1.0
        self._thread = threading.Thread(target=self._run, name="duetts-engine", daemon=True)
        self._thread.start()

    # -- from any thread ---------------------------------------------------------------------------------------------

    def submit(self, utterance: Utterance, channel: Channel) -> Sequence:
        """Queues an utterance. Raises `Overloaded` when the line is full, `NotReady` after `close`."""
        sequence = Sequence(utterance, channel)
        needed = sequence.prompt_length + utterance.max_frames
        assert needed <= self._max_model_len, f"{needed} positions are needed, the cache has {self._max_model_len}"
        with self._wake:
            self._check_room(self._open)
            self._open += 1
            self._inbox.append(lambda: self._scheduler.add(sequence))
            self._wake.notify()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence as aborted before its next frame. Harmless if it has ended."""
        sequence.cancelled = True
        self._post(lambda: None)

    def encode(self, wave: Float32) -> Future[Int32]:
        """Codes int32 [codebooks, frames] of a mono signal [samples] at the codec rate, computed beside the loop.

        Raises as `submit` does: the line of references is as long as that of utterances.
        """
        with self._wake:
            self._check_room(self._encoding)
            self._encoding += 1
            future = self._encoder.submit(self._encode, wave)
        future.add_done_callback(self._encoded)
        return future

    def _encoded(self, _: Future[Int32]) -> None:
        with self._wake:
            self._encoding -= 1

    def _check_room(self, taken: int) -> None:
        if self._draining:
            raise NotReady("the engine takes nothing more")
        places = self._config.max_num_seqs + self._config.max_queue
        if taken >= places:
            rounds = 1 + self._config.max_queue / self._config.max_num_seqs
            wait = max(1.0, self._seconds_per_request * rounds)
            raise Overloaded(f"all {places} places are taken", retry_after_s=wait)

    def stats(self) -> dict[str, Any]:
        """Gauges and counters since the start."""
        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "open": self._open,
            "steps": self._steps,
            "frames": self._frames,
            "finished": dict(self._finished),
            "alive": self._thread.is_alive() and self._codec.alive,
        }

    def close(self) -> None:
        """Ends everything that runs as aborted, then stops the threads."""
        with self._wake:
            self._draining = True
            self._inbox.append(self._cancel_all)
            self._wake.notify()
        self._thread.join()
        self._codec.close()
        self._encoder.shutdown()

    def assert_idle(self) -> None:
        """With no request open, every slot of both parts is free."""
        assert self._open == 0, f"{self._open} requests are open"
        self._scheduler.assert_idle()
        assert self._codec.idle, "the codec still holds streams"

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._limit_threads()
        try:
            while self._turn():
                pass
        except Exception as error:  # a fault of the loop itself: it takes nothing more, and nobody may wait for ever
            with self._wake:
                self._draining = True
                messages = list(self._inbox)
            for message in messages:
                message()
            for sequence in self._scheduler.everyone():
                sequence.fail(error)
                sequence.finished = "failed"
                self._codec.end(sequence)

    def _turn(self) -> bool:
        """Hears what is new, ends what must end, and computes one block and one frame. False when closed and empty."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or not self._scheduler.idle or (self._draining and not self._open))
            messages = list(self._inbox)
            self._inbox.clear()
            if self._draining and not self._open:
                return False
        for message in messages:
            message()
        self._end_due()
        self._advance()
        return True

    def _cancel_all(self) -> None:
        for sequence in [*self._scheduler.everyone(), *self._codec.sequences()]:
            sequence.cancelled = True

    def _end_due(self) -> None:
        now = time.monotonic()
        for sequence in self._scheduler.everyone():
            reason = sequence.verdict(now)
            if reason is not None:
                self._finish(sequence, reason)

    def _advance(self) -> None:
        """One block of one prompt, then one frame of everybody whose prompt is read."""
        self._scheduler.admit(time.monotonic())
        waiting = self._scheduler.next_prefill()
        if waiting is not None:
            self._guarded([waiting], partial(self._runner.prefill, waiting))
        for group in self._scheduler.step_groups():
            self._guarded(group, partial(self._step, group))

    def _guarded(self, group: list[Sequence], work: Callable[[], None]) -> None:
        """Runs device work for some sequences; if it fails, the next turn ends them and the loop goes on."""
        try:
            work()
        except Exception as error:
            for sequence in group:
                sequence.fail(error)

    def _step(self, group: list[Sequence]) -> None:
        columns = self._runner.step(group)
        self._steps += 1
        now = time.monotonic()
        end = self._model.config.end_id
        for sequence, column in zip(group, columns, strict=True):
            if sequence.read_at is None:
                sequence.read_at = now
            if column[0] == end:
                self._finish(sequence, "stop")
                continue
            sequence.num_frames += 1
            self._frames += 1
            self._codec.push(sequence, column[1:].copy())
            if sequence.num_frames >= sequence.utterance.max_frames:
                self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The one end of every sequence: frees its slot and lets the codec send what is left. `_settle` follows."""
        sequence.finished = reason
        self._scheduler.remove(sequence)
        self._codec.end(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """On the codec's thread, when the last audio is out: frees the place, counts the outcome and tells it."""
        outcome = sequence.outcome()
        with self._wake:
            self._open -= 1
            self._finished[outcome.reason] += 1
            self._seconds_per_request += 0.1 * (outcome.timings.total_s - self._seconds_per_request)
            self._wake.notify()
        sequence.channel.put(outcome)

    def _post(self, message: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _limit_threads(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)

    @torch.inference_mode()
    def _encode(self, wave: Float32) -> Int32:
        if self._draining:
            raise Aborted("the engine is closing")
        samples = torch.from_numpy(wave).to(self._device, next(self._model.codec.parameters()).dtype)
        codes: Int32 = self._model.codec.encode(samples[None])[0].to("cpu", torch.int32).numpy()
        return codes
