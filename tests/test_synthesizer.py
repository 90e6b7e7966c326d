"""The text side in front of a speaker that only notes what it is asked."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetts.errors import EmptyGeneration, InvalidRequest
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
        yield Chunk(str(utterance.seed).encode(), np.zeros((4, 1), np.int32))
        yield Outcome("stop", 1, 7)

    async def encode_reference(self, wave: Float32) -> Int32:
        self.encoded += 1
        return np.zeros((4, -(-len(wave) // 2048)), np.int32)

    def stats(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass


async def test_a_second_try_is_part_of_what_a_seed_means(tiny_folder: Path) -> None:
    """Else the seed that an answer reports would fail when it is sent again."""
    speaker = NotingSpeaker()
    synthesizer = Synthesizer(tiny_folder, speaker)
    speech = await synthesizer.start(SpeechRequest("Hi.", seed=4))
    assert [chunk.pcm async for chunk in speech] == [b"5"]
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
