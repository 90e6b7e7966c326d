"""The prompt: ids and code rows, laid out piece by piece as the models were trained. Each piece is tokenised on its own.

A frame stands as its semantic token with all of its codes below; text positions have codes of 0. This room is given text
that has been checked (`rules.py`) and decides nothing about it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duetts.text.tokenizer import Tokenizer
from duetts.types import Int32

SYSTEM = "convert the provided text to speech"
SYSTEM_WITH_REFERENCE = "convert the provided text to speech reference to the following:\n\nText:\n"
SPEECH = "\n\nSpeech:\n"
SYSTEM_ROLE, USER_ROLE, ASSISTANT_ROLE = "system\n", "user\n", "assistant\n"
START, END = "<|im_start|>", "<|im_end|>"

# The constant phrases of the chat layout that are plain text; a small model's tokenizer has one token for each.
PHRASES = (SYSTEM, SYSTEM_WITH_REFERENCE, SPEECH, SYSTEM_ROLE, USER_ROLE, ASSISTANT_ROLE)

SPEAKER_TAG = re.compile(r"<\|speaker:[0-9]+\|>")

# A clip to clone: codes int32 [codebooks, frames] and what is said in it.
CodedReference = tuple[Int32, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """What was said before in the same conversation: text, and the codes int32 [codebooks, frames] it was spoken with."""

    text: str
    codes: Int32


class _Columns:
    """Collects positions and gives them back as one array."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._parts: list[Int32] = []

    def piece(self, piece: str) -> None:
        self._ids(self._tokenizer.encode(piece))

    def text(self, text: str) -> None:
        self._ids(self._tokenizer.encode_text(text))

    def frames(self, codes: Int32) -> None:
        books = self._tokenizer.num_codebooks
        assert codes.ndim == 2, f"codes are [codebooks, frames], not {list(codes.shape)}"
        assert codes.shape[0] == books, f"codes have {codes.shape[0]} codebooks, the model {books}"
        self._parts.append(np.concatenate((codes[:1] + self._tokenizer.semantic_start, codes)).astype(np.int32))

    def array(self) -> Int32:
        return np.concatenate(self._parts, axis=1)

    def _ids(self, ids: list[int]) -> None:
        columns = np.zeros((1 + self._tokenizer.num_codebooks, len(ids)), np.int32)
        columns[0] = ids
        self._parts.append(columns)


def build_prompt(tokenizer: Tokenizer, references: Sequence[CodedReference], history: Sequence[Turn], text: str) -> Int32:
    """The layout of the tokenizer's model -> int32 [1 + codebooks, positions], ending where the first frame is drawn.

    `references` are the voices to speak with, `history` what was said before, in order, `text` what is to be said.
    """
    layout = {"fish_qwen3_omni": chat_layout, "dual_ar": interleave_layout}[tokenizer.model_type]
    return layout(tokenizer, references, history, text)


def voice_positions(tokenizer: Tokenizer, references: Sequence[CodedReference]) -> int:
    """With how many positions every prompt with these references begins, whatever its text and history."""
    columns = _Columns(tokenizer)
    {"fish_qwen3_omni": _chat_voice, "dual_ar": _interleave_voice}[tokenizer.model_type](columns, references)
    return int(columns.array().shape[1])


def chat_layout(tokenizer: Tokenizer, references: Sequence[CodedReference], history: Sequence[Turn], text: str) -> Int32:
    """S2 Pro: a system message with all references, then user and assistant messages in turn.

    A transcript without a speaker tag gets the tag of its place; the text to speak is taken as it is.
    """
    columns = _Columns(tokenizer)
    _chat_voice(columns, references)
    for turn in history:
        _open_speech(columns, turn.text)
        columns.frames(turn.codes)
        columns.piece(END + "\n")
    _open_speech(columns, text)
    return columns.array()


def _chat_voice(columns: _Columns, references: Sequence[CodedReference]) -> None:
    """The system message, the same for all that is said in a voice."""
    columns.piece(START + SYSTEM_ROLE)
    if references:
        columns.piece(SYSTEM_WITH_REFERENCE)
        columns.text("\n".join(_tagged(transcript, index) for index, (_, transcript) in enumerate(references)))
        columns.piece(SPEECH)
        for codes, _ in references:
            columns.frames(codes)
    else:
        columns.piece(SYSTEM)
    columns.piece(END + "\n")


def interleave_layout(tokenizer: Tokenizer, references: Sequence[CodedReference], history: Sequence[Turn], text: str) -> Int32:
    """S1: text and speech side by side, all by speaker 0. Written from a description, untested against a reference."""
    columns = _Columns(tokenizer)
    _interleave_voice(columns, references)
    for turn in history:
        _interleave_turn(columns, turn.text, turn.codes)
    columns.text(_tagged(text, 0))
    return columns.array()


def _interleave_voice(columns: _Columns, references: Sequence[CodedReference]) -> None:
    columns.piece("<|interleave|>")
    for codes, transcript in references:
        _interleave_turn(columns, transcript, codes)


def _interleave_turn(columns: _Columns, text: str, codes: Int32) -> None:
    columns.text(_tagged(text, 0))
    columns.frames(codes)
    columns.piece(END)


def _open_speech(columns: _Columns, text: str) -> None:
    columns.piece(START + USER_ROLE)
    columns.text(text)
    columns.piece(END + "\n")
    columns.piece(START + ASSISTANT_ROLE + "<|voice|>")


def _tagged(transcript: str, index: int) -> str:
    return transcript if SPEAKER_TAG.search(transcript) else f"<|speaker:{index}|>{transcript}"
