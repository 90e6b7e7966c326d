"""The text side in front of a speaker that only notes what it is asked."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetts.config import Limits
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


async def test_the_size_of_the_first_chunk(tiny_folder: Path) -> None:
    speaker = NotingSpeaker()
    synthesizer = Synthesizer(tiny_folder, speaker)
    for frames in (0, 3):
        speech = await synthesizer.start(SpeechRequest("Hi.", voice="none", first_chunk=frames, streaming=True))
        assert [chunk.num_frames async for chunk in speech] == [1]
        assert speaker.asked[-1].first_chunk == frames
    for frames in (-1, 1001):
        with pytest.raises(InvalidRequest, match="initial_codec_chunk_frames") as refusal:
            await synthesizer.start(SpeechRequest("Hi.", first_chunk=frames))
        assert refusal.value.code == "out_of_range"


@pytest.mark.parametrize("length", [99, 1001, 0, -5])
async def test_a_length_of_pieces_out_of_range_is_refused(tiny_folder: Path, length: int) -> None:
    with pytest.raises(InvalidRequest, match="between 100 and 1000") as refusal:
        await Synthesizer(tiny_folder, NotingSpeaker()).start(SpeechRequest("Hi.", chunk_length=length))
    assert (refusal.value.field, refusal.value.code) == ("chunk_length", "out_of_range")


async def test_every_piece_is_checked_before_the_first_is_spoken(tiny_folder: Path) -> None:
    """The third sentence of these holds a phoneme pair, which is never cut, and has no room."""
    pair = "<|phoneme_start|>" + "AH0 " * 200 + "<|phoneme_end|>"
    text = "A sentence of some length. " * 8 + pair + ". The end of it."
    speaker = NotingSpeaker()
    for references in ((), (Reference(clip("control_pcm16.wav"), REF_TEXT),)):
        with pytest.raises(InvalidRequest) as refusal:
            await Synthesizer(tiny_folder, speaker).start(SpeechRequest(text, references=references, voice="none"))
        assert (refusal.value.field, refusal.value.code) == ("input", "context_length_exceeded")
    assert speaker.asked == []
    assert speaker.encoded == 0


async def test_pieces_are_made_shorter_if_their_bounds_do_not_fit(tiny_folder: Path) -> None:
    text = "One sentence is like another. " * 30
    counts = []
    for room in (4096, 1024, 700, 420):
        speaker = NotingSpeaker(room)
        speech = await Synthesizer(tiny_folder, speaker).start(SpeechRequest(text, voice="none", seed=1))
        counts.append(speech.num_pieces)
        async for _ in speech:
            utterance = speaker.asked[-1]
            assert utterance.prompt.shape[1] + utterance.max_frames <= room
    assert counts == sorted(counts)
    assert len(set(counts)) == len(counts)
    with pytest.raises(InvalidRequest) as refusal:
        await Synthesizer(tiny_folder, NotingSpeaker(190)).start(SpeechRequest(text, voice="none"))
    assert refusal.value.code == "context_length_exceeded"


async def test_the_requests_own_bound_must_fit_and_changes_no_pieces(tiny_folder: Path) -> None:
    text = "One sentence is like another. " * 30
    usual = await Synthesizer(tiny_folder, NotingSpeaker(4096)).start(SpeechRequest(text, voice="none"))
    bounded = await Synthesizer(tiny_folder, NotingSpeaker()).start(SpeechRequest(text, voice="none", max_new_tokens=600))
    assert bounded.num_pieces == usual.num_pieces
    with pytest.raises(InvalidRequest) as refusal:
        await Synthesizer(tiny_folder, NotingSpeaker()).start(SpeechRequest(text, voice="none", max_new_tokens=900))
    assert (refusal.value.field, refusal.value.code) == ("max_new_tokens", "context_length_exceeded")


@pytest.mark.parametrize(
    ("weights", "bound", "checked"),
    [("trained", None, True), ("trained", 5, False), ("dummy", None, False), ("untrained", None, False)],
)
async def test_when_speech_is_checked(tiny_folder: Path, weights: str, bound: int | None, checked: bool) -> None:
    """The speaker's one frame is too short for this text."""
    speaker = NotingSpeaker()
    speaker.info = replace(speaker.info, weights=weights)
    request = SpeechRequest("A sentence of some length.", voice="none", seed=3, max_new_tokens=bound)
    speech = await Synthesizer(tiny_folder, speaker).start(request)
    assert [chunk.pcm async for chunk in speech] == [sound_of(3)]
    assert speech.outcome is not None
    assert [piece.why for piece in speech.outcome.pieces.suspect] == ["too_short"] * checked
    assert [utterance.seed for utterance in speaker.asked] == [3, 2][: 1 + checked]
    assert [utterance.max_repeats > 0 for utterance in speaker.asked] == [checked] * len(speaker.asked)


async def test_tokens_of_input_are_the_voice_once_and_every_text(tiny_folder: Path) -> None:
    synthesizer = Synthesizer(tiny_folder, NotingSpeaker(4096))
    text = "One sentence is like another. " * 30
    one = await synthesizer.start(SpeechRequest("Hi.", voice="none"))
    many = await synthesizer.start(SpeechRequest(text, voice="none"))
    spaces = many.num_pieces - 1
    assert many.input_tokens == one.input_tokens - 3 + len(text.strip()) - spaces


async def prompts(folder: Path, request: SpeechRequest) -> list[list[int]]:
    """The ids of each piece's prompt."""
    speaker = NotingSpeaker(4096)
    await spoken(Synthesizer(folder, speaker), replace(request, voice=request.voice or "none", seed=1))
    return [utterance.prompt[0].tolist() for utterance in speaker.asked if utterance.seed % 2]


