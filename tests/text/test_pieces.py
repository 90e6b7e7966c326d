"""Long text in pieces: nothing lost, nothing doubled, bounds kept, and cuts where a reader would pause."""

import json
import time
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencex import segment

from duetts.errors import InvalidRequest
from duetts.json_fields import read_json
from duetts.text.pieces import BRACKETS, SPEAKER_TAG, WHITESPACE, cut, has_speech
from duetts.text.rules import CONTROL_TOKEN, TURN_START, clean_text

from ..inputs import INPUTS

GOLDEN = INPUTS.parent / "golden"
LENGTHS = (100, 300, 1000)
ROWS = json.loads((INPUTS / "manifest.json").read_text(encoding="utf-8"))["files"]
SPOKEN = [row["file"] for row in ROWS if row["file"].startswith("texts/") and 200 in row["status_allowed"]]


def clean(text: str) -> str:
    return clean_text(text, field="input", max_chars=10**6)


def read(name: str) -> str:
    return clean((INPUTS / "texts" / name).read_bytes().decode())


def bare(text: str) -> str:
    """Without space of any kind."""
    return "".join(text.split())


def said(text: str, pieces: list[str]) -> str:
    """What the pieces say together, without the tags that are said again at the head of a piece."""
    rest, parts = bare(text), []
    for piece in map(bare, pieces):
        tag = SPEAKER_TAG.match(piece)
        again = tag is not None and not rest.startswith(piece)
        part = piece[tag.end() :] if again and tag else piece
        parts.append(part)
        rest = rest[len(part) :]
    return "".join(parts)


