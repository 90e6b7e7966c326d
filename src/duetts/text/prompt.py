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
OPEN = {role: f"<|im_start|>{role}\n" for role in ("system", "user", "assistant")}
OPEN_SPEECH = OPEN["assistant"] + "<|voice|>"
CLOSE = "<|im_end|>\n"
CONSTANT_PIECES = (SYSTEM, SYSTEM_WITH_REFERENCE, SPEECH, OPEN["system"], OPEN["user"], OPEN_SPEECH, CLOSE)

SPEAKER_TAG = re.compile(r"<\|speaker:\d+\|>")

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

    def constant(self, piece: str) -> None:
        self._ids(self._tokenizer.encode(piece))

    def text(self, text: str) -> None:
        self._ids(self._tokenizer.encode_text(text))

    def frames(self, codes: Int32) -> None:
        self._parts.append(np.concatenate((codes[:1] + self._tokenizer.semantic_start, codes)).astype(np.int32))

    def array(self) -> Int32:
        return np.concatenate(self._parts, axis=1)

    def _ids(self, ids: list[int]) -> None:
        columns = np.zeros((1 + self._tokenizer.num_codebooks, len(ids)), np.int32)
        columns[0] = ids
        self._parts.append(columns)


def build_prompt(tokenizer: Tokenizer, references: Sequence[CodedReference], history: Sequence[Turn], text: str) -> Int32:
    """The chat layout of S2 Pro -> int32 [1 + codebooks, positions], ending where the first frame is drawn.

    A transcript without a speaker tag gets the tag of its place; the text to speak is taken as it is.
    """
    columns = _Columns(tokenizer)
    columns.constant(OPEN["system"])
    if references:
        columns.constant(SYSTEM_WITH_REFERENCE)
        columns.text("\n".join(_tagged(transcript, index) for index, (_, transcript) in enumerate(references)))
        columns.constant(SPEECH)
        columns.frames(np.concatenate([codes for codes, _ in references], axis=1))
    else:
        columns.constant(SYSTEM)
    columns.constant(CLOSE)
    for turn in history:
        _open_turn(columns, turn.text)
        columns.frames(turn.codes)
        columns.constant(CLOSE)
    _open_turn(columns, text)
    return columns.array()


def _open_turn(columns: _Columns, text: str) -> None:
    columns.constant(OPEN["user"])
    columns.text(text)
    columns.constant(CLOSE)
    columns.constant(OPEN_SPEECH)


def _tagged(transcript: str, index: int) -> str:
    return transcript if SPEAKER_TAG.search(transcript) else f"<|speaker:{index}|>{transcript}"
