"""A full server says so before it fetches or reads a clip, on every door that speaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from duetts.config import Limits, MediaConfig, ServerConfig, VoicesConfig
from duetts.errors import Overloaded
from duetts.server.app import create_app
from duetts.synthesizer import Synthesizer
from duetts.types import Address, Chunk, Float32, Int32, Outcome, Reference, SpeakerInfo, SpeechRequest, Utterance
from tests.inputs import REF_TEXT, clip
from tests.internet import Host, listening, sending

from .conftest import NATIVE, error_of
from .test_addresses import Told, events, fish, form, listed, live, references, socket, speech
from .test_auth import serving

CLIP = clip("control_pcm16.wav")
RETRY_S = 7.2
DOORS: list[Callable[[httpx.Client, str], Told]] = [speech, listed, references, form, events, socket, fish, live]


class CrowdedSpeaker:
    """Speaks a frame of silence; tells that it is full as long as it is, and how often it was asked to encode."""

    def __init__(self) -> None:
        self.info = SpeakerInfo("fish_qwen3_omni", 44100, 2048, 4, 1024)
        self.full, self.alive, self.encoded = True, True, 0

    async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        yield Chunk(bytes(4096), np.zeros((4, 1), np.int32))
        yield Outcome("stop", 1, 7)

    async def encode_reference(self, wave: Float32) -> Int32:
        self.encoded += 1
        return np.zeros((4, -(-len(wave) // 2048)), np.int32)

    def stats(self) -> dict[str, Any]:
        return {"full": self.full, "alive": self.alive, "retry_after_s": RETRY_S}

    async def close(self) -> None:
        pass


@asynccontextmanager
async def served(folder: Path, voices: Path) -> AsyncIterator[tuple[CrowdedSpeaker, httpx.Client, Host]]:
    speaker, limits, named = CrowdedSpeaker(), Limits(reference_disk_bytes=0), VoicesConfig(voices, "none")
    synthesizer = Synthesizer(folder, speaker, limits, named, MediaConfig(domains=("127.0.0.1",)))
    async with listening(sending(CLIP)) as host:
        with serving(create_app(synthesizer, ServerConfig((NATIVE,), limits=limits, voices=named))) as http:
            yield speaker, http, host
    await synthesizer.close()


async def test_a_full_server_asks_nobody_for_a_clip_on_any_door(tiny_folder: Path, tmp_path: Path) -> None:
    async with served(tiny_folder, tmp_path) as (speaker, http, host):
        address = f"http://127.0.0.1:{host.port}/anna.wav"
        for door in DOORS:
            found = await asyncio.to_thread(door, http, address)
            assert "every place is taken" in found.message, door.__name__
            assert found.status in (429, 0), door.__name__
            assert found.code in ("queue_full", None), door.__name__
        assert (host.connections, speaker.encoded) == (0, 0)
        speaker.full = False
        for door in DOORS:
            assert await asyncio.to_thread(door, http, address) == Told(), door.__name__
        assert host.connections >= len(DOORS)
        assert speaker.encoded == 1


async def test_a_batch_that_brings_a_clip_is_refused_as_a_whole(tiny_folder: Path, tmp_path: Path) -> None:
    async with served(tiny_folder, tmp_path) as (speaker, http, host):
        cloned = {"input": "Hi.", "ref_audio": f"http://127.0.0.1:{host.port}/anna.wav", "ref_text": REF_TEXT}
        body = {"items": [{"input": "Ho."}, cloned, {"input": ""}]}
        answer = await asyncio.to_thread(http.post, "/v1/audio/speech/batch", json=body)
        error_of(answer, 429, "queue_full", None)
        assert answer.headers["retry-after"] == "8"
        assert host.connections == 0
        speaker.full = False
        answer = await asyncio.to_thread(http.post, "/v1/audio/speech/batch", json=body)
        assert [result["status"] for result in answer.json()["results"]] == ["success", "success", "error"]


async def test_what_is_wrong_with_a_request_is_told_first(tiny_folder: Path, tmp_path: Path) -> None:
    async with served(tiny_folder, tmp_path) as (_, http, _):
        for wrong, code, field in (
            ({"ref_text": ""}, "reference_text_required", "ref_text"),
            ({"temperature": 9}, "out_of_range", "temperature"),
            ({"max_new_tokens": 2000}, "context_length_exceeded", "max_new_tokens"),
        ):
            body = {"input": "Hi.", "ref_audio": "https://a.example/x", "ref_text": REF_TEXT, **wrong}
            error_of(await asyncio.to_thread(http.post, "/v1/audio/speech", json=body), 400, code, field)


async def test_who_has_begun_and_who_waits_for_an_engine_go_on(tiny_folder: Path) -> None:
    speaker = CrowdedSpeaker()
    speaker.full = False
    synthesizer = Synthesizer(tiny_folder, speaker)
    request = SpeechRequest("Hi.", (Reference(CLIP, REF_TEXT),), seed=1, max_new_tokens=5)
    speech = await synthesizer.start(request)
    assert [chunk async for chunk in speech]
    assert speech.outcome is not None
    speaker.full = True
    with pytest.raises(Overloaded):
        await synthesizer.start(request)
    later = await synthesizer.start(SpeechRequest("Ho.", request.references, continues=speech.outcome.said, max_new_tokens=5))
    await later.aclose()
    speaker.alive = False  # no engine is up: a request may wait for one, and its clip is read meanwhile
    await (await synthesizer.start(request)).aclose()
    unknown = SpeechRequest("Hi.", (Reference(Address("https://127.0.0.1/x"), REF_TEXT),))
    speaker.alive = True
    with pytest.raises(Overloaded) as refusal:
        await synthesizer.start(unknown)
    assert refusal.value.retry_after_s == RETRY_S
