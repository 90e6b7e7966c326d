"""Long texts from door to door: what the speaker is asked to say, and what the tiny model makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import wave
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetts.config import Limits
from duetts.errors import CheckpointError, InvalidRequest
from duetts.synthesizer import Synthesizer
from duetts.text.prompt import SPEAKER_TAG
from duetts.text.rules import clean_text, least_seconds
from duetts.tts import TTS
from duetts.types import Chunk, Float32, Int32, Outcome, Reference, SpeakerInfo, SpeechRequest, Utterance

from .inputs import INPUTS, REF_TEXT, clip
from .text.test_pieces import SPOKEN, bare, said

FRAME, RATE = 2048, 44100
INFO = SpeakerInfo("fish_qwen3_omni", RATE, FRAME, 4, 8192)


def read(name: str) -> str:
    return (INPUTS / "texts" / name).read_bytes().decode()


def texts_of(prompt: Int32) -> list[str]:
    """The texts of a prompt of the byte tokenizer, in order: runs of bytes, without the line ends of the layout."""
    runs, run = [], bytearray()
    for token in [*prompt[0].tolist(), 256]:
        if token < 256:
            run.append(token)
        elif run:
            runs.append(bytes(run).decode())
            run.clear()
    return [text for text in runs if text != "\n"]


@dataclass
class ReadingSpeaker:
    """Notes what it reads in the prompts, and speaks each text for its natural time with the piece's number as codes."""

    info: SpeakerInfo = INFO
    asked: list[Utterance] = field(default_factory=list)
    read: list[list[str]] = field(default_factory=list)

    async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        self.asked.append(utterance)
        self.read.append(texts_of(utterance.prompt))
        frames = max(1, round(2 * least_seconds(self.read[-1][-1]) * RATE / FRAME))
        assert frames <= utterance.max_frames
        assert utterance.prompt.shape[1] + utterance.max_frames <= self.info.max_model_len
        yield Chunk(bytes(2 * FRAME * frames), np.full((4, frames), len(self.asked) % 64, np.int32))
        yield Outcome("stop", frames, utterance.prompt.shape[1])

    async def encode_reference(self, wave: Float32) -> Int32:
        return np.full((4, -(-len(wave) // FRAME)), 63, np.int32)

    def stats(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass


async def spoken(folder: Path, text: str, **options: Any) -> tuple[ReadingSpeaker, list[Chunk], Outcome]:
    speaker = ReadingSpeaker()
    speech = await Synthesizer(folder, speaker).start(SpeechRequest(text, voice="none", **options))
    chunks = [chunk async for chunk in speech]
    assert speech.outcome is not None
    assert speech.num_pieces == speech.outcome.pieces.total == len(speaker.asked)
    return speaker, chunks, speech.outcome


@pytest.mark.parametrize("chunk_length", [None, 100, 1000])
@pytest.mark.parametrize("name", SPOKEN)
async def test_every_trial_text_is_asked_for_once_and_in_order(tiny_folder: Path, name: str, chunk_length: int | None) -> None:
    text = read(name.removeprefix("texts/"))
    try:
        cleaned = clean_text(text, field="input", max_chars=40000)
    except InvalidRequest:
        pytest.skip("is refused")
    speaker, chunks, outcome = await spoken(tiny_folder, text, chunk_length=chunk_length)
    asked = [texts[-1] for texts in speaker.read]
    assert said(cleaned, asked) == bare(cleaned)
    assert all(len(piece.encode()) <= (chunk_length or 300) for piece in asked)
    assert [texts[:-1] for texts in speaker.read] == [[], *([piece] for piece in asked[:-1])]
    assert outcome.num_frames == sum(chunk.num_frames for chunk in chunks)
    assert (outcome.reason, outcome.pieces.suspect) == ("stop", ())


async def test_a_model_has_its_longest_piece_and_may_know_nothing_of_what_was_said(tiny_folder: Path, tmp_path: Path) -> None:
    """Its folder says so, and no request gets longer pieces or pieces that hear one another."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"longest_piece": 60, "condition_on_previous_chunks": False, "single_line": True})
    )
    text = "There is a sentence,\n\nand another one\tfollows it. " * 5
    for length in (None, 100, 1000):
        speaker, _, _ = await spoken(folder, text, chunk_length=length)
        assert len(speaker.asked) == 5
        assert [len(texts) for texts in speaker.read] == [1] * 5
        assert {texts[0] for texts in speaker.read} == {"There is a sentence, and another one follows it."}
    (folder / "generation_config.json").write_text(json.dumps({"longest_piece": 10}))
    with pytest.raises(CheckpointError, match="longest_piece"):
        Synthesizer(folder, ReadingSpeaker())


async def test_length_hardly_depends_on_the_size_of_the_pieces(tiny_folder: Path) -> None:
    frames = [(await spoken(tiny_folder, read("long_paragraph.txt"), chunk_length=n))[2].num_frames for n in (100, 300, 1000)]
    assert max(frames) < 1.1 * min(frames)


async def test_the_voice_leads_every_prompt(tiny_folder: Path) -> None:
    reference = Reference(clip("control_pcm16.wav"), REF_TEXT)
    speaker, _, _ = await spoken(tiny_folder, read("long_paragraph.txt"), references=(reference,))
    first = speaker.asked[0]
    assert len(speaker.asked) > 10
    for utterance, texts in zip(speaker.asked, speaker.read, strict=True):
        shared = utterance.shared_positions
        assert np.array_equal(utterance.prompt[:, :shared], first.prompt[:, :shared])
        assert (utterance.prompt[1, :shared] == 63).sum() == (utterance.prompt[1] == 63).sum() == 87
        assert texts[0] == f"<|speaker:0|>{REF_TEXT}"
        assert utterance.voice_key == first.voice_key != ""
    for number, utterance in enumerate(speaker.asked):
        assert utterance.prompt[1, utterance.shared_positions :].max() == number  # the codes of the piece before
    again, _, _ = await spoken(tiny_folder, "Short.", references=(reference,))
    other, _, _ = await spoken(tiny_folder, "Short.", references=(Reference(clip("control_pcm16.wav"), "Other words."),))
    assert again.asked[0].voice_key == first.voice_key != other.asked[0].voice_key


async def test_pieces_without_a_voice_stay_together_and_apart_from_others(tiny_folder: Path) -> None:
    keys = []
    for _ in range(2):
        speaker, _, _ = await spoken(tiny_folder, read("long_paragraph.txt"))
        keys.append({utterance.voice_key for utterance in speaker.asked})
    assert all(len(own) == 1 and "" not in own for own in keys)
    assert keys[0] != keys[1]
    single, _, _ = await spoken(tiny_folder, "Short.")
    assert single.asked[0].voice_key == ""


async def test_a_cut_turn_is_asked_for_with_its_tag(tiny_folder: Path) -> None:
    turn = "One sentence follows another. " * 20
    speaker, _, _ = await spoken(tiny_folder, f"<|speaker:3|>{turn}<|speaker:4|>Yes.")
    asked = [texts[-1] for texts in speaker.read]
    assert all(text.startswith("<|speaker:3|>") for text in asked)
    assert [tag for text in asked for tag in SPEAKER_TAG.findall(text)][-1] == "<|speaker:4|>"


# -- the tiny model --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tts(tiny_folder: Path) -> Any:
    with TTS(tiny_folder, device="cpu", cpu_threads=1, limits=Limits(reference_disk_bytes=0)) as own:
        yield own


def test_streamed_and_complete_are_the_same(tts: TTS) -> None:
    text = read("long_paragraph.txt")[:330]
    whole = tts.say(text, voice="none", seed=11, chunk_length=100)
    assert whole.outcome.pieces.total == whole.outcome.pieces.spoken == 4
    assert len(whole.samples) == FRAME * whole.outcome.num_frames
    streamed = np.concatenate(list(tts.stream(text, voice="none", seed=11, chunk_length=100)))
    assert np.array_equal(streamed, whole.samples)


def test_a_text_that_would_not_fit_in_one_piece_is_spoken_in_shorter_ones(tts: TTS) -> None:
    """The tiny model has 1,024 positions; 299 bytes and their bound would take 1,500."""
    audio = tts.say("One word more than that. " * 12, voice="none", seed=1)
    assert audio.outcome.pieces.total == audio.outcome.pieces.spoken == 2


def test_the_commands_standard_input_may_be_long(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    command = [sys.executable, "-m", "duetts", "say", "-", "-o", str(file), "--model", str(tiny_folder), "--seed", "2"]
    text = read("long_paragraph.txt")[:330]
    run = subprocess.run(command, input=text, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    with wave.open(str(file)) as reader:
        assert reader.getnframes() % FRAME == 0
        assert reader.getnframes() > 2 * FRAME


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_thousand_characters(tts: TTS) -> None:
    audio = tts.say(read("chars_20k.txt"), voice="none", seed=5)
    pieces = audio.outcome.pieces
    assert pieces.spoken == pieces.total > 80
    assert len(audio.samples) == FRAME * audio.outcome.num_frames
