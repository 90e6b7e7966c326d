"""Two real engines behind one speaker: a crowd of unlike requests that loses an engine, and what the two share."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from duetts.config import EngineConfig, Limits, ProcessConfig, VoicesConfig
from duetts.engine.inprocess import start_speaker
from duetts.engine.remote import RemoteSpeaker
from duetts.errors import EngineFailure
from duetts.json_fields import read_json
from duetts.model_config import ModelConfig
from duetts.synthesizer import Synthesizer
from duetts.text.prompt import build_prompt, voice_positions
from duetts.text.tokenizer import Tokenizer
from duetts.types import Outcome, Reference, Sampling, SpeechRequest, Utterance, VoiceDraft
from tests.inputs import REF_TEXT, clip
from tests.waiting import LIMIT_S, until

from .test_remote_link import collect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

ENGINE = EngineConfig(device="cpu", cpu_threads=1, max_num_seqs=6, max_queue=64, max_model_len=1024)
CONFIG = ProcessConfig(engines=2, silence_s=5.0, stuck_s=30.0, wait_s=60.0)
REQUESTS, AT_ONCE, SERVED_BEFORE = 64, 24, 12
TEXTS = ("Hi.", "One two three.", "Hello, how are you?", "A longer sentence, with a comma and 42 in it. " * 2)
VOICES = [
    (np.random.default_rng(number).integers(0, 32, (4, frames)).astype(np.int32), f"This is voice number {number}.")
    for number, frames in enumerate((90, 40, 130))
]


def crowd(folder: Path) -> list[Utterance]:
    """Unlike requests: half are streamed, three in four have one of three voices, all have other texts, seeds, lengths and ways
    of sampling."""
    tokenizer = Tokenizer.load(folder, ModelConfig.from_dict(read_json(folder / "config.json")))
    work = []
    for index in range(REQUESTS):
        voice = index % 4 - 1
        references = [VOICES[voice]] if voice >= 0 else []
        sampling = Sampling(
            temperature=(0.7, 0.0, 1.2)[index % 3], top_k=(30, 0, 5, 200)[index // 4 % 4], top_p=(0.9, 1.0, 0.5)[index % 3],
            repetition_penalty=(1.0, 1.3)[index % 2],
        )  # fmt: skip
        prompt = build_prompt(tokenizer, references, [], TEXTS[index // 2 % len(TEXTS)])
        one = Utterance(f"r{index}", prompt, sampling, 1000 + index, 8 + 6 * (index % 5), streaming=index // 4 % 2 == 0)
        if references:
            one = replace(one, voice_key=f"voice {voice}", shared_positions=voice_positions(tokenizer, references))
        work.append(one)
    return work


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def remote(endless_folder: Path) -> AsyncIterator[RemoteSpeaker]:
    speaker = await RemoteSpeaker.start(endless_folder, ENGINE, CONFIG)
    yield speaker
    await speaker.close()


async def alone(folder: Path, work: list[Utterance]) -> list[bytes]:
    """What each is when nobody else is there, by an engine in this process."""
    speaker = start_speaker(folder, ENGINE)
    try:
        return [(await collect(speaker, one))[0] for one in work]
    finally:
        await speaker.close()


def settled(remote: RemoteSpeaker) -> bool:
    stats = remote.stats()
    return stats["engines_up"] == 2 and not stats["open"] and not any(engine["calls"] for engine in stats["engines"])


async def test_a_crowd_loses_an_engine_and_the_others_bytes_are_those_of_their_solo_runs(
    remote: RemoteSpeaker, endless_folder: Path
) -> None:
    work = crowd(endless_folder)
    expected = await alone(endless_folder, work)
    places, done = asyncio.Semaphore(AT_ONCE), [0]

    async def ask(one: Utterance) -> tuple[bytes, Outcome]:
        async with places:
            found = await collect(remote, one)
            done[0] += 1
            return found

    asking = [asyncio.ensure_future(ask(one)) for one in work]
    await until(lambda: done[0] >= SERVED_BEFORE and all(e["frames"] and e["calls"] for e in remote.stats()["engines"]))
    os.kill(remote.stats()["engines"][0]["pid"], signal.SIGKILL)
    found = await asyncio.wait_for(asyncio.gather(*asking), 5 * LIMIT_S)

    lost = [index for index, (_, outcome) in enumerate(found) if outcome.reason != "length"]
    assert 0 < len(lost) < AT_ONCE  # those that it had, and who was given to it before its end was seen
    for index, (one, solo, (pcm, outcome)) in enumerate(zip(work, expected, found, strict=True)):
        assert len(solo) == 2 * 2048 * one.max_frames
        if index in lost:
            assert isinstance(outcome.error, EngineFailure)
            assert len(pcm) < len(solo)
            assert solo.startswith(pcm)
        else:
            assert pcm == solo, one.request_id
    await until(lambda: settled(remote))
    assert [engine["starts"] for engine in remote.stats()["engines"]] == [2, 1]
    again = await asyncio.gather(*(collect(remote, work[index]) for index in lost))
    assert [pcm for pcm, _ in again] == [expected[index] for index in lost]


async def speak(synthesizer: Synthesizer, request: SpeechRequest) -> bytes:
    speech = await synthesizer.start(request)
    return b"".join([chunk.pcm async for chunk in speech])


async def test_a_reference_that_one_engine_has_encoded_is_not_encoded_by_the_other(
    remote: RemoteSpeaker, endless_folder: Path, tmp_path: Path
) -> None:
    """Codes and stored voices belong to the server: whichever engine speaks is given them. One voice that everybody wants is
    spoken by both."""
    await until(lambda: settled(remote))
    before = [engine["frames"] for engine in remote.stats()["engines"]]
    synthesizer = Synthesizer(
        endless_folder, remote, Limits(reference_disk_bytes=0), VoicesConfig(folder=tmp_path, consent_required=False)
    )
    audio = clip("control_pcm16.wav")
    by_clip = SpeechRequest("Hello there.", (Reference(audio, REF_TEXT),), seed=5, max_new_tokens=20)
    first = await asyncio.gather(*(speak(synthesizer, by_clip) for _ in range(8)))
    stored = await synthesizer.voices.add(VoiceDraft("anna", audio, REF_TEXT), replace=False)
    by_name = replace(by_clip, references=(), voice=stored.name)
    second = await asyncio.gather(*(speak(synthesizer, by_name) for _ in range(8)))
    assert set(first) == set(second) == {first[0]}
    assert len(first[0]) == 2 * 2048 * 20
    assert synthesizer.stats()["reference_misses"] == 1
    after = [engine["frames"] for engine in remote.stats()["engines"]]
    assert min(late - early for early, late in zip(before, after, strict=True)) >= 20
