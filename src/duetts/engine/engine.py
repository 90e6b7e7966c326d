"""The engine: a loop on a thread of its own that admits, prefills and steps, and the one place where a request ends.

It knows token ids and codes. It never sees text, voices, files, formats or HTTP.
"""

from __future__ import annotations

import logging
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
from duetts.errors import DuettsError, EngineFailure, NotReady, Overloaded
from duetts.types import FinishReason, Float32, Int32, Utterance

log = logging.getLogger(__name__)


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
            on_failure=lambda sequence, error: self._post(lambda: self._fail(sequence, error)),
        )
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="duetts-encode", initializer=self._limit_threads)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._open = 0  # requests that have not ended
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
        with self._wake:
            if self._draining:
                raise NotReady("the engine is closing")
            places = self._config.max_num_seqs + self._config.max_queue
            if self._open >= places:
                rounds = 1 + self._config.max_queue / self._config.max_num_seqs
                wait = max(1.0, self._seconds_per_request * rounds)
                raise Overloaded(f"all {places} places are taken", retry_after_s=wait)
            self._open += 1
            self._inbox.append(lambda: self._scheduler.add(sequence))
            self._wake.notify()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence as aborted before its next frame. Harmless if it has ended."""
        sequence.cancelled = True
        self._post(lambda: None)

    def encode(self, wave: Float32) -> Future[Int32]:
        """Codes int32 [codebooks, frames] of a mono signal [samples] at the codec rate, computed beside the loop."""
        return self._encoder.submit(self._encode, wave)

    def stats(self) -> dict[str, Any]:
        """Gauges and counters since the start."""
        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "open": self._open,
            "steps": self._steps,
            "frames": self._frames,
            "finished": dict(self._finished),
            "alive": self._thread.is_alive(),
        }

    def close(self) -> None:
        """Ends everything that runs as aborted, then stops the threads."""
        with self._wake:
            self._draining = True
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
        while True:
            with self._wake:
                # While closing, the codec may still have to report a failure: look again until it holds nothing.
                self._wake.wait_for(
                    lambda: self._inbox or not self._scheduler.idle or (self._draining and self._codec.idle),
                    timeout=0.02 if self._draining else None,
                )
                messages = list(self._inbox)
                self._inbox.clear()
            for message in messages:
                message()
            if self._draining:
                for sequence in self._scheduler.everyone():
                    sequence.cancelled = True
            self._end_due()
            if self._draining and self._scheduler.idle and not self._inbox and self._codec.idle:
                return
            self._advance()

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
        """Runs device work for some sequences; if it fails, they fail and the loop goes on."""
        try:
            work()
        except Exception as error:
            for sequence in group:
                self._fail(sequence, error)

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

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        log.error("request %s failed", sequence.utterance.request_id, exc_info=error)
        known = error if isinstance(error, DuettsError) else EngineFailure(f"a step failed: {type(error).__name__}")
        sequence.failure = sequence.failure or known
        if sequence.finished in (None, "stop", "length"):
            self._finish(sequence, "failed")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The one end of every request: frees its slot, counts it, and lets the codec send what is left and the outcome."""
        first = sequence.finished is None
        sequence.finished = reason
        if first:
            self._scheduler.remove(sequence)
            self._finished[reason] += 1
            taken = time.monotonic() - sequence.submitted
            self._seconds_per_request += 0.1 * (taken - self._seconds_per_request)
            with self._wake:
                self._open -= 1
        self._codec.end(sequence)

    def _post(self, message: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _limit_threads(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)

    @torch.inference_mode()
    def _encode(self, wave: Float32) -> Int32:
        samples = torch.from_numpy(wave).to(self._device, next(self._model.codec.parameters()).dtype)
        codes: Int32 = self._model.codec.encode(samples[None])[0].to("cpu", torch.int32).numpy()
        return codes
