"""What is spoken now, and how the last requests ended: the one place that every door tells. A speech by its id.

Ids are the server's own (`X-Speech-Id`); nothing here knows a client's.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from fastapi import APIRouter

from duetts.audio.output import OutputStream
from duetts.errors import Aborted, Cancelled, NotReady, Overloaded, UnknownSpeech
from duetts.server.caller import Caller
from duetts.server.errors import error_object
from duetts.server.metrics import Metrics
from duetts.server.peers import Peers
from duetts.types import Int32, Speech

KEPT = 1024
OWNER = re.compile(r"[a-z-]+-([a-z0-9]+)-[0-9a-f]{32}(?:-[0-9]+)*")  # of several servers, in an id


class Outcomes:
    """Used from one event loop. `counts` has how many ended for each reason: stop, length, failed, timeout, and for those that
    were broken off client_disconnect, cancelled or draining."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.metrics = metrics or Metrics()
        self.counts: Counter[str] = Counter()
        self._running: dict[str, Caller] = {}
        self._ended: OrderedDict[str, dict[str, Any]] = OrderedDict()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def begin(self, speech_id: str, caller: Caller, *, listened: bool = False) -> Entry:
        """Notes a request before anything is done for it; `listened` to while it is made. Call the entry's `end`, always."""
        assert speech_id not in self._running, "an id is the server's own, and new"
        self._running[speech_id] = caller
        return Entry(self, speech_id, caller, listened)

    def cancel(self, speech_id: str) -> dict[str, Any]:
        """Ends a speech if it still runs. Raises `UnknownSpeech`."""
        if speech_id in self._running:
            self._running[speech_id].leave(Cancelled("the speech was cancelled by its id"))
            return {"request_id": speech_id, "object": "audio.speech.cancelled", "cancelled": True}
        return {**self.ended(speech_id), "object": "audio.speech.cancelled", "cancelled": False}

    def ended(self, speech_id: str) -> dict[str, Any]:
        """How a speech ended. Raises `UnknownSpeech` before its end, and when it is no longer kept."""
        if speech_id not in self._ended:
            raise UnknownSpeech(f"no speech of this id has ended here, or it is not among the last {KEPT}")
        return self._ended[speech_id]

    def reason(self, speech_id: str) -> str:
        """How a speech ended, in a word: "stop", "length" or the code of its error; empty if nothing is known of it."""
        ended = self._ended.get(speech_id, {})
        return str((ended.get("error") or {}).get("code") or ended.get("finish_reason", ""))

    def keep(self, speech_id: str, label: str, outcome: dict[str, Any]) -> None:
        self.counts[label] += 1
        self._ended[speech_id] = outcome
        while len(self._ended) > KEPT:
            self._ended.popitem(last=False)

    def forget(self, speech_id: str) -> None:
        """No longer running."""
        self._running.pop(speech_id)


@dataclass(slots=True)
class Entry:
    """A request that is under way: what is known of it so far."""

    outcomes: Outcomes
    speech_id: str
    caller: Caller
    listened: bool = False
    speech: Speech | None = None
    output: OutputStream | None = None
    codes: list[Int32] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    first_audio_s: float = 0.0
    last_chunk: float = 0.0

    def take(self, codes: Int32) -> None:
        """The next chunk is there."""
        now = time.perf_counter()
        if not self.codes:
            self.first_audio_s = now - self.began
        elif self.listened:
            self.outcomes.metrics.gap_s.observe(now - self.last_chunk)
        self.last_chunk = now
        self.codes.append(codes)

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Has the signature of an `__exit__`. What was refused before it began is not kept."""
        self.outcomes.forget(self.speech_id)
        speech, outcome = self.speech, self.speech.outcome if self.speech is not None else None
        if error is None and outcome is not None:
            error = outcome.error
        elif error is None or not isinstance(error, Exception):  # closed in its midst, or its task was
            error = self.caller.reason or Aborted("the request was ended")
        if isinstance(error, Overloaded | NotReady) or (speech is None and not isinstance(error, Aborted)):
            return
        told = None if error is None else error_object(error)
        reason = "aborted" if isinstance(error, Aborted) else outcome.reason if outcome and outcome.error is error else "failed"
        self.outcomes.keep(
            self.speech_id,
            told["code"] if told and reason == "aborted" else reason,
            {
                "request_id": self.speech_id,
                "object": "audio.speech.outcome",
                "finish_reason": reason,
                "usage": None if speech is None else usage_of(speech, sum(block.shape[1] for block in self.codes)),
                "duration": 0.0 if self.output is None else round(self.output.duration_s, 6),
                "pieces": None if outcome is None else asdict(outcome.pieces),
                "error": told,
            },
        )
        duration_s = 0.0 if self.output is None else self.output.duration_s
        ended = told["code"] if told else reason
        self.outcomes.metrics.ended(ended, outcome, duration_s, self.listened, self.first_audio_s)


def usage_of(speech: Speech, num_frames: int) -> dict[str, Any]:
    """OpenAI's usage object; tokens of output are frames."""
    audio_tokens = speech.input_audio_tokens
    return {
        "input_tokens": speech.input_tokens,
        "output_tokens": num_frames,
        "total_tokens": speech.input_tokens + num_frames,
        "input_token_details": {"text_tokens": speech.input_tokens - audio_tokens, "audio_tokens": audio_tokens},
    }


def outcomes_router(outcomes: Outcomes, peers: Peers | None = None) -> APIRouter:
    """A speech by its id."""
    router = APIRouter()

    async def ask(speech_id: str, cancel: bool) -> dict[str, Any]:
        """Of the server that has given the id, and of no other."""
        named = OWNER.fullmatch(speech_id)
        if peers and named and named[1] != peers.name and (told := await peers.ask(named[1], speech_id, cancel)):
            return told
        return outcomes.cancel(speech_id) if cancel else outcomes.ended(speech_id)

    @router.get("/v1/audio/speech/{speech_id}")
    async def outcome(speech_id: str) -> dict[str, Any]:
        """How a speech ended. Its id was in the header X-Speech-Id."""
        return await ask(speech_id, cancel=False)

    @router.delete("/v1/audio/speech/{speech_id}")
    async def cancel(speech_id: str) -> dict[str, Any]:
        """End a speech that is still made. `cancelled` is false if it had ended."""
        return await ask(speech_id, cancel=True)

    return router
