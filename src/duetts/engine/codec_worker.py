"""Frames to PCM: which streams are decoded next, and how many frames of each. Plain Python; tensors are the vocoder's.

It is driven one step at a time by the engine's loop, or by a thread of its own (`start`). A step starts calls and hands over
what earlier ones have made; it does not wait for a device. Either way it tells each sequence's end once, when the last of its
audio is out. The vocoder may be another process's (`remote_codec.py`), which says how many calls it takes and may go away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from operator import itemgetter

import numpy as np

from duetts.engine.codec_streams import Due, Flight, Part, Stream
from duetts.engine.pace import Pace
from duetts.engine.parts import Faults, Vocoder
from duetts.engine.playout import COMFORT_S, NEED_S, ChunkPolicy
from duetts.engine.sequence import Sequence
from duetts.errors import EngineFailure, NotReady
from duetts.types import Chunk, Int32

MAX_STREAMS = 256  # decoded in one call
MAX_CALLS = 3  # in one step: chunks of different sizes cannot share a call
WORTH = 64  # frames that make one more call worth its start
UNBOUNDED = 1 << 30  # calls under way, where nobody counts them
LOOK_S = 0.02  # how often a listener's shrinking buffer is looked at while no frame comes

log = logging.getLogger(__name__)


class CodecWorker:
    """Owns the vocoder, its slots and every stream between its first frame and its end. `on_end` is called once a sequence."""

    def __init__(
        self, vocoder: Vocoder, policy: ChunkPolicy, pace: Pace, on_end: Callable[[Sequence], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._vocoder = vocoder
        self._policy = policy
        self._pace = pace
        self._on_end = on_end
        self._clock = clock
        self._free = list(range(vocoder.slots))
        self._streams: dict[Sequence, Stream] = {}
        self._flights: deque[Flight] = deque()
        self._changed = threading.Condition()
        self._news = False  # a frame or an end has come since the last step
        self._closed = self._broken = False
        self._faults = Faults()
        self._credit = UNBOUNDED
        self._away: tuple[Exception, float] | None = None  # why no call can be made, and until when that is borne
        self._thread: threading.Thread | None = None
        self.made_s = 0.0  # seconds that a stream has to wait for its next frame, told by the loop

    def push(self, frames: Iterable[tuple[Sequence, Int32]]) -> None:
        """Codes [codebooks] of the next frame of some sequences."""
        with self._changed:
            for sequence, codes in frames:
                stream = self._streams.get(sequence)
                if stream is None:
                    stream = self._streams[sequence] = Stream(sequence)
                stream.frames.append(codes)
            self._tell()

    def end(self, sequence: Sequence) -> None:
        """No more frames; call it once. After a stop or a limit what waits is still decoded, otherwise it is dropped."""
        with self._changed:
            stream = self._streams.setdefault(sequence, Stream(sequence))
            stream.ended = True
            if sequence.finished not in ("stop", "length"):
                stream.drop()
            self._tell()

    def allow(self, calls: int) -> None:
        """The vocoder is there and takes so many calls at a time. From any thread."""
        with self._changed:
            self._credit, self._away = calls, None
            self._tell()

    def lose(self, error: Exception, until: float) -> None:
        """What had begun in the vocoder is gone and fails. The rest waits for `allow` and fails at `until`. From any thread."""
        with self._changed:
            self._credit, self._away = 0, (error, until)
            for stream in self._streams.values():
                if stream.held:
                    stream.sequence.fail(error)
            self._tell()

    def wake(self) -> None:
        """A call may be ready. From any thread."""
        with self._changed:
            self._tell()

    def _tell(self) -> None:
        self._news = True
        self._changed.notify()

    @property
    def idle(self) -> bool:
        with self._changed:
            return not self._streams and len(self._free) == self._vocoder.slots

    @property
    def flying(self) -> bool:
        """Whether a call is under way; asked by whoever steps the worker."""
        return bool(self._flights)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def sequences(self) -> list[Sequence]:
        """Those whose outcome is still to come and that have sent a frame or their end."""
        with self._changed:
            return list(self._streams)

    # -- a thread of its own ---------------------------------------------------------------------------------------------

    def start(self, prepare: Callable[[], None], *, patient: bool = True) -> None:
        """Steps on a new thread, which calls `prepare` first. It waits for calls under way, else somebody has to `wake` it."""
        self._thread = threading.Thread(target=self._run, args=(prepare, patient), name="duetts-codec", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still decodes, and somebody steps it: the own thread, if there is one."""
        return not self._broken and not self._faults.lasting and (self._thread is None or self._thread.is_alive())

    def close(self) -> None:
        """Waits for what is still decoded, then ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self, prepare: Callable[[], None], patient: bool) -> None:
        try:
            prepare()
            while self._has_to_stay():
                if not self.step(patient=patient):
                    self._wait()
        except Exception as error:  # a fault of the worker itself: nobody may wait for ever
            log.error("the codec decodes no more", exc_info=error)
            while self._has_to_stay():
                self.give_up(error)
                self._wait()

    def _has_to_stay(self) -> bool:
        return not self._closed or bool(self._streams)

    def _wait(self) -> None:
        """Sleeps until something comes; while there are streams not for long, since a listener's buffer shrinks meanwhile."""
        with self._changed:
            if not self._news and self._has_to_stay():
                self._changed.wait(LOOK_S if self._streams else None)

    def give_up(self, error: Exception) -> None:
        """After a fault nothing is decoded any more: every stream fails, and is told so once the loop has ended it."""
        self._broken = True
        self._flights.clear()
        with self._changed:
            self._news = False
            for stream in self._streams.values():
                stream.drop()
                stream.flying = False
                if stream.sequence.failure is None:
                    stream.sequence.fail(error)
            ended = self._pop_ended()
        for sequence in ended:
            self._on_end(sequence)

    # -- one step --------------------------------------------------------------------------------------------------------

    def step(self, *, patient: bool = False) -> bool:
        """Hands over what is ready, tells who has ended, and starts calls for those who need it most. False if there was
        nothing to do; `patient`: then it waits for the oldest call, if there is one, and hands that over."""
        landed = self.hand_over()
        now = self._clock()
        with self._changed:
            self._news = False
            self._drop_lost(now)
            ended = self._pop_ended()
        for sequence in ended:
            self._on_end(sequence)
        with self._changed:
            due = self._list_due(self._clock())
        calls = 0
        while due and calls < MAX_CALLS and len(self._flights) < self._credit:
            with self._changed:
                parts = self._take(due, again=calls > 0)
            if parts:
                self._launch(parts)
                self.hand_over()
                calls += 1
        if patient and self._flights and not (landed or ended or calls):
            self._land(self._flights.popleft())
            landed = True
        return bool(landed or ended or calls)

    def hand_over(self) -> bool:
        """Hands over what calls have made, in the order in which they were started. False if none is ready. It never waits."""
        landed = False
        while self._flights and self._flights[0].decoding.ready():
            self._land(self._flights.popleft())
            landed = True
        return landed

    def _drop_lost(self, now: float) -> None:
        """Drops frames that nobody waits for any more."""
        for stream in self._streams.values():
            if self._away is not None and now >= self._away[1] and stream.sequence.failure is None:
                stream.sequence.fail(self._away[0])
            reason = stream.sequence.verdict(now)
            if reason is not None and stream.frames:
                stream.drop()
                if stream.ended:  # else the loop, which sees the same verdict, ends it
                    stream.sequence.finished = reason

    def _pop_ended(self) -> list[Sequence]:
        """Takes out the streams that have nothing left."""
        done = [one for one in self._streams.values() if one.ended and not one.waiting and not one.flying]
        for stream in done:
            del self._streams[stream.sequence]
            if stream.slot is not None:
                self._free.append(stream.slot)
        return [stream.sequence for stream in done]

    def _list_due(self, now: float) -> list[Due]:
        """Streams that a chunk can be decoded of now, those that need it most first."""
        ready = [stream for stream in self._streams.values() if stream.waiting and not stream.flying]
        sizes = [(stream, self._due(stream, now)) for stream in ready if stream.sequence.failure is None]
        due = [(self._urgency(stream, now), size, stream) for stream, size in sizes if size]
        due.sort(key=itemgetter(0))
        return due if self._vocoder.quantum is None else due[:1]

    def _take(self, due: list[Due], *, again: bool) -> list[Part]:
        """What the next call decodes, off the list: the first stream and all with chunks of about its size, so that nobody's
        chunks become small because somebody else's are. `again`: only if somebody needs it, or if it is much."""
        while due:
            buffer_s, frames, _ = due[0]
            alike = [stream for _, size, stream in due if frames <= size < 2 * frames and frames <= stream.waiting]
            due[:] = [each for each in due if not frames <= each[1] < 2 * frames]
            if alike and (not again or buffer_s < NEED_S or frames * len(alike) >= WORTH):
                return [self._cut(stream, frames) for stream in self._seated(alike)]
        return []

    def _seated(self, streams: list[Stream]) -> list[Stream]:
        """The first of these, as many as a call and the slots can take."""
        seated: list[Stream] = []
        free = len(self._free)
        for stream in streams:
            if stream.slot is None:
                if not free:
                    continue
                free -= 1
            seated.append(stream)
        return seated[:MAX_STREAMS]

    def _due(self, stream: Stream, now: float) -> int:
        """How many frames of a stream that has some should be decoded now."""
        if stream.slot is None and not self._free:
            return 0
        least, most = self._sizes(stream, now)
        return min(most, stream.waiting) if stream.waiting >= least or stream.ended else 0

    def _sizes(self, stream: Stream, now: float) -> tuple[int, int]:
        """How many frames are worth a call, and how many it takes if more of them wait.

        With a quantum a call takes its time however few of its frames are new, so only an opening is worth a call for a part:
        a late listener who got single frames would make everybody later.
        """
        sequence, largest, quantum = stream.sequence, self._policy.largest, self._vocoder.quantum
        if not sequence.streaming:
            whole = largest if quantum is None else quantum - stream.shown
            return whole, whole
        asked = 0 if stream.last else sequence.utterance.first_chunk
        size = min(asked, largest) or self._policy.size(sequence.playout, stream.last, self.made_s, now)
        if quantum is None:
            size = size if asked else 1 << size.bit_length() - 1  # recordings are for powers of two, else it takes several
            return size, size
        rest = min(largest, quantum - stream.shown)
        least = rest if stream.last else min(size, rest)
        return least, least if asked else rest

    def _urgency(self, stream: Stream, now: float) -> float:
        """Seconds until the listener waits. Nobody listens to a complete answer, but it cannot wait for ever."""
        if stream.sequence.streaming:
            return stream.sequence.playout.buffer_s(now)
        return COMFORT_S - (now - stream.served)

    def _cut(self, stream: Stream, frames: int) -> Part:
        """Takes the next frames off a stream; with a quantum only its last frame takes them off, all at once.

        So with a quantum every frame is computed in the same place of one shape, whenever it is handed over.
        """
        if stream.slot is None:
            stream.slot = self._free.pop()
        start, stop = stream.shown, stream.shown + frames
        taken = stream.frames[:stop]
        keep = self._vocoder.quantum in (None, stop)
        fresh = not stream.last
        stream.last, stream.served = frames, self._clock()
        if keep:
            del stream.frames[:stop]
        stream.shown = 0 if keep else stop
        stream.flying = True
        return Part(stream, stream.slot, taken, start, keep, fresh)

    def _launch(self, parts: list[Part]) -> None:
        began = self._clock()
        try:
            for part in parts:
                if part.fresh:
                    self._vocoder.reset(part.slot)
            codes = self._pack(parts)
            decoding = self._vocoder.start([part.slot for part in parts], codes, keep=parts[0].keep)
        except NotReady:  # it has just gone away, and nothing of this has reached it
            self._put_back(parts)
        except Exception as error:
            self._lose(parts, error)
        else:
            for part in parts:
                part.stream.held = True
            self._flights.append(Flight(parts, codes, decoding, began))

    def _put_back(self, parts: list[Part]) -> None:
        with self._changed:
            for part in parts:
                stream = part.stream
                stream.flying, stream.shown = False, part.start
                if part.keep:
                    stream.frames[:0] = part.frames
                if part.fresh:
                    self._free.append(part.slot)
                    stream.slot, stream.last = None, 0

    def _lose(self, parts: list[Part], error: Exception) -> None:
        """The streams of a call are lost, the worker goes on."""
        self._faults.saw(error)
        for part in parts:
            part.sequence.fail(error)
            part.stream.flying = False

    def _land(self, flight: Flight) -> None:
        """Hands over what a call has made; waits for it if it is not ready."""
        parts, codes = flight.parts, flight.codes
        try:
            sounds = flight.decoding.result()
        except Exception as error:
            self._lose(parts, error)
            return
        self._faults.saw(None)
        now = self._clock()
        seconds = flight.decoding.seconds
        fresh = sum(len(part.frames) - part.start for part in parts)
        # A call of fixed length takes the same time however little of it is new; only openings are handed over in parts.
        fresh = max(fresh, self._vocoder.quantum or 0)
        self._pace.saw_codec(fresh, now - flight.began if seconds is None else seconds)
        for part, sound, stream_codes in zip(parts, sounds, codes, strict=True):
            part.stream.flying = False
            if sound is None:
                part.sequence.fail(EngineFailure("the codec made samples that are not finite"))
                continue
            new, frame_bytes = slice(part.start, len(part.frames)), len(sound) // codes.shape[2]
            pcm = sound[new.start * frame_bytes : new.stop * frame_bytes]
            self._hand_over(part.sequence, Chunk(pcm, stream_codes[:, new].copy()), now)
        for part in parts:
            part.sequence.channel.wake()

    def _pack(self, parts: list[Part]) -> Int32:
        """Codes [streams, codebooks, frames], the same number of each, filled up to the quantum with zeros."""
        frames = np.concatenate([frame for part in parts for frame in part.frames])
        codes = frames.reshape(len(parts), len(parts[0].frames), -1).transpose(0, 2, 1)
        missing = (self._vocoder.quantum or codes.shape[2]) - codes.shape[2]
        return np.ascontiguousarray(np.pad(codes, ((0, 0), (0, 0), (0, missing))) if missing else codes)

    def _hand_over(self, sequence: Sequence, chunk: Chunk, now: float) -> None:
        if sequence.finished not in (None, "stop", "length"):
            return
        if sequence.first_audio_at is None:
            sequence.first_audio_at = now
        sequence.playout.hand_over(chunk.num_frames, now)
        sequence.channel.put(chunk)
