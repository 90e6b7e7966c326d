"""WS /v1/tts/live, as Fish Audio's clients speak it: text in, audio out, in frames of msgpack.

One task reads: it keeps the text that has come and cuts it into pieces. Another one speaks: all pieces between `start` and
`stop` are one stream of audio, each spoken as what follows the one before. After `finish` the socket stays open for the next
`start`; whatever still comes of an utterance that failed is passed over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import ormsgpack
from fastapi import APIRouter, WebSocket

from duetts.config import ServerConfig
from duetts.errors import CallerLeft, DuettsError, InvalidRequest
from duetts.server.body import parse_msgpack
from duetts.server.caller import Caller
from duetts.server.errors import error_object
from duetts.server.fish import fish_names, read_fish_order
from duetts.server.frames import BAD_MESSAGE, IDLE, LARGE_BYTES, TOO_BIG, Closing, Frames, converse
from duetts.server.outcomes import Outcomes
from duetts.server.rendition import Rendition
from duetts.server.schemas import SpeechOrder, check_type
from duetts.service import Arriving, SpeechService
from duetts.types import Chunk, Outcome, Pieces, Speech

CHUNK_LENGTH = 200  # characters that are spoken although nobody has asked for it
PROBE = "Hello."  # a text that fits, to check everything else with


@dataclass(slots=True)
class Utterance:
    """What comes between `start` and `stop`. `pieces` ends with None, or with what is wrong with the text that followed."""

    order: SpeechOrder
    text: Arriving
    began_at: float
    pieces: asyncio.Queue[str | DuettsError | None] = field(default_factory=asyncio.Queue)
    waiting: int = 0  # characters in `pieces`
    failed: bool = False  # then nothing more of it is spoken

    def queue(self, texts: list[str]) -> None:
        """Pieces to speak."""
        for text in texts:
            self.waiting += len(text)
            self.pieces.put_nowait(text)

    def fail(self, error: DuettsError) -> None:
        """Nothing that waits is spoken; the error comes after what is spoken now."""
        while not self.pieces.empty():
            self.pieces.get_nowait()
        self.pieces.put_nowait(error)

    async def next_piece(self) -> str | None:
        """None at the end. Raises what is wrong with the text."""
        piece = await self.pieces.get()
        if isinstance(piece, DuettsError):
            raise piece
        self.waiting -= len(piece or "")
        return piece


def fish_live_router(service: SpeechService, config: ServerConfig, outcomes: Outcomes) -> APIRouter:
    """The route of the socket."""
    router = APIRouter()

    @router.websocket("/v1/tts/live")
    async def live(socket: WebSocket) -> None:
        async with Frames(socket, config.limits.max_body_bytes) as frames:
            session = LiveSession(frames, socket, service, config, outcomes)
            await converse(frames, session.read(), session.speak(), session.finish, session.leave)

    return router


class LiveSession:
    """One connection, on which any number of utterances follow one another."""

    def __init__(
        self, frames: Frames, socket: WebSocket, service: SpeechService, config: ServerConfig, outcomes: Outcomes
    ) -> None:
        self._frames, self._service, self._config, self._outcomes = frames, service, config, outcomes
        self._headers = socket.headers
        self._id = socket.state.speech_id.replace("speech-", "live-", 1)
        self._count = 0  # of utterances
        self._open: Utterance | None = None
        self._utterances: asyncio.Queue[Utterance | None] = asyncio.Queue()
        self._current: Caller | None = None  # of the utterance that is spoken now
        self._busy = False
        self._active_at = time.monotonic()

    # -- messages ----------------------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Takes messages, for ever. Raises `Closing` for those that are none."""
        limit_s = self._config.limits.live_idle_s
        while True:
            idle_s = 0.0 if self._busy or not self._utterances.empty() else time.monotonic() - self._active_at
            if idle_s >= limit_s:
                raise Closing(IDLE, f"nothing has happened for {limit_s:g} s")
            try:
                raw = await self._frames.next(limit_s - idle_s)
            except TimeoutError:
                continue
            self._active_at = time.monotonic()
            try:
                await self._take(self._parse(raw))
            except InvalidRequest as error:
                raise Closing(BAD_MESSAGE, str(error)) from None

    def _parse(self, raw: str | bytes) -> dict[str, Any]:
        if isinstance(raw, str):
            raise InvalidRequest("messages must be binary, in msgpack", field=None, code="invalid_type")
        if len(raw) > LARGE_BYTES and b"start" not in raw:
            raise Closing(TOO_BIG, f"a message may have at most {LARGE_BYTES} bytes")
        message = parse_msgpack(raw, "the message")
        check_type("event", message.get("event"), ("string",))
        return message

    async def _take(self, message: dict[str, Any]) -> None:
        """Events that are not known are passed over, as their clients do with ours."""
        event = message["event"]
        if event == "start":
            await self._start(message.get("request"))
        elif event in ("text", "flush", "stop"):
            if not self._count:
                raise InvalidRequest(f"{event} came before start", field="event")
            if self._open is not None:
                self._take_text(self._open, event, message.get("text"))

    def _take_text(self, utterance: Utterance, event: str, text: Any) -> None:
        """A fault of the text ends the utterance, not the socket."""
        try:
            if event == "text":
                self._add(utterance, text)
            elif event == "flush":
                utterance.queue(utterance.text.flush())
            else:
                self._stop(utterance)
        except InvalidRequest as error:
            self._open = None
            utterance.fail(error)

    def _add(self, utterance: Utterance, text: Any) -> None:
        check_type("text", text, ("string",))
        waiting, limit = utterance.waiting + utterance.text.waiting, self._config.limits.max_input_chars
        if utterance.failed:
            return
        if waiting + len(text) > limit:
            raise InvalidRequest(
                f"{waiting} characters wait to be spoken; with {len(text)} more they would be over {limit}", field="text",
                code="input_too_long",
            )  # fmt: skip
        utterance.queue(utterance.text.add(text))

    def _stop(self, utterance: Utterance) -> None:
        self._open = None
        utterance.queue(utterance.text.end())
        utterance.pieces.put_nowait(None)

    async def _start(self, request: Any) -> None:
        """A new utterance, checked completely; its clips are encoded. A fault ends the socket."""
        if self._open is not None and not self._open.failed:
            raise InvalidRequest("start came before stop", field="event")
        began_at = time.monotonic()
        check_type("request", request, ("object",))
        try:
            if self._count:  # the socket itself has paid for the first
                self._frames.take()
            self._open = await self._read_start(request, began_at)
        except (CallerLeft, Closing):
            raise
        except DuettsError as error:
            await self._send_finish(began_at, error)
            raise Closing(BAD_MESSAGE, str(error)) from None
        self._count += 1
        self._utterances.put_nowait(self._open)
        if request.get("text"):
            self._take_text(self._open, "text", request["text"])

    async def _read_start(self, request: dict[str, Any], began_at: float) -> Utterance:
        rate = self._service.info.sample_rate
        with fish_names():
            order = read_fish_order(
                {**request, "text": PROBE, "streaming": True}, self._headers, self._config, rate, f"{self._id}-{self._count}"
            )
            speech = await self._frames.caller.unless_gone(self._service.start(order.request))
            await speech.aclose()
        return Utterance(order, self._service.arriving("length", order.request.chunk_length or CHUNK_LENGTH), began_at)

    def finish(self) -> None:
        """No more text comes."""
        if self._open is not None:
            self._stop(self._open)
        self._utterances.put_nowait(None)

    def leave(self, reason: Exception) -> None:
        """Nobody listens any more."""
        if self._current is not None:
            self._current.leave(reason)

    # -- speech ------------------------------------------------------------------------------------------------------

    async def speak(self) -> None:
        """Speaks one utterance after another, until nothing more comes."""
        while (utterance := await self._utterances.get()) is not None:
            self._current = Caller()
            try:
                first = await self._current.unless_gone(self._next_piece(utterance))
                if first is not None:
                    await self._send_audio(utterance, first, self._current)
                await self._send_finish(utterance.began_at)
            except CallerLeft:
                raise
            except DuettsError as error:
                utterance.failed = True
                await self._send_finish(utterance.began_at, error)
            finally:
                self._current = None
                self._busy, self._active_at = False, time.monotonic()

    async def _next_piece(self, utterance: Utterance) -> str | None:
        """While it is waited for, nothing happens."""
        self._busy, self._active_at = False, time.monotonic()
        piece = await utterance.next_piece()
        self._busy = True
        return piece

    def _all_pieces(self, utterance: Utterance, first: str) -> Speech:
        """All pieces of an utterance, as they come, as one speech. Iterating it raises whatever is wrong with one of them."""
        request = utterance.order.request

        async def chunks() -> AsyncGenerator[Chunk | Outcome, None]:
            piece: str | None = first
            outcomes: list[Outcome] = []
            while piece is not None:
                said = outcomes[-1].said if outcomes else None
                with fish_names():
                    speech = await self._service.start(replace(request, text=piece, continues=said))
                whole.seed = whole.seed if outcomes else speech.seed
                whole.input_tokens += speech.input_tokens
                whole.input_audio_tokens += speech.input_audio_tokens
                async with aclosing(speech):
                    async for chunk in speech:
                        yield chunk
                assert speech.outcome is not None, "a speech that ended has an outcome"
                outcomes.append(speech.outcome)
                piece = await self._next_piece(utterance)
            yield joined(outcomes)

        rate = self._service.info.sample_rate
        whole = Speech(chunks(), request_id=request.request_id, seed=0, input_tokens=0, sample_rate=rate)
        return whole

    async def _send_audio(self, utterance: Utterance, first: str, caller: Caller) -> None:
        speech = self._all_pieces(utterance, first)
        async with await Rendition.open(utterance.order, _already(speech), caller, self._outcomes) as rendition:
            async for data in rendition:
                await self._send(utterance.began_at, event="audio", audio=data)

    async def _send_finish(self, began_at: float, error: DuettsError | None = None) -> None:
        told = {"reason": "stop"} if error is None else {"reason": "error", "message": error_object(error)["message"]}
        await self._send(began_at, event="finish", **told)

    async def _send(self, began_at: float, **fields: Any) -> None:
        """`time`: milliseconds since `start`."""
        await self._frames.send(ormsgpack.packb({**fields, "time": round(1000 * (time.monotonic() - began_at))}))


async def _already(speech: Speech) -> Speech:
    return speech


def joined(outcomes: list[Outcome]) -> Outcome:
    """How an utterance ended all of whose pieces ended well; pieces of pieces are not told apart."""
    first, cut = outcomes[0], any(outcome.reason == "length" for outcome in outcomes)
    total_s = sum(outcome.timings.total_s for outcome in outcomes)
    late_s = max(outcome.timings.worst_underrun_s for outcome in outcomes)
    return Outcome(
        "length" if cut else "stop",
        num_frames=sum(outcome.num_frames for outcome in outcomes),
        input_tokens=sum(outcome.input_tokens for outcome in outcomes),
        timings=replace(first.timings, total_s=total_s, worst_underrun_s=late_s),
        pieces=Pieces(len(outcomes), len(outcomes)),
        said=outcomes[-1].said,
    )
