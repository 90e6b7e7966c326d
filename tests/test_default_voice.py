"""The default voice that a trained model speaks for itself, from the synthesizer's first request on."""

import io
import wave
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetts.config import VoicesConfig
from duetts.synthesizer import CLIP_TEXT, Synthesizer
from duetts.types import Chunk, FinishReason, Float32, Int32, Outcome, SpeakerInfo, SpeechRequest, Utterance
from duetts.voices.store import VoiceStore

FRAME = 2048


class SteadySpeaker:
    """Speaks so many frames of whatever it is asked; their codes tell the seed. Encodes nothing."""

    def __init__(self, num_frames: int = 150, reason: FinishReason = "stop", weights: str = "trained") -> None:
        self.info = SpeakerInfo("fish_qwen3_omni", 44100, FRAME, 4, 2048, weights=weights, codec_id="codec")
        self.num_frames, self.reason = num_frames, reason
        self.asked: list[Utterance] = []

    async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        self.asked.append(utterance)
        samples = np.random.default_rng(utterance.seed % 2**32).integers(-3000, 3000, FRAME).astype("<i2")
        for _ in range(self.num_frames):
            yield Chunk(samples.tobytes(), np.full((4, 1), utterance.seed % 8, np.int32))
        yield Outcome(self.reason, self.num_frames, 7)

    async def encode_reference(self, wave: Float32) -> Int32:
        raise AssertionError("what the model spoke has codes already")

    def stats(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass


async def test_one_voice_for_all_requests_and_after_a_restart(tiny_folder: Path, tmp_path: Path) -> None:
    speaker = SteadySpeaker()
    synthesizer = Synthesizer(tiny_folder, speaker, voices=VoicesConfig(tmp_path))
    await synthesizer.prepare()
    assert len(speaker.asked) == 1
    speeches = [await synthesizer.start(SpeechRequest(text)) for text in ("One.", "Two.", "Three.")]
    for speech in speeches:
        assert [chunk async for chunk in speech]
        assert speech.voice == synthesizer.voices.default_name
        assert speech.input_audio_tokens == 150
    first, *rest = speaker.asked[1:]
    assert len({utterance.voice_key for utterance in (first, *rest)}) == 1
    assert first.shared_positions > 150
    assert len({utterance.seed for utterance in rest}) == 2
    stored = VoiceStore(tmp_path, 9, 9).find(synthesizer.voices.default_name)
    assert stored is not None
    assert stored.voice.transcript == CLIP_TEXT
    with wave.open(io.BytesIO(stored.audio())) as clip:
        assert (clip.getframerate(), clip.getnframes()) == (44100, 150 * FRAME)
    later = SteadySpeaker()
    restarted = Synthesizer(tiny_folder, later, voices=VoicesConfig(tmp_path))
    again = await restarted.start(SpeechRequest("One."))
    assert [chunk async for chunk in again]
    assert np.array_equal(later.asked[0].prompt, first.prompt)
    assert len(later.asked) == 1


@pytest.mark.parametrize(("num_frames", "reason"), [(20, "stop"), (150, "length")], ids=["too short", "without an end"])
async def test_a_model_that_does_not_speak_well_speaks_bare(
    tiny_folder: Path, tmp_path: Path, num_frames: int, reason: FinishReason
) -> None:
    speaker = SteadySpeaker(num_frames, reason)
    synthesizer = Synthesizer(tiny_folder, speaker, voices=VoicesConfig(tmp_path))
    speech = await synthesizer.start(SpeechRequest("One."))
    assert speech.voice == "none"
    tried = len(speaker.asked)
    assert 4 <= tried <= 8
    await synthesizer.start(SpeechRequest("Two."))
    assert len(speaker.asked) == tried
    assert VoiceStore(tmp_path, 9, 9).all() == []


@pytest.mark.parametrize("weights", ["untrained", "dummy"])
async def test_weights_without_training_speak_bare(tiny_folder: Path, tmp_path: Path, weights: str) -> None:
    speaker = SteadySpeaker(weights=weights)
    synthesizer = Synthesizer(tiny_folder, speaker, voices=VoicesConfig(tmp_path))
    await synthesizer.prepare()
    assert (await synthesizer.start(SpeechRequest("One."))).voice == "none"
    assert speaker.asked == []
