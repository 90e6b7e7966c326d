"""The Python door: `TTS("path-or-id").say("...")`, plain functions over an engine in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from duetts.audio.encode import wav_file
from duetts.checkpoint import find_model
from duetts.config import EngineConfig, Limits, VoicesConfig
from duetts.embedded import MODEL_ID, mini_folder
from duetts.engine.inprocess import start_speaker
from duetts.errors import Aborted, InvalidRequest, NotReady
from duetts.synthesizer import Synthesizer
from duetts.types import Float32, Outcome, Reference, SpeechRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Audio:
    """Spoken audio: mono signed 16-bit PCM, its rate in Hz, and how it came about."""

    pcm: bytes
    sample_rate: int
    seed: int
    outcome: Outcome

    @property
    def samples(self) -> Float32:
        """float32 in -1..1."""
        return np.frombuffer(self.pcm, "<i2").astype(np.float32) / 32768.0

    @property
    def duration_s(self) -> float:
        return len(self.pcm) / 2 / self.sample_rate

    def save(self, path: str | Path) -> None:
        """Writes a WAV file."""
        Path(path).write_bytes(wav_file(self.pcm, self.sample_rate))


def resolve_model(model: str | Path | None, revision: str | None = None) -> Path:
    """The folder of a path or hub id; None and "duetts-mini" are the embedded model."""
    return mini_folder() if model is None or str(model) == MODEL_ID else find_model(str(model), revision)


@dataclass(eq=False)
class _Call(Generic[T]):
    """Work on the loop's thread. Both methods run there; it may be given up before it has begun."""

    work: Coroutine[Any, Any, T]
    result: Future[T] = field(default_factory=Future)
    _task: asyncio.Task[T] | None = None
    _given_up: bool = False

    def begin(self) -> None:
        if self._given_up:
            self.work.close()
            return
        self._task = asyncio.get_running_loop().create_task(self.work)
        self._task.add_done_callback(self._end)

    def give_up(self) -> None:
        self._given_up = True
        if self._task is None:
            self.work.close()
        else:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.result.cancel()
        elif (error := task.exception()) is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(task.result())


class TTS:
    """A model loaded in this process. Close it, or use it in a `with` block, to free its threads and memory.

    model: a folder, a hub id, or None for duetts-mini. `voices`: where stored voices are, and which speaks by default. Other
    arguments are fields of `EngineConfig`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        limits: Limits | None = None,
        voices: VoicesConfig | None = None,
        **engine: Any,
    ) -> None:
        folder = resolve_model(model)
        speaker = start_speaker(folder, EngineConfig(device=device, **engine))
        self._synthesizer = Synthesizer(folder, speaker, limits, voices)
        self._closed, self._handing_over = False, threading.Lock()  # nothing is handed to a loop that stops
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="duetts-tts", daemon=True)
        self._thread.start()

    def say(self, text: str, **options: Any) -> Audio:
        """Speaks a text of any length to its end; a long one in pieces, of which `outcome.pieces` tells. Options are those of
        `stream`. Raises an error of `duetts.errors`."""
        return self._wait(self._collect(self._request(text, **options)))

    def stream(self, text: str, **options: Any) -> Iterator[Float32]:
        """Yields float32 samples [n] as they are made. Leaving the loop early stops the engine's work.

        voice: a stored voice or preset by name. reference: path or bytes of a clip to clone, with `reference_text`, what is
        said in it. Others: temperature, top_p, top_k, repetition_penalty, seed, max_new_tokens, chunk_length (UTF-8 bytes of a
        piece of a long text), timeout_s.
        """
        speech = self._wait(self._synthesizer.start(self._request(text, streaming=True, **options)))
        chunks: AsyncIterator[Any] = aiter(speech)
        try:
            while (chunk := self._wait(_next(chunks))) is not None:
                yield np.frombuffer(chunk.pcm, "<i2").astype(np.float32) / 32768.0
        finally:
            if not self._closed:
                self._wait(speech.aclose())

    @property
    def sample_rate(self) -> int:
        return self._synthesizer.info.sample_rate

    def close(self) -> None:
        """Ends what still runs, in other threads too, and frees the model. A second call does nothing."""
        with self._handing_over:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut(self) -> None:
        await self._synthesizer.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def __enter__(self) -> TTS:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work on the loop's thread. Raises `NotReady` after `close`, `Aborted` if it came in between."""
        call = _Call(work)
        try:
            with self._handing_over:
                if self._closed:
                    call.give_up()
                    call.result.cancel()
                    raise NotReady("this TTS is closed")
                self._loop.call_soon_threadsafe(call.begin)
            return call.result.result()
        except CancelledError as error:
            raise Aborted("the TTS was closed") from error
        finally:
            if not call.result.done():  # an interrupt, which may come at any point above
                with self._handing_over:
                    if not self._closed:  # else it is being ended anyhow
                        self._loop.call_soon_threadsafe(call.give_up)

    async def _collect(self, request: SpeechRequest) -> Audio:
        speech = await self._synthesizer.start(request)
        pcm = b"".join([chunk.pcm async for chunk in speech])
        assert speech.outcome is not None, "a speech that ended has an outcome"
        return Audio(pcm, speech.sample_rate, speech.seed, speech.outcome)

    def _request(
        self, text: str, *, reference: str | Path | bytes | None = None, reference_text: str | None = None, **options: Any
    ) -> SpeechRequest:
        if (reference is None) != (reference_text is None):
            missing = "reference" if reference is None else "reference_text"
            raise InvalidRequest(f"a reference needs audio and transcript: {missing} is missing", field=missing)
        references: tuple[Reference, ...] = ()
        if reference is not None and reference_text is not None:
            audio = reference if isinstance(reference, bytes) else Path(reference).read_bytes()
            references = (Reference(audio, reference_text),)
        return SpeechRequest(text, references=references, request_id="python", **options)


async def _next(chunks: AsyncIterator[T]) -> T | None:
    return await anext(chunks, None)
