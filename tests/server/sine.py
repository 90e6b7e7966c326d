"""A speech service that hums: sine chunks whose pitch follows the seed, and knobs for everything that can go wrong."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from duetts.audio.decode import decode_audio
from duetts.config import Limits, MediaConfig, VoicesConfig
from duetts.errors import DuettsError, EngineFailure, InvalidRequest, Overloaded
from duetts.service import Arriving
from duetts.text.arrival import ArrivingText
from duetts.types import Chunk, Float32, Granularity, Int32, Outcome, Said, Source, SpeakerInfo, Speech, SpeechRequest, Timings
from duetts.voices.consents import ConsentStore
from duetts.voices.fetch import Fetcher
from duetts.voices.library import SpokenClip, SpokenVoice, VoiceLibrary
from duetts.voices.reference import ReferenceCodes
from tests.internet import Internet
from tests.waiting import until

RATE, FRAME = 44100, 2048


@dataclass
class Knobs:
    """`error` is raised before the chunk of index `error_at`; -1 is at `start`. Waits are in seconds. `places` speeches have
    room at once. A text in `failing` fails after its first chunk. The chunk `held_at` waits until that is changed."""

    num_chunks: int = 3
    error: Exception | None = None
    error_at: int = 0
    start_wait_s: float = 0.0
    chunk_wait_s: float = 0.0
    held_at: int = -1
    alive: bool = True
    places: int = 1000
    failing: str = ""
    pcm: bytes | None = None  # of every chunk, instead of a frame of hum


@dataclass
class SineService:
    """Fulfils `SpeechService`. `requests`, `spoken`, `waves` and `aborted` record what happened."""

    limits: Limits
    config: VoicesConfig = field(default_factory=VoicesConfig)
    fetcher: Fetcher | None = None  # without one all addresses are refused
    knobs: Knobs = field(default_factory=Knobs)
    requests: list[SpeechRequest] = field(default_factory=list)
    spoken: list[SpokenVoice | None] = field(default_factory=list)  # the voice of each request without references
    encoded: int = 0
    waves: list[Float32] = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)
    seeds: int = 1000  # the last one that was chosen for a request without one
    speaking: int = 0
    most_speaking: int = 0
    loop: asyncio.AbstractEventLoop | None = None  # of the server

    def __post_init__(self) -> None:
        self.info = SpeakerInfo("sine", RATE, FRAME, 4, 2048, weights="untrained", codec_id="sine")
        fetcher = self.fetcher or Fetcher(MediaConfig(), self.limits, resolve=Internet().resolve)
        self.references = ReferenceCodes(self.encode, RATE, self.limits, fetcher=fetcher)
        folder = self.config.folder
        self.voices = VoiceLibrary(self.config, folder / "presets", self.info, self.references, self)
        self.consents = ConsentStore(folder / "consents", 3, self.limits.reference_bytes, 8)

    def reset(self) -> None:
        self.knobs = Knobs()
        self.requests.clear()
        self.spoken.clear()
        self.waves.clear()
        self.aborted.clear()
        self.encoded = self.most_speaking = 0
        self.seeds = 1000  # so that a test hears the same whatever ran before it
        shutil.rmtree(self.config.folder, ignore_errors=True)

    def stats(self) -> dict[str, Any]:
        return {"alive": self.knobs.alive}

    def arriving(self, granularity: Granularity, most: int) -> Arriving:
        return ArrivingText(granularity, most)

    async def codes_of(self, audio: Source, field: str) -> Int32:
        file = await self.references.file(audio, field)
        return await self.encode(decode_audio(file, rate=RATE, min_s=0.01, max_s=60, field=field))

    async def sound_of(self, codes: Int32, field: str, request_id: str) -> bytes:
        """The first codebook's codes, a frame each."""
        if codes.shape[0] != 4 or codes.max() > 1023:
            raise InvalidRequest(f"{field} has no 4 codebooks of 1024", field=field)
        await asyncio.sleep(self.knobs.chunk_wait_s)
        return np.repeat(codes[0], FRAME).astype("<i2").tobytes()

    async def encode(self, wave: Float32) -> Int32:
        """Codes that tell the length and the level."""
        self.encoded += 1
        return np.full((4, -(-len(wave) // FRAME)), round(1000 * float(np.abs(wave).mean())), np.int32)

    def clean_transcript(self, text: str | None) -> str:
        if text is None or not text.strip():
            raise InvalidRequest("ref_text is missing", field="ref_text", code="reference_text_required")
        return text.strip()

    def check_room(self, codes: Int32, transcript: str) -> None:
        if codes.shape[1] + len(transcript) > self.info.max_model_len:
            raise InvalidRequest("there is no room", field="ref_text", code="context_length_exceeded")

    async def speak_clip(self, seed: int) -> SpokenClip | None:
        return SpokenClip(hum(seed, 0) * 50, np.full((4, 50), seed, np.int32), "Hum.")

    async def start(self, request: SpeechRequest) -> Speech:
        self.requests.append(request)
        self.loop = asyncio.get_running_loop()
        knobs = self.knobs
        check(request)
        try:
            await asyncio.sleep(knobs.start_wait_s)
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        if knobs.error is not None and knobs.error_at < 0:
            raise knobs.error
        for reference in request.references:
            if isinstance(reference.audio, np.ndarray):
                continue
            audio = await self.references.file(reference.audio, reference.origin)
            self.waves.append(await asyncio.to_thread(self._decode, audio, reference.origin))
        voice, hit = "", None
        if not request.references:
            spoken = await self.voices.choose(request.voice, request.voice_field, request.voice_or_default)
            self.spoken.append(spoken)
            voice, hit = (spoken.name, spoken.hit) if spoken else ("none", None)
        self.seeds += 1
        seed = self.seeds if request.seed is None else request.seed
        if request.continues is not None:
            seed = request.continues.seed
        return Speech(
            self._take_place(seed, request.text, knobs), request_id=request.request_id, seed=seed, input_tokens=7,
            sample_rate=RATE, voice=voice, reference_hit=hit,
        )  # fmt: skip

    def _decode(self, audio: bytes, field: str) -> Float32:
        low, high = self.limits.reference_min_s, self.limits.reference_max_s
        return decode_audio(audio, rate=RATE, min_s=low, max_s=high, field=field)

    async def _take_place(self, seed: int, text: str, knobs: Knobs) -> AsyncGenerator[Chunk | Outcome, None]:
        if self.speaking >= knobs.places:
            raise Overloaded("every place is taken", retry_after_s=0.05)
        self.speaking += 1
        self.most_speaking = max(self.most_speaking, self.speaking)
        try:
            async with aclosing(self._hum(seed, text, knobs)) as items:
                async for item in items:
                    yield item
        finally:
            self.speaking -= 1

    async def _hum(self, seed: int, text: str, knobs: Knobs) -> AsyncGenerator[Chunk | Outcome, None]:
        ended = False
        try:
            for index in range(knobs.num_chunks):
                await asyncio.sleep(knobs.chunk_wait_s)
                await until(lambda index=index: knobs.held_at != index)  # type: ignore[misc]
                if knobs.error is not None and knobs.error_at == index:
                    raise knobs.error
                if index and text == knobs.failing:
                    raise EngineFailure("lost")
                yield Chunk(knobs.pcm or hum(seed, index), np.zeros((10, 1), np.int32))
            ended = True
            error = knobs.error if isinstance(knobs.error, DuettsError) and knobs.error_at >= knobs.num_chunks else None
            timings = Timings(0.001, 0.002, 0.003, 0.004)
            said = Said(text, np.zeros((10, knobs.num_chunks), np.int32), seed + 1, 0, time.monotonic())
            yield Outcome("failed" if error else "stop", knobs.num_chunks, 7, timings, error, said=said)
        finally:
            if not ended:
                self.aborted.set()


def hum(seed: int, index: int) -> bytes:
    """One frame of PCM."""
    times = (np.arange(FRAME) + index * FRAME) / RATE
    return (8000 * np.sin(2 * np.pi * (100 + seed % 400) * times)).astype("<i2").tobytes()


def check(request: SpeechRequest) -> None:
    """A little of what the synthesizer checks."""
    if not request.text.strip() or "\0" in request.text:
        raise InvalidRequest("input is empty or holds a NUL character", field="input")
    if request.max_new_tokens is not None and not 1 <= request.max_new_tokens <= 2048:
        raise InvalidRequest("max_new_tokens must be between 1 and 2048", field="max_new_tokens", code="out_of_range")
