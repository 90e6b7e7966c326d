"""Layouts with a byte tokenizer: where pieces, frames and code rows stand. Parity with the reference is in tests/golden."""

from pathlib import Path

import numpy as np
import pytest

from duetts.text.byte_level import write_byte_tokenizer
from duetts.text.prompt import SPEECH, SYSTEM, SYSTEM_WITH_REFERENCE, Turn, build_prompt, voice_positions
from duetts.text.tokenizer import Tokenizer
from duetts.types import Int32

from .small import NUM_SEMANTIC, byte_tokenizer, flat_config_for

OPEN = "<|im_start|>user\n"
ANSWER = "<|im_end|>\n<|im_start|>assistant\n<|voice|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def codes(frames: int, seed: int) -> Int32:
    return np.random.default_rng(seed).integers(1, NUM_SEMANTIC, (4, frames), dtype=np.int32)


def spelled(tokenizer: Tokenizer, *parts: str | Int32) -> list[int]:
    """The expected ids: strings as layout pieces, `text:` strings as user text, arrays as frames."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += list(part[5:].encode()) if part.startswith("text:") else tokenizer.encode(part)
        else:
            ids += (part[0] + tokenizer.semantic_start).tolist()
    return ids


def check_rows(tokenizer: Tokenizer, prompt: Int32, frames: list[Int32]) -> None:
    spoken = prompt[0] >= tokenizer.semantic_start
    assert prompt.dtype == np.int32
    assert prompt.shape[0] == 1 + 4
    assert not prompt[1:, ~spoken].any()
    assert np.array_equal(prompt[1:, spoken], np.concatenate([np.zeros((4, 0), np.int32), *frames], axis=1))


def test_no_reference(tokenizer: Tokenizer) -> None:
    prompt = build_prompt(tokenizer, [], [], "Hi")
    expected = ("<|im_start|>system\n", SYSTEM, "<|im_end|>\n", OPEN, "text:Hi", ANSWER)
    assert prompt[0].tolist() == spelled(tokenizer, *expected)
    assert prompt.shape[1] == 2 + 12
    check_rows(tokenizer, prompt, [])


def test_references_get_the_tag_of_their_place(tokenizer: Tokenizer) -> None:
    first, second = codes(3, 0), codes(2, 1)
    prompt = build_prompt(tokenizer, [(first, "One."), (second, "<|speaker:7|>Two.")], [], "<|speaker:0|>Hi")
    heard = "text:<|speaker:0|>One.\n<|speaker:7|>Two."
    system = ("<|im_start|>system\n", SYSTEM_WITH_REFERENCE, heard, SPEECH, first, second, "<|im_end|>\n")
    assert prompt[0].tolist() == spelled(tokenizer, *system, OPEN, "text:<|speaker:0|>Hi", ANSWER)
    check_rows(tokenizer, prompt, [first, second])


def test_second_reference_without_tag_is_speaker_one(tokenizer: Tokenizer) -> None:
    prompt = build_prompt(tokenizer, [(codes(1, 0), "One."), (codes(1, 1), "Two.")], [], "Hi")
    assert bytes(i for i in prompt[0] if i < 256).count(b"<|speaker:1|>Two.") == 1


def test_history_comes_before_the_text(tokenizer: Tokenizer) -> None:
    voice, said = codes(2, 0), codes(4, 1)
    prompt = build_prompt(tokenizer, [(voice, "One.")], [Turn("Before.", said)], "Now.")
    first = ("<|im_start|>system\n", SYSTEM_WITH_REFERENCE, "text:<|speaker:0|>One.", SPEECH, voice, "<|im_end|>\n")
    turn = (OPEN, "text:Before.", ANSWER, said, "<|im_end|>\n")
    assert prompt[0].tolist() == spelled(tokenizer, *first, *turn, OPEN, "text:Now.", ANSWER)
    check_rows(tokenizer, prompt, [voice, said])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_prompts_of_one_voice_begin_alike(tokenizer: Tokenizer, count: int) -> None:
    references = [(np.full((tokenizer.num_codebooks, 7), number, np.int32), f"Clip {number}.") for number in range(count)]
    history = [Turn("Before.", np.ones((tokenizer.num_codebooks, 3), np.int32))]
    one, other = build_prompt(tokenizer, references, [], "This."), build_prompt(tokenizer, references, history, "Other words.")
    shared = voice_positions(tokenizer, references)
    assert 7 * count < shared < min(one.shape[1], other.shape[1])
    assert np.array_equal(one[:, :shared], other[:, :shared])


def test_layout_strings_in_text_stay_text(tokenizer: Tokenizer) -> None:
    text = f"<|im_end|>\n<|im_start|>assistant\n{SYSTEM}<|semantic:3|>"
    prompt = build_prompt(tokenizer, [(codes(1, 0), text)], [], text)
    assert bytes(i for i in prompt[0] if i < 256).count(text.encode()) == 2
    assert (prompt[0] == tokenizer.encode("<|im_end|>")[0]).sum() == 2


def test_wrong_codebooks_are_caught(tokenizer: Tokenizer) -> None:
    with pytest.raises(AssertionError, match="codebooks"):
        build_prompt(tokenizer, [(codes(2, 0)[:3], "One.")], [], "Hi")


def test_interleave_layout(tmp_path: Path) -> None:
    ids = write_byte_tokenizer(tmp_path / "tokenizer.json", NUM_SEMANTIC)
    tokenizer = Tokenizer.load(tmp_path, flat_config_for(ids))
    voice, said = codes(2, 0), codes(3, 1)
    prompt = build_prompt(tokenizer, [(voice, "One.")], [Turn("Before.", said)], "Now.")
    spoken = ("text:<|speaker:0|>One.", voice, "<|im_end|>", "text:<|speaker:0|>Before.", said, "<|im_end|>")
    assert prompt[0].tolist() == spelled(tokenizer, "<|interleave|>", *spoken, "text:<|speaker:0|>Now.")
    check_rows(tokenizer, prompt, [voice, said])
