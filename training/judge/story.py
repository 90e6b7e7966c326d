"""A long text as it was heard: which of its sentences are missing."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from training.judge.words import words

LEAST = 0.5  # of its words that must be heard, in order, for a sentence to be there


def sentences(text: str) -> list[str]:
    """Split after full stops, question and exclamation marks: for plain prose without abbreviations."""
    return [part.strip() for part in re.split(r"(?<=[.!?])[\"']?\s+", text) if words(part)]


def missing_sentences(text: str, heard: str) -> list[str]:
    """The sentences of which less than half was heard where they belong."""
    parts = sentences(text)
    written = [word for part in parts for word in words(part)]
    found = [False] * len(written)
    for block in SequenceMatcher(None, written, words(heard), autojunk=False).get_matching_blocks():
        found[block.a : block.a + block.size] = [True] * block.size
    missing, start = [], 0
    for part in parts:
        count = len(words(part))
        if sum(found[start : start + count]) < LEAST * count:
            missing.append(part)
        start += count
    return missing
