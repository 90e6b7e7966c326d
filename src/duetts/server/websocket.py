"""WS /v1/audio/speech/stream: text in, audio out, in messages of JSON and frames of bytes.

One task reads: it keeps the text that has come and cuts it into sentences. Another one speaks them, one after another, each as
what follows the one before in the same utterance. Every sentence is a file of its own, between its `audio.start` and
`audio.done`. A sentence that cannot be spoken is told of, and the session goes on.
"""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, WebSocket

from duetts.config import ServerConfig
from duetts.errors import CallerLeft, Cancelled, DuettsError, InvalidRequest, NotReady, Overloaded
from duetts.server.body import parse_object
from duetts.server.caller import Caller
from duetts.server.errors import error_object
from duetts.server.frames import FIRST_LATE, IDLE, INTERNAL, LARGE_BYTES, REFUSED, TOO_BIG, Closing, Frames, converse
from duetts.server.outcomes import Outcomes
from duetts.server.rendition import Rendition
from duetts.server.schemas import SpeechOrder, check_type, read_order
from duetts.service import Arriving, SpeechService
from duetts.types import Granularity, Said

CHUNK_LENGTH = 300  # UTF-8 bytes of text that is spoken although no sentence has ended
FRAME_BYTES = 256 << 10  # of binary messages: the most usual client takes no more than 1 MiB in one
PROBE = "Hello."  # a text that fits, to check everything else with
GRANULARITIES: dict[str, Granularity] = {"none": "none", "sentence": "sentence", "clause": "clause"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What `session.config` says. `order` is that of a sentence but for its text. `as_bytes`: audio in binary messages."""

    order: SpeechOrder
    granularity: Granularity
    as_bytes: bool

    @property
    def streams(self) -> bool:
        return self.order.delivery == "audio"

    @property
    def most(self) -> int:
        return self.order.request.chunk_length or CHUNK_LENGTH


@dataclass(frozen=True, slots=True)
class Job:
    """A sentence that is to be spoken, or without a text the end of an utterance."""

    utterance: int
    settings: Settings
    text: str | None = None


@dataclass(slots=True)
class Spoken:
    """What of an utterance was spoken so far."""

    num_sentences: int = 0
    num_bytes: int = 0
    duration_s: float = 0.0
    said: Said | None = None


def socket_router(service: SpeechService, config: ServerConfig, outcomes: Outcomes) -> APIRouter:
    """The route of the socket."""
    router = APIRouter()

    @router.websocket("/v1/audio/speech/stream")
    async def stream(socket: WebSocket) -> None:
        session_id = socket.state.speech_id.replace("speech-", "session-", 1)
        async with Frames(socket, config.limits.max_body_bytes) as frames:
            session = Session(frames, service, config, outcomes, session_id)
            await session.configure_first()
            await converse(frames, session.read(), session.speak(), session.finish, session.leave)

    return router


class Session:
    """One connection, from its first message to its last."""

    def __init__(
        self, frames: Frames, service: SpeechService, config: ServerConfig, outcomes: Outcomes, session_id: str
    ) -> None:
        self._frames, self._service, self._config, self._outcomes = frames, service, config, outcomes
        self._id = session_id
        self._settings: Settings | None = None
        self._text: Arriving | None = None  # of the utterance that is open, if one is
        self._utterance = 0  # the one that is open, or else the next
        self._dropping = False  # the rest of an utterance that was not allowed to begin
        self._cancelled = -1  # the last utterance that nobody wants any more
        self._jobs: asyncio.Queue[Job | None] = asyncio.Queue()
        self._waiting = 0  # characters in jobs
        self._current: Caller | None = None  # of the sentence that is spoken now
        self._spoken = Spoken()
        self._busy = False
        self._active_at = time.monotonic()

    # -- messages ----------------------------------------------------------------------------------------------------

    async def configure_first(self) -> None:
        """The handshake. A fault in it ends the session."""
        limit_s = self._config.limits.socket_first_s
        try:
            message = self._parse(await self._frames.next(limit_s))
            if message.get("type") != "session.config":
                raise InvalidRequest("the first message must be session.config", field="type")
            await self._configure(message)
        except TimeoutError:
            raise Closing(FIRST_LATE, f"no session.config came within {limit_s:g} s") from None
        except (CallerLeft, Closing):
            raise
        except DuettsError as error:
            await self._tell_error(error)
            raise Closing(REFUSED if isinstance(error, InvalidRequest) else INTERNAL, str(error)) from None

    async def read(self) -> None:
        """Takes messages until `session.close`."""
        limits = self._config.limits
        while True:
            idle_s = 0.0 if self._busy or not self._jobs.empty() else time.monotonic() - self._active_at
            if idle_s >= limits.socket_idle_s:
                raise Closing(IDLE, f"nothing has happened for {limits.socket_idle_s:g} s")
            try:
                raw = await self._frames.next(limits.socket_idle_s - idle_s)
            except TimeoutError:
                continue
            self._active_at = time.monotonic()
            try:
                message = self._parse(raw)
                if message.get("type") == "session.close":
                    return
                await self._take(message)
            except (CallerLeft, Closing):
                raise
            except DuettsError as error:
                await self._tell_error(error)

    def _parse(self, raw: str | bytes) -> dict[str, Any]:
        if isinstance(raw, bytes):
            raise InvalidRequest("messages must be text", field=None, code="invalid_type")
        if len(raw) > LARGE_BYTES and '"session.config"' not in raw:
            raise Closing(TOO_BIG, f"a message may have at most {LARGE_BYTES} bytes")
        message = parse_object(raw.encode("utf-8", "surrogatepass"), "the message")
        check_type("type", message.get("type"), ("string",))
        return message

    async def _take(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "input.text":
                self._add(message.get("text"))
            case "input.flush":
                self._queue(self._text.flush() if self._text else [])
            case "input.done":
                await self._end_utterance()
            case "input.cancel":
                self._cancel()
            case "session.config":
                await self._configure(message)
            case "ping":
                await self._frames.send({"type": "pong"})
            case other:
                raise InvalidRequest(f"messages of type {other[:64]!r} are not known", field="type")

    async def _configure(self, message: dict[str, Any]) -> None:
        """New settings for the utterances that follow. They are checked completely, and clips are encoded."""
        if self._text is not None:
            raise InvalidRequest("session.config may come between utterances only; input.done ends one", field="type")
        if self._settings is not None:
            self._frames.take()
        settings = self._read_settings({name: value for name, value in message.items() if name != "type"})
        request = replace(settings.order.request, text=PROBE)
        speech = await self._frames.caller.unless_gone(self._service.start(request))
        await speech.aclose()
        self._settings = settings
        order = settings.order
        told = {
            "session_id": self._id, "response_format": order.output.format, "sample_rate": order.output.sample_rate,
            "stream_audio": settings.streams, "split_granularity": settings.granularity, "binary": settings.as_bytes,
            "model": order.model, "voice": speech.voice, "ignored_fields": list(order.ignored),
        }  # fmt: skip
        await self._frames.send({"type": "session.configured", **told})

    def _read_settings(self, fields: dict[str, Any]) -> Settings:
        given = {name: value for name, value in fields.items() if value is not None}
        for name in ("input", "stream", "stream_format"):
            if name in given:
                raise InvalidRequest(f"{name} has no meaning in session.config", field=name, code="unsupported_field")
        streams, as_bytes = given.pop("stream_audio", True), given.pop("binary", True)
        granularity = given.pop("split_granularity", "sentence")
        check_type("stream_audio", streams, ("boolean",))
        check_type("binary", as_bytes, ("boolean",))
        check_type("split_granularity", granularity, ("string",))
        if granularity not in GRANULARITIES:
            known = ", ".join(GRANULARITIES)
            raise InvalidRequest(f"split_granularity {granularity[:64]!r} is not one of {known}", field="split_granularity")
        body = {**given, "input": PROBE, "stream_format": "audio" if streams else None}
        order = read_order(body, self._config, self._service.info.sample_rate, self._id)
        return Settings(order, GRANULARITIES[granularity], as_bytes)

    # -- text --------------------------------------------------------------------------------------------------------

    def _add(self, text: Any) -> None:
        if text is None:
            raise InvalidRequest("input.text needs text", field="text", code="missing_field")
        check_type("text", text, ("string",))
        assert self._settings is not None, "the first message has configured the session"
        waiting = self._waiting + (self._text.waiting if self._text else 0)
        limit = self._config.limits.max_input_chars
        if waiting + len(text) > limit:
            raise InvalidRequest(
                f"{waiting} characters wait to be spoken; with {len(text)} more they would be over {limit}", field="text",
                code="input_too_long",
            )  # fmt: skip
        if self._dropping:
            return
        if self._text is None:
            self._dropping = True
            if self._utterance:  # the socket itself has paid for the first
                self._frames.take()
            self._dropping = False
            self._text = self._service.arriving(self._settings.granularity, self._settings.most)
        self._queue(self._text.add(text))

    def _queue(self, texts: list[str]) -> None:
        assert self._settings is not None, "the first message has configured the session"
        for text in texts:
            self._waiting += len(text)
            self._jobs.put_nowait(Job(self._utterance, self._settings, text))

    async def _end_utterance(self) -> None:
        assert self._settings is not None, "the first message has configured the session"
        self._dropping = False
        self._queue(self._text.end() if self._text else [])
        await self._frames.send({"type": "input.committed", "utterance_index": self._utterance})
        self._close_utterance()

    def _close_utterance(self) -> None:
        assert self._settings is not None, "the first message has configured the session"
        self._jobs.put_nowait(Job(self._utterance, self._settings))
        self._text = None
        self._utterance += 1

    def _cancel(self) -> None:
        """Nothing that has come so far is spoken, or spoken on."""
        self._dropping = False
        if self._text is not None:
            self._close_utterance()
        self._cancelled = self._utterance - 1
        if self._current is not None:
            self._current.leave(Cancelled("the speech was cancelled by input.cancel"))

    def finish(self) -> None:
        """No more text comes; what was not ended by input.done is dropped."""
        self._jobs.put_nowait(None)

    def leave(self, reason: Exception) -> None:
        """Nobody listens any more."""
        if self._current is not None:
            self._current.leave(reason)

    # -- speech ------------------------------------------------------------------------------------------------------

    async def speak(self) -> None:
        """Speaks what is asked for, one sentence after another, until nothing more comes."""
        while (job := await self._jobs.get()) is not None:
            self._busy = True
            if job.text is None:
                await self._tell_end(job)
            else:
                self._waiting -= len(job.text)
                if job.utterance > self._cancelled:
                    await self._speak_sentence(job, job.text)
            self._busy, self._active_at = False, time.monotonic()

    async def _speak_sentence(self, job: Job, text: str) -> None:
        order, spoken = job.settings.order, self._spoken
        where = {"utterance_index": job.utterance, "sentence_index": spoken.num_sentences}
        request = replace(
            order.request, text=text, continues=spoken.said, request_id=f"{self._id}-{job.utterance}-{spoken.num_sentences}"
        )
        spoken.num_sentences += 1
        order = replace(order, request=request)
        sending = Sending(self._frames, job.settings, where)
        self._current = Caller()
        error: DuettsError | None = None
        reason = "cancelled"
        try:
            opening = Rendition.open(order, self._service.start(request), self._current, self._outcomes)
            async with await opening as rendition:
                await sending.start(text, request.request_id)
                await sending.audio(rendition)
                spoken.said, reason = rendition.outcome.said, rendition.outcome.reason
        except Cancelled:
            pass
        except CallerLeft:
            raise
        except DuettsError as failure:
            error, reason = failure, "failed"
        finally:
            self._current = None
        if error is not None:
            await self._tell_error(error, partial_audio=sending.num_bytes > 0, **where)
        if sending.started:
            await sending.done(reason, error is not None)
        spoken.num_bytes += sending.num_bytes
        spoken.duration_s += sending.duration_s

    async def _tell_end(self, job: Job) -> None:
        spoken, self._spoken = self._spoken, Spoken()
        told = {
            "utterance_index": job.utterance, "total_sentences": spoken.num_sentences, "total_bytes": spoken.num_bytes,
            "duration_ms": round(1000 * spoken.duration_s, 3), "cancelled": job.utterance <= self._cancelled,
        }  # fmt: skip
        await self._frames.send({"type": "session.done", **told})

    async def _tell_error(self, error: DuettsError, *, partial_audio: bool = False, **where: int) -> None:
        told = error_object(error)
        shown = {name: told[name] for name in ("param", "code") if told[name] is not None}
        if isinstance(error, Overloaded | NotReady) and error.retry_after_s is not None:
            shown["retry_after"] = error.retry_after_s
        await self._frames.send(
            {"type": "error", "message": told["message"], "error_type": told["type"], **shown, "partial_audio": partial_audio}
            | where
        )


class Sending:
    """The messages of one sentence."""

    def __init__(self, frames: Frames, settings: Settings, where: dict[str, int]) -> None:
        self._frames, self._settings, self._where = frames, settings, where
        self.started = False
        self.num_bytes = 0
        self.duration_s = 0.0
        self._num_chunks = 0

    async def start(self, text: str, speech_id: str) -> None:
        output = self._settings.order.output
        told = {"sentence_text": text, "format": output.format, "sample_rate": output.sample_rate, "speech_id": speech_id}
        self.started = True
        await self._frames.send({"type": "audio.start", **self._where, **told})

    async def audio(self, rendition: Rendition) -> None:
        """All audio: as it is made, or when all of it is there."""
        if self._settings.streams:
            async for data in rendition:
                await self._chunk(data, rendition)
        else:
            await self._chunk(await rendition.complete(), rendition)

    async def _chunk(self, data: bytes, rendition: Rendition) -> None:
        began_s, self.duration_s = self.duration_s, rendition.output.duration_s
        self.num_bytes += len(data)
        if self._settings.as_bytes:
            for start in range(0, len(data), FRAME_BYTES):
                await self._frames.send(data[start : start + FRAME_BYTES])
            return
        told = {
            "chunk_id": self._num_chunks, "audio_b64": base64.b64encode(data).decode(),
            "chunk_start_ms": round(1000 * began_s, 3), "chunk_end_ms": round(1000 * self.duration_s, 3),
            "sample_rate": rendition.order.output.sample_rate, "timestamps": None,
        }  # fmt: skip
        self._num_chunks += 1
        await self._frames.send({"type": "audio.chunk", **self._where, **told})

    async def done(self, reason: str, failed: bool) -> None:
        told = {"total_bytes": self.num_bytes, "duration_ms": round(1000 * self.duration_s, 3)}
        await self._frames.send({"type": "audio.done", **self._where, **told, "finish_reason": reason, "error": failed})
