"""Text that arrives bit by bit: what is given back when, and that nothing of it depends on the messages."""

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from duetts.errors import InvalidRequest
from duetts.text.arrival import ArrivingText
from duetts.text.pieces import SPEAKER_TAG, has_speech
from duetts.types import Granularity
from tests.inputs import INPUTS

ALPHABET = ["a", "B", "é", "漢", "。", "，", ".", ",", "!", "?", " ", "\n", "[", "]", '"', "」", "\u0301", "\u200d", "1", "😀",
            "Mr. ", "<|speaker:1|>", "<|phoneme_start|>", "<|phoneme_end|>", "<|", "word ", "one two. "]  # fmt: skip
TEXTS = st.lists(st.sampled_from(ALPHABET), max_size=60).map("".join)
KINDS: list[Granularity] = ["none", "sentence", "clause", "length"]


def spoken(granularity: Granularity, most: int, text: str, cuts: list[int] | None = None) -> list[str]:
    """The pieces of a text that comes cut at these places; without any, character by character."""
    arriving = ArrivingText(granularity, most)
    places = [0, *sorted(cuts), len(text)] if cuts is not None else list(range(len(text) + 1))
    pieces = [piece for start, stop in pairwise(places) for piece in arriving.add(text[start:stop])]
    return [*pieces, *arriving.end()]


@given(text=TEXTS, cuts=st.lists(st.integers(0, 120)), granularity=st.sampled_from(KINDS), most=st.sampled_from([12, 40, 100]))
@settings(deadline=None)
def test_messages_do_not_matter(text: str, cuts: list[int], granularity: Granularity, most: int) -> None:
    assert spoken(granularity, most, text, [min(cut, len(text)) for cut in cuts]) == spoken(granularity, most, text, [])


@given(text=TEXTS, granularity=st.sampled_from(KINDS), most=st.sampled_from([12, 40, 100]))
@example(text="a」\u200d\u200d\u200d", granularity="sentence", most=12)  # a mark with joiners that fill a piece
@example(text="a word 。」\u200d\u200d\u200d", granularity="clause", most=12)
@settings(deadline=None)
def test_nothing_is_lost_or_doubled(text: str, granularity: Granularity, most: int) -> None:
    """But for marks alone at the end, and the tag that a cut turn goes on with."""
    pieces = spoken(granularity, most, text)
    rest = "".join(text.split())
    for index, piece in enumerate(pieces):
        compact = "".join(piece.split())
        if not rest.startswith(compact):
            compact = SPEAKER_TAG.sub("", compact, count=1)
        assert rest.startswith(compact)
        rest = rest.removeprefix(compact)
        assert has_speech(piece) or index == 0 or len(piece) >= most // 4
    assert not has_speech(rest) or not pieces


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello there. How are you? I am fine.", ["Hello there.", "How are you?", "I am fine."]),
        ("Mr. Smith went home. He slept.", ["Mr. Smith went home.", "He slept."]),
        ("It costs 3.50 euros. Fine.", ["It costs 3.50 euros.", "Fine."]),
        ("你好。再见！我们走吧", ["你好。", "再见！", "我们走吧"]),
        ("First line\n\nSecond line", ["First line", "Second line"]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("[softly. very] Good night. Sleep.", ["[softly. very] Good night.", "Sleep."]),
        ("<|speaker:0|>Hi. Ho. <speaker:1>Yes.", ["<|speaker:0|>Hi.", "<|speaker:0|>Ho.", "<|speaker:1|>Yes."]),
        ("One, two, three and four, five.", ["One, two, three and four, five."]),
        ("Wait... ... Go.", ["Wait... ...", "Go."]),
        ("Yes! 😀", ["Yes! 😀"]),
        ("...", ["..."]),
        ("  ", []),
    ],
)
def test_sentences(text: str, pieces: list[str]) -> None:
    assert spoken("sentence", 300, text) == pieces


def test_a_clause_is_given_back_with_the_word_after_it() -> None:
    arriving = ArrivingText("clause", 300)
    words = ["After", "all", "the", "rain,", "we", "went", "home.", "It", "was", "late"]
    given_back = [(word, piece) for word in words for piece in arriving.add(word + " ")]
    assert given_back == [("we", "After all the rain,"), ("It", "we went home.")]
    assert arriving.end() == ["It was late"]


def test_tiny_clauses_and_abbreviations_are_no_clauses() -> None:
    assert spoken("clause", 300, "Yes, no, or so, my old friend, we said.") == ["Yes, no, or so, my old friend,", "we said."]
    assert spoken("clause", 300, "We talked at length to Mr. Smith about it.") == ["We talked at length to Mr. Smith about it."]


def test_what_grows_long_is_cut_at_the_best_late_place() -> None:
    assert spoken("sentence", 39, "word " * 16) == [*[" ".join(["word"] * 7)] * 2, "word word"]
    text = "Nobody knew what came, but all of them were there and sang"
    assert spoken("sentence", 40, text)[0] == "Nobody knew what came,"
    assert spoken("length", 40, "It is so. They came and went. Now all is quiet here")[0] == "It is so. They came and went."
    assert spoken("length", 10, "e\u0301" * 30)[0] == "e\u0301" * 4
    assert all(len(piece.encode()) <= 40 for piece in spoken("sentence", 40, "漢" * 100))


def test_a_flush_stays_in_the_turn_and_an_end_does_not() -> None:
    arriving = ArrivingText("sentence", 300)
    assert arriving.add("<|speaker:3|>Hello") == []
    assert arriving.flush() == ["<|speaker:3|>Hello"]
    assert arriving.add(" there") == []
    assert arriving.waiting == 6
    assert arriving.end() == ["<|speaker:3|>there"]
    arriving.add("Bye")
    assert arriving.flush() == ["Bye"]


def test_marks_wait_for_what_they_belong_to() -> None:
    arriving = ArrivingText("sentence", 300)
    arriving.add("... ")
    assert arriving.flush() == []
    arriving.add("well")
    assert arriving.flush() == ["...  well"]
    arriving.add(" !!!")
    assert arriving.end() == []
    arriving.add("...")
    assert arriving.end() == ["..."]
    assert arriving.waiting == 0


def test_half_a_character_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        ArrivingText("none", 300).add("\ud800")


@pytest.mark.parametrize("name", ["chars_20k.txt", "long_paragraph.txt", "no_punctuation.txt", "long_word.txt"])
@pytest.mark.parametrize("granularity", ["sentence", "clause", "length"])
def test_a_long_text_at_once_is_no_burden(name: str, granularity: Granularity) -> None:
    text = (INPUTS / "texts" / name).read_text(encoding="utf-8")
    began = time.process_time()
    pieces = spoken(granularity, 300, text, [])
    assert time.process_time() - began < 10
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert max(len(piece.encode()) for piece in pieces) <= (1200 if granularity == "length" else 300)