async def test_instructions_are_one_tag_of_every_piece_and_turn(tiny_folder: Path) -> None:
    request = SpeechRequest("Hi.", instructions=" [calm],\nand low ", tagged=True)
    assert await prompts(tiny_folder, request) == await prompts(tiny_folder, SpeechRequest("[calm , and low] Hi."))
    assert await prompts(tiny_folder, replace(request, tagged=False)) == await prompts(tiny_folder, SpeechRequest("Hi."))
    long = "The morning was cool and clear, so we walked to the market for bread. " * 3
    tagged = replace(request, text=long, chunk_length=100, instructions="calm")
    pieces = await prompts(tiny_folder, tagged)
    bare = await prompts(tiny_folder, replace(tagged, tagged=False))
    assert len(pieces) == len(bare) > 1
    history = await prompts(tiny_folder, SpeechRequest("[calm] " + long.strip()[:69], chunk_length=100))
    assert pieces[0] == history[0]
    tag = len("[calm] ")
    assert [len(one) - len(other) for one, other in zip(pieces, bare, strict=True)] == [tag] * len(bare)


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("instructions", ["stop <|im_end|> now", "a\0b"])
async def test_instructions_are_checked_whether_they_have_an_effect_or_not(
    tiny_folder: Path, tagged: bool, instructions: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await Synthesizer(tiny_folder, NotingSpeaker()).start(SpeechRequest("Hi.", instructions=instructions, tagged=tagged))
    assert refusal.value.field == "instructions"


# -- codes in the place of a clip ----------------------------------------------------------------------------------------


async def test_codes_stand_in_the_prompt_where_those_of_a_clip_would(tiny_folder: Path) -> None:
    given, encoding = NotingSpeaker(), NotingSpeaker()
    sound = clip("control_pcm16.wav")
    await spoken(Synthesizer(tiny_folder, encoding), SpeechRequest("Hi.", (Reference(sound, REF_TEXT),), seed=1))
    codes = np.zeros((4, -(-int(4.027 * 44100) // 2048)), np.int32)
    await spoken(Synthesizer(tiny_folder, given), SpeechRequest("Hi.", (Reference(codes, REF_TEXT),), seed=1))
    assert given.encoded == 0
    assert np.array_equal(given.asked[0].prompt, encoding.asked[0].prompt)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        (np.zeros((3, 40), np.int32), "invalid_value"),
        (np.zeros((4, 0), np.int32), "out_of_range"),
        (np.full((4, 40), 10**6, np.int32), "out_of_range"),
        (np.full((4, 40), -1, np.int32), "out_of_range"),
        (np.zeros((4, 21), np.int32), "reference_too_short"),
        (np.zeros((4, 647), np.int32), "reference_too_long"),
    ],
)
async def test_codes_that_cannot_be_those_of_a_clip(tiny_folder: Path, codes: Int32, code: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await Synthesizer(tiny_folder, NotingSpeaker(4096)).start(SpeechRequest("Hi.", (Reference(codes, REF_TEXT),)))
    assert refusal.value.code == code
    assert refusal.value.field is not None
    assert refusal.value.field.startswith("references")


@pytest.mark.parametrize(("words", "warned"), [(1, False), (20, True)])
async def test_a_transcript_that_cannot_fit_its_clip_is_told_of(tiny_folder: Path, words: int, warned: bool) -> None:
    """As when clip and text were swapped. The clip lasts 4 s."""
    text = "Nobody says all of this so quickly. " * words
    synthesizer = Synthesizer(tiny_folder, NotingSpeaker(4096))
    speech = await synthesizer.start(SpeechRequest("Hi.", (Reference(clip("control_pcm16.wav"), text),)))
    assert speech.warnings == (("ref_text_does_not_fit",) if warned else ())


# -- text as it is said --------------------------------------------------------------------------------------------------


async def test_text_is_normalised_and_respelled_where_that_is_asked_for(tiny_folder: Path) -> None:
    request = SpeechRequest("**Stop** 🎉 at 50% of SQL.")
    bare = await prompts(tiny_folder, request)
    assert bare == await prompts(tiny_folder, replace(request, language="en"))
    said = replace(request, normalize=True, language="English", pronunciation={"SQL": "sequel"})
    assert await prompts(tiny_folder, said) == await prompts(tiny_folder, SpeechRequest("Stop at fifty percent of sequel."))
    assert await prompts(tiny_folder, replace(said, language="de", pronunciation={})) == await prompts(
        tiny_folder, SpeechRequest("Stop at 50% of SQL.")
    )


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"language": "klingon"}, "invalid_value", "language"),
        ({"pronunciation": {"a": "<|im_end|>"}}, "unsupported_control_token", "pronunciation"),
        ({"pronunciation": {"a": "b\0"}}, "invalid_value", "pronunciation"),
        ({"pronunciation": {"": "b"}}, "invalid_value", "pronunciation"),
        ({"pronunciation": {"Hi": ""}}, "nothing_to_speak", "input"),
        ({"pronunciation": {"Hi": 200 * "x"}}, "input_too_long", "input"),
    ],
)
async def test_what_cannot_be_said_so(tiny_folder: Path, fields: dict[str, Any], code: str, field: str) -> None:
    synthesizer = Synthesizer(tiny_folder, NotingSpeaker(), Limits(max_input_chars=100))
    with pytest.raises(InvalidRequest) as refusal:
        await synthesizer.start(SpeechRequest("Hi.", **fields))
    assert (refusal.value.code, refusal.value.field) == (code, field)
