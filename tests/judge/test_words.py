"""Words as they are counted: one spelling for both sides, and how two rows of words differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training.judge.story import missing_sentences, sentences
from training.judge.words import Difference, compare, differ, ordinal_words, word_error_rate, words

FEW_WORDS = st.lists(st.sampled_from("abc"), max_size=7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop, Mr. O’Neil!", "dont stop mr oneil"),
        ("A well-kept 1,234 books.", "a well kept one thousand two hundred thirty four books"),
        ("21st, 12th, 40th and 3rd", "twenty first twelfth fortieth and third"),
        ("The Theatre's grey harbour", "the theaters gray harbor"),
        ("50% of 0", "fifty percent of zero"),
        ("12345678901", "12345678901"),
        ("", ""),
    ],
)
def test_both_sides_are_spelled_alike(text: str, expected: str) -> None:
    assert " ".join(words(text)) == expected


@pytest.mark.parametrize(("value", "expected"), [(1, "first"), (20, "twentieth"), (100, "one hundredth"), (15, "fifteenth")])
def test_ordinals(value: int, expected: str) -> None:
    assert ordinal_words(value) == expected


def naive(a: list[str], b: list[str]) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(naive(a[1:], b) + 1, naive(a, b[1:]) + 1, naive(a[1:], b[1:]) + (a[0] != b[0]))


@given(FEW_WORDS.filter(lambda row: len(row) < 6), FEW_WORDS.filter(lambda row: len(row) < 6))
def test_wrong_words_are_the_edit_distance(written: list[str], heard: list[str]) -> None:
    found = compare(written, heard)
    assert found.wrong == naive(written, heard)
    assert found.written == len(written)
    assert found.added - found.dropped == len(heard) - len(written)


def test_left_out_and_repeated_words_are_told_apart() -> None:
    text = "one of these days we shall see the sea again"
    assert differ(text, "one of these days the sea again") == Difference(10, 0, 3, 0)
    assert not differ(text, "one of these days the sea again").loses_text(3)
    assert differ(text, "one of these the sea again").loses_text(3)
    assert differ(text, text + " see the sea again").loses_text(3)
    assert differ("Hello there.", "").loses_text(3)
    assert not differ(text, text.replace("sea", "see")).loses_text(3)


def test_the_rate_weighs_words_not_sentences() -> None:
    assert word_error_rate([Difference(9, 1), Difference(1, 0, 1, 0)]) == 0.2


def test_a_sentence_that_was_left_out_is_found() -> None:
    story = "The dog slept. It was cold outside, and snow fell. Then the door opened! Who was it?"
    assert len(sentences(story)) == 4
    assert missing_sentences(story, story.lower()) == []
    assert missing_sentences(story, "the dog slept then the door opened who was it") == ["It was cold outside, and snow fell."]
    assert missing_sentences(story, "") == sentences(story)
    assert missing_sentences(story, "the dog slipped it was cold outside and snow then a door opened who is it") == []
