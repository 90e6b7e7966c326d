"""The engine under load: whoever shares pages, steps and voices, loses them or leaves, each hears the same bytes."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from duetts.engine.inprocess import InProcessSpeaker
from duetts.errors import EngineFailure
from duetts.json_fields import read_json
from duetts.model_config import ModelConfig
from duetts.text.prompt import build_prompt, voice_positions
from duetts.text.tokenizer import Tokenizer
from duetts.types import Int32, Outcome, Sampling, Utterance
from tests.waiting import holding, until

from .test_engine import collect, settled, speaker

TEXTS = ("Hi.", "One two three.", "Hello, how are you?", "A longer sentence, with a comma and 42 in it. " * 3)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.load(tiny_folder, ModelConfig.from_dict(read_json(tiny_folder / "config.json")))


def voice(number: int, frames: int) -> tuple[Int32, str]:
    codes = np.random.default_rng(number).integers(0, 32, (4, frames)).astype(np.int32)
    return codes, f"This is voice number {number}."


def utterance(tokenizer: Tokenizer, index: int, voices: list[tuple[Int32, str]]) -> Utterance:
    """Mixed texts, seeds, voices, lengths and ways of sampling; every other one has a listener."""
    sampling = Sampling(
        temperature=(0.7, 0.0, 1.2)[index % 3], top_k=(30, 0, 5, 200)[index % 4], top_p=(0.9, 1.0, 0.5)[index % 3],
        repetition_penalty=(1.0, 1.3)[index % 2],
    )  # fmt: skip
    references = [voices[index % len(voices)]] if index % 4 else []
    prompt = build_prompt(tokenizer, references, [], TEXTS[index % len(TEXTS)])
    return Utterance(
        f"r{index}", prompt, sampling, 1000 + index, 10 + 7 * (index % 5),
        streaming=index % 2 == 0, shared_positions=voice_positions(tokenizer, references),
    )  # fmt: skip


async def test_thirty_two_at_once_some_of_whom_leave(endless_folder: Path, tokenizer: Tokenizer) -> None:
    voices = [voice(number, frames) for number, frames in enumerate((90, 40, 170))]
    work = [utterance(tokenizer, index, voices) for index in range(32)]
    async with speaker(endless_folder) as own:
        alone = [await collect(own, one) for one in work]
        await settled(own)
    chance = random.Random(5)
    leaving = {one.request_id: chance.randrange(0, 4) for one in work[::4]}

    async def take_part(own: InProcessSpeaker, one: Utterance) -> bytes | None:
        await asyncio.sleep(chance.random() * 0.2)
        if one.request_id not in leaving:
            return (await collect(own, one))[0]
        stream = own.speak(one)
        for _ in range(leaving[one.request_id]):
            await anext(stream)
        await stream.aclose()
        return None

    async with speaker(endless_folder, kv_positions=1600) as own:
        together = await asyncio.gather(*(take_part(own, one) for one in work))
        await settled(own)
        stats = own.stats()
    for one, (pcm, _), found in zip(work, alone, together, strict=True):
        assert found == (None if one.request_id in leaving else pcm), one.request_id
    assert stats["prefix_positions_reused"] > 0
    assert stats["pages_used"] == 0


async def test_a_voice_is_read_once(endless_folder: Path, tokenizer: Tokenizer) -> None:
    known = voice(1, 216)
    shared = voice_positions(tokenizer, [known])
    prompts = [build_prompt(tokenizer, [known], [], text) for text in TEXTS]
    work = [
        Utterance(f"r{index}", prompt, Sampling(), index, 12, shared_positions=shared, streaming=True)
        for index, prompt in enumerate(prompts)
    ]
    async with speaker(endless_folder) as own:
        alone = [await collect(own, replace(one, shared_positions=shared)) for one in work[:1]]
    async with speaker(endless_folder) as own:
        found = await asyncio.gather(*(collect(own, one) for one in work))
        assert own.stats()["prefix_positions_reused"] == 3 * (shared - shared % 16)
        again = await asyncio.gather(*(collect(own, one) for one in work))
        await settled(own)
    assert found[0][0] == alone[0][0]
    assert [pcm for pcm, _ in found] == [pcm for pcm, _ in again]


async def test_complete_answers_that_lose_their_pages_are_computed_again_to_the_same_bytes(
    endless_folder: Path, tokenizer: Tokenizer
) -> None:
    work = [
        Utterance(f"r{index}", build_prompt(tokenizer, [], [], TEXTS[index % 3]), Sampling(), index, 120) for index in range(5)
    ]
    async with speaker(endless_folder, kv_positions=8192) as own:
        expected = await asyncio.gather(*(collect(own, one) for one in work))
        assert own.stats()["preemptions"] == 0
    async with speaker(endless_folder, 256, kv_positions=480) as own:  # three of them fit at their full length
        found = await asyncio.gather(*(collect(own, one) for one in work))
        assert own.stats()["preemptions"] > 0
        await settled(own)
    assert [pcm for pcm, _ in found] == [pcm for pcm, _ in expected]


async def test_a_listener_takes_the_place_of_a_complete_answer(endless_folder: Path, tokenizer: Tokenizer) -> None:
    prompt = build_prompt(tokenizer, [], [], TEXTS[0])
    async with speaker(endless_folder, max_num_seqs=1) as own:
        patient = Utterance("patient", prompt, Sampling(), 1, 150)
        expected, _ = await collect(own, patient)
        ends: list[str] = []

        async def heard(one: Utterance) -> tuple[bytes, Outcome]:
            found = await collect(own, one)
            ends.append(one.request_id)
            return found

        with holding(own._engine._device, "launch"):
            running = asyncio.ensure_future(heard(patient))
            await until(lambda: own.stats()["running"] == 1)
            listening = asyncio.ensure_future(heard(Utterance("listener", prompt, Sampling(), 2, 20, streaming=True)))
            await until(lambda: own.stats()["open"] == 2)
        assert (await running)[0] == expected
        assert (await listening)[1].reason == "length"
        assert ends == ["listener", "patient"]
        await settled(own)


async def test_every_chunk_policy_gives_the_same_bytes(endless_folder: Path, tokenizer: Tokenizer) -> None:
    one = Utterance("r", build_prompt(tokenizer, [], [], TEXTS[1]), Sampling(), 7, 27)
    async with speaker(endless_folder) as own:
        expected, _ = await collect(own, one)
    for first, largest in ((1, 1), (1, 16), (2, 3), (3, 2), (4, 4), (16, 16)):
        async with speaker(endless_folder, first_chunk=first, largest_chunk=largest) as own:
            for streaming in (True, False):
                sizes, pcm = [], b""
                async for item in own.speak(replace(one, streaming=streaming)):
                    if not isinstance(item, Outcome):
                        sizes.append(item.num_frames)
                        pcm += item.pcm
                assert pcm == expected, (first, largest, streaming)
                if streaming:
                    assert min(first, largest, 4) <= sizes[0] <= min(2 * first, largest, 4)
                    assert max(sizes) <= largest


async def test_a_poisoned_word_harms_nobody_else(endless_folder: Path, tokenizer: Tokenizer) -> None:
    """The embedding of one byte is not a number: whoever says it fails, and the pages it had serve others afterwards."""
    prompts = [build_prompt(tokenizer, [], [], text) for text in TEXTS[:3]]
    healthy = [Utterance(f"h{index}", prompt, Sampling(), index, 20) for index, prompt in enumerate(prompts)]
    poisoned = Utterance("poisoned", build_prompt(tokenizer, [], [], "Zebra zone."), Sampling(), 9, 20)
    async with speaker(endless_folder) as own:
        expected = [await collect(own, one) for one in healthy]
        slow = own._engine._device._model.slow  # type: ignore[attr-defined]
        with torch.inference_mode():
            slow.embeddings.weight[ord("Z")] = torch.nan
        (_, bad), *found = await asyncio.gather(*(collect(own, one) for one in [poisoned, *healthy]))
        again = [await collect(own, one) for one in healthy]
        await settled(own)
    assert isinstance(bad.error, EngineFailure)
    assert [pcm for pcm, _ in found] == [pcm for pcm, _ in expected] == [pcm for pcm, _ in again]


async def test_a_speech_that_repeats_itself_for_ever_ends(endless_folder: Path, tokenizer: Tokenizer) -> None:
    one = Utterance("r", build_prompt(tokenizer, [], [], TEXTS[0]), Sampling(temperature=0.0), 1, 400, max_repeats=12)
    async with speaker(endless_folder) as own:
        own._engine._device._model.slow.head[1:] = 0  # type: ignore[attr-defined]
        own._engine._device._model.slow.head[0] = 1e-3  # type: ignore[attr-defined]
        _, outcome = await collect(own, one)
        _, unbounded = await collect(own, replace(one, max_repeats=0))
    assert outcome.reason == unbounded.reason == "length"
    assert outcome.num_frames < unbounded.num_frames == 400
