"""The text side in front of a speaker that only notes what it is asked."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetts.errors import EmptyGeneration, InvalidRequest
from duetts.narration import piece_seed
from duetts.synthesizer import Synthesizer
from duetts.types import Chunk, Float32, Int32, Outcome, Reference, SpeakerInfo, SpeechRequest, Utterance

from .inputs import REF_TEXT, clip


class NotingSpeaker:
    """Speaks one frame that holds its seed; an even seed comes to nothing."""

    def __init__(self, max_model_len: int = 1024) -> None:
        self.info = SpeakerInfo("fish_qwen3_omni", 44100, 2048, 4, max_model_len)
        self.asked: list[Utterance] = []
        self.encoded = 0

    async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        self.asked.append(utterance)
        if utterance.seed % 2 == 0:
            yield Outcome("failed", 0, 7, error=EmptyGeneration("nothing"))
            return
        yield Chunk(sound_of(utterance.seed), np.full((4, 1), len(self.asked), np.int32))
        yield Outcome("stop", 1, 7)

    async def encode_reference(self, wave: Float32) -> Int32:
        self.encoded += 1
        return np.zeros((4, -(-len(wave) // 2048)), np.int32)

    def stats(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass


def sound_of(seed: int) -> bytes:
    """Four samples that hold a seed."""
    return seed.to_bytes(8, "little", signed=True)


async def spoken(synthesizer: Synthesizer, request: SpeechRequest) -> Outcome:
    speech = await synthesizer.start(request)
    assert [chunk async for chunk in speech]
    assert speech.outcome is not None
    return speech.outcome


async def test_a_speech_goes_on_from_another(tiny_folder: Path) -> None:
    """As a long text would: the prompt holds what was said and its codes, the seed moves on, and no place is asked for."""
    speaker = NotingSpeaker()
    synthesizer = Synthesizer(tiny_folder, speaker)
    reference = Reference(clip("control_pcm16.wav"), REF_TEXT)
    request = SpeechRequest("Hello there.", (reference,), seed=7, streaming=True, max_new_tokens=5)
    first = await spoken(synthesizer, request)
    assert first.said is not None
    assert (first.said.text, first.said.codes.tolist()) == ("Hello there.", [[1]] * 4)
    going_on = replace(request, text="And you?", continues=first.said)
    second = await spoken(synthesizer, going_on)
    alone = await spoken(synthesizer, replace(request, text="And you?"))
    asked = [utterance for utterance in speaker.asked if utterance.seed % 2]  # without those that came to nothing
    later, bare = asked[1].prompt, asked[2].prompt
    assert later.shape[1] > bare.shape[1] + 3
    assert (later[1:] == 1).all(axis=0).sum() == 1
    assert (bare[1:] == 1).all(axis=0).sum() == 0
    assert [utterance.continues for utterance in asked] == [False, True, False]
    assert asked[1].seed == piece_seed(7, 1) ^ 1
    assert asked[1].lead_s <= 2048 / 44100
    assert second.said is not None
    assert second.said.seed == piece_seed(7, 2)
    assert alone.said is not None
    third = await spoken(synthesizer, replace(going_on, conditioned=False))
    assert np.array_equal(speaker.asked[-1].prompt, bare)
    assert third.said is not None
    assert third.said.codes.shape == (4, 0)


async def test_a_bound_for_each_piece_is_the_smaller_of_two(tiny_folder: Path) -> None:
    speaker = NotingSpeaker()
    synthesizer = Synthesizer(tiny_folder, speaker)
    request = SpeechRequest("Hi.", voice="none", seed=1, streaming=True)
    await spoken(synthesizer, request)
    for most in (10, 1000):
        await spoken(synthesizer, replace(request, max_piece_frames=most))
    await spoken(synthesizer, replace(request, max_piece_frames=1000, max_new_tokens=33))
    from_text = speaker.asked[0].max_frames
    assert [utterance.max_frames for utterance in speaker.asked] == [from_text, 10, from_text, 33]
    with pytest.raises(InvalidRequest, match="max_new_tokens is -1"):
        await synthesizer.start(SpeechRequest("Hi.", max_piece_frames=-1))


async def test_a_second_try_is_part_of_what_a_seed_means(tiny_folder: Path) -> None:
    """Else the seed that an answer reports would fail when it is sent again."""
    speaker = NotingSpeaker()
    synthesizer = Synthesizer(tiny_folder, speaker)
    speech = await synthesizer.start(SpeechRequest("Hi.", seed=4))
    assert [chunk.pcm async for chunk in speech] == [sound_of(5)]
    assert speech.seed == 4
    for _ in range(8):
        unseeded = await synthesizer.start(SpeechRequest("Hi."))
        first = [chunk.pcm async for chunk in unseeded]
        again = await synthesizer.start(SpeechRequest("Hi.", seed=unseeded.seed))
        assert [chunk.pcm async for chunk in again] == first


async def test_what_cannot_fit_is_refused_before_a_clip_is_encoded(tiny_folder: Path) -> None:
    reference = Reference(clip("control_pcm16.wav"), REF_TEXT)
    request = SpeechRequest("Hi.", references=(reference,), max_new_tokens=20)
    roomy = NotingSpeaker()
    await Synthesizer(tiny_folder, roomy).start(request)
    speech = await Synthesizer(tiny_folder, roomy).start(request)
    assert roomy.encoded == 2
    assert [chunk.num_frames async for chunk in speech] == [1]
    needed = speech.input_tokens + 20
    assert roomy.asked[-1].prompt.shape == (5, speech.input_tokens)
    exact = NotingSpeaker(needed)
    await Synthesizer(tiny_folder, exact).start(request)
    tight = NotingSpeaker(needed - 1)
    with pytest.raises(InvalidRequest) as refusal:
        await Synthesizer(tiny_folder, tight).start(request)
    assert refusal.value.code == "context_length_exceeded"
    assert tight.encoded == 0
