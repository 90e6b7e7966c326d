"""The near end of the socket to one life of one engine or codec process: requests out, chunks in, in order and complete or
failed. The server has it to an engine process, and that to its codec process.

It knows messages, no processes and no other engines. Every request that is open when the link fails ends with the error of that
failure. What has arrived and was not yet taken is bounded by each request's own `max_frames`, which is checked.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import zmq
import zmq.asyncio

from duetts.engine import wire
from duetts.engine.parts import DecodeCall, Decoded
from duetts.engine.routing import reference_weight, utterance_weight
from duetts.engine.wire import Message, Others
from duetts.errors import Aborted, DuettsError, EngineFailure, NotReady, WireError
from duetts.types import Chunk, Float32, Int32, Outcome, SpeakerInfo, Timings, Utterance

BURST = 64  # messages that are read before others have a turn
QUIET_S = 0.1  # without a message after the process has ended: nothing more will come
STATES = ("loading", "ready", "ending", "failed", "ended")

log = logging.getLogger("duetts.engine")


@dataclass(slots=True, eq=False)
class Call:
    """One open request. `owed` is the work in frames that the engine still has with it. What is no utterance is answered by one
    message of the kind `answer`, which `read` takes apart."""

    number: int
    owed: float
    utterance: Utterance | None = None
    answer: str = ""
    read: Callable[[Message], Any] = field(default=lambda message: message)
    chunks: int = 0
    frames: int = 0
    began: float = field(default_factory=time.monotonic)
    items: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def fail(self, error: DuettsError) -> None:
        """Ends the call. An error before any audio of a speech is raised as it is, later ones are an outcome."""
        if self.utterance is None:
            self.items.put_nowait(error)
            return
        timings = Timings(total_s=time.monotonic() - self.began)
        reason = "aborted" if isinstance(error, Aborted) else "failed"
        self.items.put_nowait(Outcome(reason, self.frames, self.utterance.prompt.shape[1], timings, error))  # type: ignore[arg-type]

    def refuse(self, error: DuettsError) -> None:
        """Ends the call with what the engine raised."""
        if self.chunks:
            self.fail(error)
        else:
            self.items.put_nowait(error)


class Link:
    """A connection to one life of an engine. `changed` is called when its state does."""

    def __init__(self, context: zmq.asyncio.Context, address: str, incarnation: str, changed: Callable[[], None]) -> None:
        self._incarnation = incarnation
        self._changed = changed
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.ROUTING_ID, secrets.token_bytes(16)), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, 20), (zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES),
            (zmq.HANDSHAKE_IVL, 0),  # it is connected before the process begins, which then may load for long
        ):  # fmt: skip
            self._socket.setsockopt(option, value)
        self._socket.connect(address)
        self._calls: dict[int, Call] = {}
        self._numbers = count()
        self._sent = 0
        self._received = 0
        self.state = "starting"
        self.info: SpeakerInfo | None = None
        self.stats: dict[str, Any] = {}
        self._others = Others(0, 0.0)
        self.error: DuettsError | None = None  # why it cannot start, or why the link has failed
        self.failed = False
        self.ready_at: float | None = None  # the first time
        self.heard = time.monotonic()
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._on_reader_end)

    @property
    def load(self) -> float:
        """Frames that the engine still owes, to whomever."""
        return self._others.owed + sum(call.owed for call in self._calls.values())

    @property
    def num_calls(self) -> int:
        """Open calls, whosesoever."""
        return self._others.calls + len(self._calls)

    def beat(self) -> None:
        """Tells the engine that somebody is here."""
        self._post(Message("beat", {}))

    # -- requests ----------------------------------------------------------------------------------------------------

    async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        """Chunks, then one outcome. Closing it early cancels in the engine. Raises what the engine raises before any audio."""
        call = self._open(utterance_weight(utterance), utterance=utterance)
        try:
            self._post(wire.speak(call.number, utterance))
            while True:
                item = await call.items.get()
                if isinstance(item, DuettsError):
                    raise item
                assert isinstance(item, Chunk | Outcome), f"{type(item)} is no part of a speech"
                yield item
                if isinstance(item, Outcome):
                    return
        finally:
            self._leave(call)

    async def encode(self, wave: Float32) -> Int32:
        """The codes of a reference. Raises what the engine raises."""
        assert self.info is not None, "an engine that encodes has told what it is"
        owed, codebooks = reference_weight(len(wave), self.info.frame_length), self.info.num_codebooks
        call = self._open(owed, answer="codes", read=lambda message: message.array(0, "<i4", codebooks))
        codes: Int32 = await self._ask(call, wire.encode(call.number, wave))
        return codes

    async def decode(self, call: DecodeCall) -> Decoded:
        """What a codec process makes of a call. Raises the `EngineFailure` for which it makes nothing."""
        assert self.info is not None, "a codec process that decodes has told what it is"
        owed, length = float(call.codes.shape[0] * call.codes.shape[2]), self.info.frame_length
        try:
            opened = self._open(owed, answer="sounds", read=lambda message: wire.read_sounds(message, call, length))
            made: Decoded = await self._ask(opened, wire.decode(opened.number, call))
        except DuettsError as error:
            raise error if isinstance(error, EngineFailure) else EngineFailure(f"the codec process: {error}") from error
        return made

    async def _ask(self, call: Call, message: Message) -> Any:
        try:
            self._post(message)
            item = await call.items.get()
            if isinstance(item, DuettsError):
                raise item
            return item
        finally:
            self._leave(call)

    def _open(self, owed: float, **fields: Any) -> Call:
        if self.failed:
            raise NotReady("the process has just ended")
        call = Call(next(self._numbers), owed, **fields)
        self._calls[call.number] = call
        return call

    def _leave(self, call: Call) -> None:
        """After the end of a call this does nothing; before it, the engine is told."""
        if self._calls.pop(call.number, None) is not None:
            self._post(Message("cancel", {"id": call.number}))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def settle(self, limit_s: float = 1.0) -> None:
        """After the process has ended: until its last word is here, or nothing more has come for a while."""
        deadline = time.monotonic() + limit_s
        while self.state != "ended" and not self.failed and time.monotonic() < deadline:
            before = self._received
            await asyncio.sleep(QUIET_S)
            if self._received == before:
                return

    def fail(self, error: DuettsError) -> None:
        """Ends every open call with this error; nothing goes out or comes in afterwards. The first error stays."""
        if self.failed:
            return
        self.failed = True
        self.error = self.error or error
        for call in self._calls.values():
            call.fail(error)
        self._calls.clear()
        self._changed()

    async def close(self) -> None:
        """Frees the socket. Calls that are open end as aborted."""
        self.fail(Aborted("the connection to the engine was closed"))
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _post(self, message: Message) -> None:
        """Sends at once; there is no line that could be full. Raises `WireError` for what is too large."""
        if self.failed:
            return
        parts = wire.pack(self._incarnation, message, self._sent)
        self._sent += 1
        asyncio.ensure_future(self._socket.send_multipart(parts)).add_done_callback(self._on_sent)

    def _on_sent(self, sending: asyncio.Future[Any]) -> None:
        if not sending.cancelled() and sending.exception() is not None:
            self.fail(EngineFailure(f"the engine cannot be reached: {sending.exception()}"))

    async def _read(self) -> None:
        while not self.failed:
            parts = await self._socket.recv_multipart()
            try:
                self._act(wire.unpack(self._incarnation, parts))
            except WireError as error:
                log.error("the link fails: %s", error)
                self.fail(EngineFailure(f"the engine was misunderstood: {error}"))
            if self._received % BURST == 0:
                await asyncio.sleep(0)

    def _on_reader_end(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            log.error("the link fails", exc_info=error)
            self.fail(EngineFailure(f"the link to the engine failed: {type(error).__name__}"))

    def _act(self, message: Message) -> None:
        self.heard = time.monotonic()
        if message.kind == "refused" and message.values.get("id") is None:
            raise WireError(f"refused: {wire.error_from_plain(message.take('error', dict))}")
        if message.place != self._received:
            raise WireError(f"message {self._received} was lost: message {message.place} came")
        self._received += 1
        if message.kind == "state":
            self._on_state(message)
            return
        call = self._calls.get(message.take("id", int))
        if call is not None:  # else it was cancelled while this was on its way
            self._on_answer(call, message)

    def _on_state(self, message: Message) -> None:
        state = message.take("state", str)
        if state not in STATES:
            raise WireError(f"the state {state!r:.20} is unknown")
        info, error = message.values.get("info"), message.values.get("error")
        self.info = self.info or (None if info is None else wire.build(SpeakerInfo, info))
        if state == "ready" and self.info is None:
            raise WireError("an engine that is ready has not told what it is")
        self.stats = message.take("stats", dict)
        self._others = wire.build(Others, message.take("others", dict))
        if error is not None:
            self.error = wire.error_from_plain(error)
        if state != self.state:
            self.state = state
            if state == "ready":
                self.ready_at = self.ready_at or self.heard
            self._changed()

    def _on_answer(self, call: Call, message: Message) -> None:
        """One message for one call. What does not follow what came before ends that call as failed."""
        try:
            if message.kind == "refused":
                call.refuse(wire.error_from_plain(message.take("error", dict)))
            elif message.kind == call.answer and call.utterance is None:
                call.items.put_nowait(call.read(message))
            elif message.kind == "chunk" and call.utterance is not None:
                self._on_chunk(call, call.utterance, message)
                return
            elif message.kind == "end" and call.utterance is not None:
                self._on_end(call, message)
            else:
                raise WireError(f"{message.kind!r:.20} is no answer to this request")
        except WireError as error:
            log.error("request %d fails: %s", call.number, error)
            call.fail(EngineFailure(f"the answer of the engine is not whole: {error}"))
            self._leave(call)
            return
        del self._calls[call.number]

    def _on_chunk(self, call: Call, utterance: Utterance, message: Message) -> None:
        assert self.info is not None, "an engine that speaks has told what it is"
        chunk = wire.read_chunk(message, self.info)
        if message.take("number", int) != call.chunks:
            raise WireError(f"chunk {message.values['number']} came in place of chunk {call.chunks}")
        most = int(utterance.prompt.shape[1]) if utterance.decode_only else utterance.max_frames
        if call.frames + chunk.num_frames > most:
            raise WireError(f"there are more frames than the {most} that were asked for")
        call.chunks += 1
        call.frames += chunk.num_frames
        call.owed = most - call.frames
        call.items.put_nowait(chunk)

    def _on_end(self, call: Call, message: Message) -> None:
        outcome = wire.read_end(message)
        if message.take("number", int) != call.chunks:
            raise WireError(f"{call.chunks} of {message.values['number']} chunks came")
        if outcome.error is None and outcome.num_frames != call.frames:
            raise WireError(f"{call.frames} of {outcome.num_frames} frames came")
        call.items.put_nowait(outcome)
