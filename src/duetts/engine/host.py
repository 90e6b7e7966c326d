"""The far end of the socket: clients' messages to a speaker or a codec service, its answers back, heartbeats, an orderly end.

It knows messages and what serves them, no torch, no signals. Nothing that a client sends ends it, and nothing is dropped in
silence: sends never wait and have no high-water mark, because what one request can send is bounded by its own `max_frames`
and the number of requests by the engine's line, calls of the codec by its credit; a client that has gone is noticed and its
work ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq
import zmq.asyncio

from duetts.config import ProcessConfig
from duetts.engine import wire
from duetts.engine.codec_service import CodecService
from duetts.engine.parts import DecodeCall
from duetts.engine.routing import reference_weight, utterance_weight
from duetts.engine.wire import Message, Others
from duetts.errors import Aborted, DuettsError, NotReady, WireError
from duetts.types import Chunk, Float32, Outcome, Speaker, Utterance

CLIENT_SILENCE_S = 10.0  # after that long a client has left
ABANDONED_S = 30.0  # after that long without any client the engine ends
NO_PROGRESS_S = 300.0  # with work and without any result or new figure: longer than the slowest prompt on a CPU
CLOSE_S = 5.0  # for the speaker's threads to end
STIR_S = 0.05  # at least, between two messages of what it does for others
BURST = 64  # messages that are read before others have a turn

ENDED, DEAD = 0, 70  # exit codes: in order; or a part of the speaker has died

log = logging.getLogger("duetts.engine")
Key = tuple[bytes, int]  # a client's identity and its number of the request


@dataclass(frozen=True, slots=True)
class Started:
    """What serves, and the sizes of its vocabularies: token ids and codes; of a codec, codes of the first codebook and of the
    others. It takes work while it `is_up`: an engine is not
    while its codec process is away."""

    speaker: Speaker | CodecService
    vocabulary: tuple[int, int]
    is_up: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class Client:
    """A server: when it was heard last, whether it is held to have left, and how many messages went either way."""

    heard: float
    left: bool = False
    sent: int = 0
    received: int = 0


class Host:
    """One engine on one socket, for the clients of one incarnation. `listener` is a socket that is at the address already."""

    def __init__(self, address: str, incarnation: str, config: ProcessConfig, listener: int = -1) -> None:
        self._incarnation = incarnation
        self._config = config
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # a message to a client that is gone is an error, not lost
            (zmq.ROUTER_HANDOVER, 1),  # over tcp a client may come back; what was lost meanwhile shows by the places
            (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 1000), (zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES),
            (zmq.USE_FD, listener),
        ):  # fmt: skip
            self._socket.setsockopt(option, value)
        self._socket.bind(address)
        self._state = "loading"
        self._started: Started | None = None
        self._error: BaseException | None = None
        self._clients: dict[bytes, Client] = {}
        self._heard = time.monotonic()  # when any was heard last
        self._work: dict[Key, asyncio.Task[None]] = {}
        self._owed: dict[Key, float] = {}  # of this work, in frames
        self._stirred = asyncio.Event()  # what others should know has changed
        self._progress: tuple[float, Any] = (time.monotonic(), None)
        self._sent = 0
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, start: Callable[[], Awaitable[Started]]) -> int:
        """Starts what serves, which must not hold this loop, and serves until the end. Returns the exit code."""
        starting = asyncio.ensure_future(start())
        starting.add_done_callback(self._on_started)
        tasks = [asyncio.create_task(work) for work in (self._read(), self._tick())]
        try:
            ends: list[asyncio.Future[Any]] = [self._end, *tasks]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # a fault of our own: raised, so that the process ends and is started again
            await self._end_work()
            self._tell("ended")
            return self._end.result()
        finally:
            ending: list[asyncio.Future[Any]] = [*tasks, *self._work.values(), starting]
            for each in ending:
                each.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            self._socket.close()
            self._context.term()

    def tell(self) -> None:
        """Whether it is up may have changed: clients learn it now, not with the next heartbeat."""
        self._tell_all()

    def end(self, code: int = ENDED) -> None:
        """Ends at once: what runs is aborted."""
        if not self._end.done():
            self._end.set_result(code)

    # -- starting and ending -----------------------------------------------------------------------------------------

    def _on_started(self, starting: asyncio.Future[Started]) -> None:
        if starting.cancelled():
            return
        self._error = starting.exception()
        if self._error is None:
            self._started = starting.result()
            self._state = "ready"
        else:
            self._state = "failed"
            if not isinstance(self._error, DuettsError):
                log.error("the start failed", exc_info=self._error)
        self._progress = (time.monotonic(), None)
        self._tell_all()

    async def _end_work(self) -> None:
        """Ends the speaker, and with it every request as aborted; each client is told."""
        if self._started is None:
            return
        self._state = "ending"
        closing = asyncio.create_task(self._started.speaker.close())
        await asyncio.wait([closing], timeout=CLOSE_S)
        if self._work:
            await asyncio.wait(self._work.values(), timeout=1.0)

    # -- heartbeats --------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Tells every client how the engine is, and looks whether it still should be."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(min(STIR_S, self._config.heartbeat_s))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.heartbeat_s - STIR_S):
                    await self._stirred.wait()
            self._stirred.clear()
            now = time.monotonic()
            if now - last > 5 * self._config.heartbeat_s:  # this process was stopped: others may have spoken meanwhile
                self._heard = now
                for client in self._clients.values():
                    client.heard = now
            last = now
            self._tell_all()
            self._judge(now)

    def _judge(self, now: float) -> None:
        for identity, client in self._clients.items():
            if now - client.heard > CLIENT_SILENCE_S:
                self._leave(identity, f"it has been silent for {CLIENT_SILENCE_S:.0f} s")
        if self._state == "failed" and (self._clients or now - self._heard > CLOSE_S):
            self.end(1)
        if now - self._heard > ABANDONED_S:
            log.warning("nobody has been heard for %.0f s", ABANDONED_S)
            self.end()
        self._judge_speaker(now)

    def _judge_speaker(self, now: float) -> None:
        """A dead part, or work without any progress: the process ends, so that it can be started again."""
        if self._started is None or self._end.done():
            return
        stats = self._started.speaker.stats()
        if not stats.get("alive", True):
            log.error("a part of the engine has died")
            self.end(DEAD)
        figures = (self._sent, {name: value for name, value in stats.items() if not isinstance(value, float)})  # counts
        if not self._work or figures != self._progress[1]:
            self._progress = (now, figures)
        elif now - self._progress[0] > NO_PROGRESS_S:
            log.error("there is work and no progress for %.0f s", NO_PROGRESS_S)
            self.end(DEAD)

    @property
    def _shown_state(self) -> str:
        """A part that is away loads again."""
        return "loading" if self._state == "ready" and self._started and not self._started.is_up() else self._state

    def _stir(self) -> None:
        """There is more or less to do: those who share this engine learn it before the next heartbeat."""
        if len(self._clients) > 1:
            self._stirred.set()

    def _tell_all(self) -> None:
        self._tell(self._shown_state)

    def _tell(self, state: str) -> None:
        speaker = self._started.speaker if self._started else None
        values = {
            "state": state,
            "info": wire.to_plain(speaker.info) if speaker else None,
            "stats": speaker.stats() if speaker else {},
            "error": wire.error_to_plain(self._error) if self._error else None,
        }
        for identity, client in self._clients.items():
            if not client.left:
                owed = [frames for key, frames in self._owed.items() if key[0] != identity]
                others = wire.to_plain(Others(len(owed), float(sum(owed))))
                self._post(identity, Message("state", {**values, "others": others}))

    # -- messages in -------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        count = 0
        while True:
            identity, *parts = await self._socket.recv_multipart()
            try:
                message = wire.unpack(self._incarnation, parts)
                self._hear(identity, message)
                self._act(identity, message)
            except WireError as error:
                log.warning("a message was refused: %s", error)
                self._send(identity, wire.pack(self._incarnation, wire.refused(None, error), None))
            count += 1
            if count % BURST == 0:
                await asyncio.sleep(0)

    def _hear(self, identity: bytes, message: Message) -> None:
        """Notes a client's life; a new one is told the state at once. Raises `WireError` when messages were lost."""
        self._heard = time.monotonic()
        new = identity not in self._clients
        client = self._clients.setdefault(identity, Client(self._heard))
        client.heard, client.left = self._heard, False
        if message.place != client.received:
            raise WireError(f"message {client.received} was lost: message {message.place} came")
        client.received += 1
        if new:
            self._tell_all()

    def _act(self, identity: bytes, message: Message) -> None:
        if message.kind == "beat":
            return
        key = (identity, message.take("id", int))
        if message.kind == "cancel":
            if key in self._work:
                self._work[key].cancel()
        elif message.kind in ("speak", "encode", "decode"):
            self._take(key, message)
        else:
            raise WireError(f"the kind {message.kind!r:.40} is unknown")

    def _take(self, key: Key, message: Message) -> None:
        """Begins new work, or refuses it under its number."""
        try:
            if key in self._work:
                raise WireError(f"the number {key[1]} is in use")
            if self._started is None or self._shown_state != "ready":
                raise NotReady(f"the engine is {self._shown_state}")
            work = self._begin(key, message, self._started)
        except (WireError, NotReady) as error:
            self._post(key[0], wire.refused(key[1], error))
            return
        task = asyncio.create_task(work)
        self._work[key] = task
        self._stir()
        task.add_done_callback(partial(self._on_done, key))

    def _begin(self, key: Key, message: Message, started: Started) -> Coroutine[Any, Any, None]:
        speaker, vocabulary = started.speaker, started.vocabulary
        if message.kind == "encode":
            wave = wire.read_wave(message)
            self._owed[key] = reference_weight(len(wave), speaker.info.frame_length)
            return self._encode(key, wave, speaker)
        if message.kind == ("speak" if isinstance(speaker, CodecService) else "decode"):
            raise WireError(f"this process does not {message.kind}")
        if isinstance(speaker, CodecService):
            return self._decode(key, wire.read_decode(message, speaker.info, speaker.slots, vocabulary), speaker)
        utterance = wire.read_utterance(message, speaker.info, vocabulary)
        self._owed[key] = utterance_weight(utterance)
        return self._speak(key, utterance, speaker)

    # -- work --------------------------------------------------------------------------------------------------------

    async def _speak(self, key: Key, utterance: Utterance, speaker: Speaker) -> None:
        identity, number = key
        count, frames = 0, 0
        async with aclosing(speaker.speak(utterance)) as items:
            async for item in items:
                if isinstance(item, Outcome):
                    self._post(identity, wire.end(number, count, item))
                    return
                assert isinstance(item, Chunk), f"{item!r} is no chunk"
                self._post(identity, wire.chunk(number, count, item))
                count, frames = count + 1, frames + item.num_frames
                self._owed[key] = max(0.0, float(utterance.max_frames - frames))
        raise WireError("the speech had no outcome")

    async def _encode(self, key: Key, wave: Float32, speaker: Speaker | CodecService) -> None:
        self._post(key[0], wire.codes(key[1], await speaker.encode_reference(wave)))

    async def _decode(self, key: Key, call: DecodeCall, service: CodecService) -> None:
        self._post(key[0], wire.sounds(key[1], await service.decode(call)))

    def _on_done(self, key: Key, task: asyncio.Task[None]) -> None:
        self._work.pop(key, None)
        self._owed.pop(key, None)
        self._stir()
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, DuettsError):
            log.error("request %d failed", key[1], exc_info=error)
        self._post(key[0], wire.refused(key[1], error))

    # -- messages out ------------------------------------------------------------------------------------------------

    def _post(self, identity: bytes, message: Message) -> None:
        """Sends at once; there is no line that could be full."""
        client = self._clients[identity]
        try:
            parts = wire.pack(self._incarnation, message, client.sent)
        except WireError as error:
            log.error("%s", error)
            parts = wire.pack(self._incarnation, wire.refused(message.values.get("id"), error), client.sent)
        client.sent += 1
        self._sent += message.kind != "state"
        self._send(identity, parts)

    def _send(self, identity: bytes, parts: list[bytes]) -> None:
        sending = asyncio.ensure_future(self._socket.send_multipart([identity, *parts]))
        sending.add_done_callback(partial(self._on_sent, identity))

    def _on_sent(self, identity: bytes, sending: asyncio.Future[Any]) -> None:
        if not sending.cancelled() and sending.exception() is not None:
            self._leave(identity, "it is gone")

    def _leave(self, identity: bytes, reason: str) -> None:
        """Ends the work of a client that has left. Should it only have slept, it learns of that."""
        client = self._clients.get(identity)
        if client is None or client.left:
            return
        client.left = True
        mine = [(key, task) for key, task in self._work.items() if key[0] == identity]
        log.log(logging.WARNING if mine else logging.DEBUG, "a client has left: %s; %d of its requests end", reason, len(mine))
        for key, task in mine:
            task.cancel()
            self._post(identity, wire.refused(key[1], Aborted(f"the engine held the server to have left: {reason}")))