def check(text: str, max_bytes: int) -> list[str]:
    """Cuts a text and asserts what holds for every text."""
    pieces = cut(text, max_bytes)
    assert said(text, pieces) == bare(text)
    assert all(has_speech(piece) for piece in pieces)
    assert all(piece == piece.strip() for piece in pieces)
    for piece in pieces:
        assert len(piece.encode()) <= max_bytes or may_be_long(piece, max_bytes), piece
    assert not any(unicodedata.category(piece[0])[0] == "M" for piece in pieces[1:])
    kept = [found for found in BRACKETS.findall(text) if len(found.encode()) <= max_bytes // 2]
    together = [found for piece in pieces for found in BRACKETS.findall(piece)]
    assert all(together.count(found) >= kept.count(found) for found in kept)
    for token in ("<|phoneme_start|>", "<|phoneme_end|>"):
        assert sum(piece.count(token) for piece in pieces) == text.count(token)
    assert sum(len(CONTROL_TOKEN.findall(piece)) for piece in pieces) >= len(CONTROL_TOKEN.findall(text))
    return pieces


def may_be_long(piece: str, max_bytes: int) -> bool:
    """Whether it holds a phoneme pair, a silent turn, long tags or much without letters, which may leave no choice."""
    if any(not has_speech(turn) for turn in TURN_START.split(piece) if turn):
        return True
    silent = SPEAKER_TAG.sub("", piece)
    silent = "".join(character for character in silent if not character.isalnum())
    return "phoneme" in piece or len("".join(SPEAKER_TAG.findall(piece)) + silent.encode().decode("latin1")) > max_bytes // 2


# -- the trial texts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", LENGTHS)
@pytest.mark.parametrize("name", SPOKEN)
def test_every_trial_text(name: str, max_bytes: int) -> None:
    try:
        text = clean((INPUTS / name).read_bytes().decode())
    except InvalidRequest:
        pytest.skip("is refused before it is cut")
    pieces = check(text, max_bytes)
    assert all(len(piece.encode()) <= max_bytes for piece in pieces)
    if len(text.encode()) <= max_bytes:
        assert pieces == [text]


@pytest.mark.parametrize("max_bytes", LENGTHS)
@pytest.mark.parametrize("name", ["chars_20k.txt", "long_paragraph.txt"])
def test_prose_is_cut_at_its_sentences_only(name: str, max_bytes: int) -> None:
    pieces = check(read(name), max_bytes)
    assert all(piece.endswith(".") for piece in pieces)
    sizes = [len(piece) for piece in pieces]
    assert min(sizes) > max_bytes / 2


@pytest.mark.parametrize("max_bytes", LENGTHS)
def test_without_punctuation_only_spaces_are_cut(max_bytes: int) -> None:
    text = read("no_punctuation.txt")
    pieces = check(text, max_bytes)
    assert " ".join(pieces) == text
    assert min(map(len, pieces)) > max_bytes / 2


@pytest.mark.parametrize("max_bytes", LENGTHS)
def test_a_word_without_end_is_cut_evenly(max_bytes: int) -> None:
    text = read("long_word.txt")
    pieces = check(text, max_bytes)
    assert "".join(pieces) == text
    assert min(map(len, pieces)) > 0.6 * max_bytes


def test_a_text_in_ten_languages_is_cut_between_them() -> None:
    pieces = cut(read("mixed_languages.txt"), 100)
    assert all(piece[-1] in ".?。।" for piece in pieces)


# -- where cuts are made ---------------------------------------------------------------------------------------------------


def test_what_fits_stays_as_it_stands() -> None:
    text = "One.  Two,\n\nthree... [laugh] <|speaker:3|> four"
    assert cut(text, 100) == [text]


SENTENCE = "The quick brown fox jumps over the lazy dog again"  # 49 bytes


@pytest.mark.parametrize(
    ("text", "cuts"),
    [
        (f"{SENTENCE}. {SENTENCE}. {SENTENCE}.", [f"{SENTENCE}. {SENTENCE}.", f"{SENTENCE}."]),
        (f"{SENTENCE}, {SENTENCE}, {SENTENCE}.", [f"{SENTENCE}, {SENTENCE},", f"{SENTENCE}."]),
        (f"{SENTENCE} — {SENTENCE} — {SENTENCE}.", [f"{SENTENCE} —", f"{SENTENCE} —", f"{SENTENCE}."]),
        (f"{SENTENCE}\n{SENTENCE}\n{SENTENCE}", [f"{SENTENCE}\n{SENTENCE}", SENTENCE]),
        (f"{SENTENCE}\n\n{SENTENCE}, and\n{SENTENCE}", [SENTENCE, f"{SENTENCE}, and", SENTENCE]),
        # A comma comes before a space, a full stop before a comma, however unequal that makes the pieces.
        (f"{SENTENCE} once, {SENTENCE} and more", [f"{SENTENCE} once,", f"{SENTENCE} and more"]),
        (f"One, two, three and four. {SENTENCE}, {SENTENCE}.", ["One, two, three and four.", f"{SENTENCE}, {SENTENCE}."]),
        # No one-word rest: rather a cut at a comma.
        (f"{SENTENCE}, {SENTENCE[:47]}. Yes.", [f"{SENTENCE},", f"{SENTENCE[:47]}. Yes."]),
        (f"Yes. {SENTENCE}, {SENTENCE[:47]}.", [f"Yes. {SENTENCE},", f"{SENTENCE[:47]}."]),
    ],
)  # fmt: skip
def test_places(text: str, cuts: list[str]) -> None:
    assert check(text, 101) == cuts


@pytest.mark.parametrize(
    "kept",
    ["M. Dupont", "z. B. Äpfel", "3. Oktober", "Dr. Smith", "J. R. R. Tolkien", "e.g. this", "usw. und", "12:30", "1,000,000",
     "3.14159", "a.m. today", "U.S. Army", "example.com/a,b?c=d", "well-known"],
)  # fmt: skip
def test_what_looks_like_an_end_and_is_none(kept: str) -> None:
    """There are real ends around the words, at every distance: they are always the better places."""
    for length in range(20, 70):
        filler = "word " * (length // 5) + "words"[: 4 + length % 2]
        pieces = check(f"Before that {filler}. They say that {kept} was there. After that {filler}.", 100)
        assert any(kept in piece for piece in pieces)
        assert all(piece.endswith(".") for piece in pieces)


@pytest.mark.parametrize(
    ("sentence", "joint"),
    [
        ("你好世界今天天气很好我们去公园。", ""),
        ("これはとても長い文章です。", ""),
        ("यह एक लंबा वाक्य है।", " "),
        ("هل أنت هنا اليوم؟", " "),
        ("Это длинное предложение!", " "),
        ("ነህ ደህና ሰላም።", " "),
    ],
)
def test_ends_in_other_scripts(sentence: str, joint: str) -> None:
    pieces = check(joint.join([sentence] * 12), 150)
    assert len(pieces) > 2
    assert all(bare(piece) == bare(sentence) * (len(bare(piece)) // len(bare(sentence))) for piece in pieces)


@pytest.mark.parametrize(
    "cluster",
    ["e\u0323\u0302", "👩\u200d👩\u200d👧\u200d👦", "🇩🇪", "👍🏽", "क्षि", "กำ", "각", "ᄀ\u1161\u11a8", "a\u20dd",
     "🏴\U000e0067\U000e0062\U000e007f", "प्र\u200dक"],
)  # fmt: skip
def test_what_people_see_as_one_character_stays_whole(cluster: str) -> None:
    whole = clean("x" + cluster)[1:]
    for lead in range(4):
        for piece in check(clean("x" * lead + f"{cluster}x" * 120), 100):
            assert set(piece.replace(whole, "x")) == {"x"}


def test_more_joined_characters_than_a_piece_holds() -> None:
    assert len(check(clean("Hi " + "👩\u200d" * 500 + "👩 there"), 100)) >= 1
    assert len(check("x" + "<|speaker:1|>" * 50 + "x", 100)) >= 1


def test_tags_stay_whole_and_with_what_follows() -> None:
    text = "[whispering in a very low voice] word word, " * 30
    for max_bytes in (100, 150, 300):
        for piece in check(text.strip(), max_bytes):
            assert not piece.endswith("]")
            assert piece.count("[") == piece.count("]")
    phonemes = "say <|phoneme_start|>EH1 N JH AH0 N<|phoneme_end|> now " * 20
    for piece in check(phonemes.strip(), 100):
        assert piece.count("<|phoneme_start|>EH1 N JH AH0 N<|phoneme_end|>") == piece.count("EH1")
    assert len(check("[a] " * 200 + "end", 100)) > 1
    assert len(check("[" + "long bracket " * 40 + "] is text, " + "word " * 40, 100)) > 5
    assert len(check("<|phoneme_start|>" + "never closed " * 40, 100)) > 3


def test_a_phoneme_pair_longer_than_a_piece_is_left_to_the_check_of_lengths() -> None:
    pair = "<|phoneme_start|>" + "AH0 " * 100 + "<|phoneme_end|>"
    pieces = check(f"Say {pair} and then some more words, please.", 100)
    assert sum(pair in piece for piece in pieces) == 1


# -- turns -----------------------------------------------------------------------------------------------------------------


def test_a_turn_that_fits_is_not_cut() -> None:
    turns = [f"<|speaker:{index % 2}|>{SENTENCE}. {SENTENCE[:20]}." for index in range(7)]
    assert check("\n".join(turns), 100) == turns
    assert check("\n".join(turns), 200) == ["\n".join(turns[index : index + 2]) for index in range(0, 7, 2)]


def test_what_is_cut_inside_a_turn_has_the_tag_again() -> None:
    text = f"<|speaker:0|>{SENTENCE}. {SENTENCE}. {SENTENCE}. {SENTENCE}.\n<|speaker:1|>Fine."
    twice = f"<|speaker:0|>{SENTENCE}. {SENTENCE}."
    assert check(text, 140) == [twice, f"{twice}\n<|speaker:1|>Fine."]
    assert check(text, 125)[1:] == [f"<|speaker:0|>{SENTENCE}.", f"<|speaker:0|>{SENTENCE}.\n<|speaker:1|>Fine."]


def test_text_before_the_first_tag_is_a_turn_of_its_own() -> None:
    pieces = check(f"{SENTENCE}. {SENTENCE}. {SENTENCE}.\n<|speaker:4|>{SENTENCE}.", 101)
    assert pieces[0] == f"{SENTENCE}. {SENTENCE}."
    assert pieces[1:] == [f"{SENTENCE}.", f"<|speaker:4|>{SENTENCE}."]


def test_turns_are_grouped_as_the_reference_groups_them() -> None:
    cases = read_json(GOLDEN / "prompts.json")["cases"]
    grouped = [case for case in cases.values() if len(case["batch_texts"]) > 1]
    assert len(grouped) >= 2
    for case in grouped:
        assert cut(clean(case["text"]), case["chunk_length"]) == case["batch_texts"]


def test_a_tag_longer_than_a_piece() -> None:
    tag = f"<|speaker:{'1' * 400}|>"
    pieces = check(f"{tag}{SENTENCE}. {SENTENCE}. {SENTENCE}.", 100)
    assert all(piece.startswith(tag) for piece in pieces)
    assert len(pieces) < 8


# -- what has no sound -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["...", "—", "🎉", "?!", "* * *", "<|speaker:5|>", "<|speaker:5|>..."])
def test_what_has_no_letter_is_no_piece_of_its_own(mark: str) -> None:
    for text in (
        f"{SENTENCE}. {SENTENCE}.\n\n{mark}\n\n{SENTENCE}.",
        f"{mark}\n{SENTENCE}. {SENTENCE}.",
        f"{SENTENCE}. {SENTENCE}. {mark}",
        f"<|speaker:0|>{SENTENCE}.\n<|speaker:1|>{mark}\n<|speaker:0|>{SENTENCE}.",
    ):
        check(clean(text), 100)
    assert len(check(clean(f"{SENTENCE}. {mark * 400} {SENTENCE}."), 100)) >= 2 - (mark.startswith("<"))


# -- any text --------------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    ["a", "word", "Mr.", "z. B.", "…", "...", "?!", ",", ";", "—", "\n", "\n\n", "[laugh]", "[", "]", "(", "“", "”", "«", "»",
     "中文。", "这是一个很长的句子，没有空格，", "。", "！", "नमस्ते।", "สวัสดีครับ", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "e\u0301", "\u00a0",
     "\u3000", "1,000.5", "3.", "A", "A\u00a0.", "<|speaker:0|>", "<|speaker:12|>", "<|phoneme_start|>", "<|phoneme_end|>",
     "supercalifragilisticexpialidocious" * 4, "http://a.b/c?d=e", "\u200d", "\u0301", "12:30", "ok.", "Ok. And", "'", '"']
)  # fmt: skip
MADE = st.lists(st.tuples(WORDS, st.sampled_from(["", " ", "  ", " "])), min_size=1, max_size=120).map(
    lambda parts: "".join(word + space for word, space in parts)
)


@settings(max_examples=400, deadline=None)
@given(text=MADE, max_bytes=st.integers(100, 320))
@example(text="a" + "." * 900 + "b", max_bytes=100)
@example(text="<|speaker:0|>" * 30 + "a", max_bytes=100)
def test_any_made_text(text: str, max_bytes: int) -> None:
    try:
        text = clean(text)
    except InvalidRequest:
        return
    check(text, max_bytes)


@settings(max_examples=300, deadline=None)
@given(text=st.text(min_size=60, max_size=700), max_bytes=st.integers(100, 300))
def test_any_text(text: str, max_bytes: int) -> None:
    try:
        text = clean(text)
    except InvalidRequest:
        return
    check(text, max_bytes)


@settings(max_examples=500, deadline=None)
@given(text=st.one_of(MADE, st.text(max_size=200)))
def test_the_sentence_library_never_panics_on_what_it_is_given(text: str) -> None:
    """A Rust panic is no `Exception`, so it must not happen: wide spaces, its known trigger, are made plain."""
    for line in text.split("\n"):
        line = WHITESPACE.sub(" ", line)
        assert "".join(segment("en", line)) == line


HARD = {
    "full stops": "a. ", "letters": "a", "words": "a ", "cjk stops": "中。", "cjk": "中", "open brackets": "[",
    "brackets": "[a] ", "quotes": '"a. ', "phonemes": "<|phoneme_start|>a ", "turns": "<|speaker:1|>a\n", "flags": "🇩",
    "family": "👩\u200d", "dots": ".", "spaces": "a" + " " * 20, "space": "a" + " " * 32000 + ".", "newlines": "a\n",
    "commas": "a, ", "marks": "a" + "\u0316" * 20, "abbreviations": "Mr. ",
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_hard_texts_take_no_time(name: str) -> None:
    """33,000 characters of anything; the limit is far above what is taken and far below what quadratic work would take."""
    text = "b " + (HARD[name] * 33000)[:33000].strip() + " b"
    for max_bytes in (100, 1000):
        began = time.process_time()
        check_pieces = cut(text, max_bytes)
        assert time.process_time() - began < 4
        assert said(text, check_pieces) == bare(text)
