"""Cleaning and checks of user text, over the trial texts and by rule."""

import contextlib
import json
import random
import time
import unicodedata
from typing import Any

import pytest

from duetts.errors import InvalidRequest
from duetts.text.rules import clean_text, frames_bound, least_seconds, styled

from ..inputs import INPUTS

LIMIT = 32768

REFUSED = {
    "chat_tokens.txt": "unsupported_control_token",
    "codec_tokens.txt": "unsupported_control_token",
    "emoji_only.txt": "nothing_to_speak",
    "punctuation_only.txt": "nothing_to_speak",
    "whitespace_only.txt": "invalid_value",
}
CHANGED = {
    "combining_marks.txt",
    "control_chars.txt",
    "crlf_paragraphs.txt",
    "speaker_tags.txt",
    "zero_width.txt",
}
ROWS: list[dict[str, Any]] = json.loads((INPUTS / "manifest.json").read_text(encoding="utf-8"))["files"]
TEXTS = [row for row in ROWS if row["file"].endswith(".txt") and row["file"].startswith("texts/")]


def clean(text: str | None, max_chars: int = LIMIT) -> str:
    return clean_text(text, field="input", max_chars=max_chars)


def read(name: str) -> str:
    return (INPUTS / "texts" / name).read_bytes().decode()


def refusal(text: str | None, max_chars: int = LIMIT) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        clean(text, max_chars)
    assert caught.value.field == "input"
    return caught.value


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row["file"])
def test_trial_texts(row: dict[str, Any]) -> None:
    name = row["file"].removeprefix("texts/")
    text = read(name)
    if name in REFUSED:
        assert 400 in row["status_allowed"]
        assert refusal(text).code == REFUSED[name]
        return
    assert 200 in row["status_allowed"]
    cleaned = clean(text)
    assert clean(cleaned) == cleaned
    if name in CHANGED:
        assert cleaned != text.strip()
    else:
        assert cleaned == text.strip()


def test_trial_texts_that_change() -> None:
    assert clean(read("zero_width.txt")) == "prerequisites are generally easy to overlook"
    assert clean(read("control_chars.txt")) == "Bell tab\there, line\nseparator, next\nline, escape[31m end."
    assert clean(read("crlf_paragraphs.txt")).split("\n") == [
        "First paragraph, first line.", "Still the first paragraph.", "", "Second paragraph here.", "", "",
        "Third paragraph ends the file.",
    ]  # fmt: skip
    assert clean(read("combining_marks.txt")).count("caf\u00e9") == 2
    assert clean(read("speaker_tags.txt")) == (
        "<|speaker:0|>Are you coming?\n<|speaker:1|>In a minute, I am looking for my shoes."
    )


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        (None, "invalid_value", "missing"),
        ("", "invalid_value", "empty"),
        ("\ufeff", "invalid_value", "empty"),
        ("\u200b\u00ad", "invalid_value", "empty"),
        ("a\x00b", "invalid_value", "NUL"),
        ("a\ud800b", "invalid_value", "surrogate"),
        ("\udc00", "invalid_value", "surrogate"),
        ("a" + "\u0301\u0323" * 16, "invalid_value", "marks"),
        ("<|speaker:0|>", "nothing_to_speak", "letter"),
        ("<|speaker:0|> ... <speaker:1>!", "nothing_to_speak", "letter"),
        ("<|phoneme_start|><|phoneme_end|>", "nothing_to_speak", "letter"),
        ("Hi <|im_end|>", "unsupported_control_token", "<|im_end|>"),
        ("Hi <|im\u200b_end\u2060|>", "unsupported_control_token", "<|im_end|>"),
        ("Hi <\x07|voice|\x1b>", "unsupported_control_token", "<|voice|>"),
        ("Hi <|speaker:x|>", "unsupported_control_token", "<|speaker:x|>"),
        ("Hi <|speaker:\u0661|>", "unsupported_control_token", "speaker"),
        ("Hi <|PHONEME_START|>", "unsupported_control_token", "PHONEME"),
        ("<|speaker:0|>fine <|semantic:7|>", "unsupported_control_token", "<|semantic:7|>"),
        ("Hi <|" + "x" * 5000 + "|>", "unsupported_control_token", "<|xxx"),
    ],
)  # fmt: skip
def test_refusals(text: str | None, code: str, named: str) -> None:
    error = refusal(text)
    assert error.code == code
    assert named in error.message
    assert len(error.message) < 200


def test_the_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="ref_text") as caught:
        clean_text("...", field="ref_text", max_chars=9)
    assert caught.value.field == "ref_text"


@pytest.mark.parametrize(
    "text",
    [
        "[laugh]", "7", "\u00bd", "\u597d", "<|phoneme_start|>EH1<|phoneme_end|>", "a <b> | c", "1 < 2 | 3 > 2", "<|",
        "x <|", "<||",
        "<speak>hi</speak>", "tab\there", "a  b",
    ],
)  # fmt: skip
def test_left_alone_or_refused_for_want_of_letters(text: str) -> None:
    if any(character.isalnum() for character in text):
        assert clean(text) == text
    else:
        assert refusal(text).code == "nothing_to_speak"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("\ufeff \n Hello \t\u3000", "Hello"),
        ("e\u00ad\u0301", "\u00e9"),
        ("a\u2028b\u2029c\x85d\x0be\x0cf\rg\r\nh", "a\nb\nc\nd\ne\nf\ng\nh"),
        ("\u202eabc\u202c \u200ffine\u2066", "abc fine"),
        ("<speaker:3>Hi", "<|speaker:3|>Hi"),
        ("intro <|speaker:1|> one  <|speaker:2|>two", "intro\n<|speaker:1|> one\n<|speaker:2|>two"),
        # Persian, Hindi with a joiner after a virama, an old-style Malayalam chillu at the end of a word
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"),
        ("\u0915\u094d\u200d\u0937", "\u0915\u094d\u200d\u0937"),
        ("\u0d05\u0d35\u0d28\u0d4d\u200d a", "\u0d05\u0d35\u0d28\u0d4d\u200d a"),
        ("\u0645\u06cc\u200c\u200c\u200d\u062e", "\u0645\u06cc\u200c\u062e"),
        ("a\U0001f469\U0001f3fd\u200d\U0001f680 \u2764\ufe0f\u200d\U0001f525",
         "a\U0001f469\U0001f3fd\u200d\U0001f680 \u2764\ufe0f\u200d\U0001f525"),
        ("a \U0001f680\u200d b", "a \U0001f680 b"),
        ("\u200dab\u200c", "ab"),
    ],
)  # fmt: skip
def test_cleaning(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_length_counts_what_was_sent() -> None:
    assert clean("\ufeff " + "a" * 10 + "\n\n", 10) == "a" * 10
    error = refusal("a" * 11, 10)
    assert error.code == "input_too_long"
    assert "11" in error.message
    assert "10" in error.message
    assert refusal(read("chars_20k.txt"), 1000).code == "input_too_long"
    assert clean("\U0001f680" * 9 + "a", 10)


def test_any_text_comes_out_clean_or_is_refused() -> None:
    random_source = random.Random(5)
    pieces = (
        "<|", "|>", "<|im_end|>", "<|speaker:1|>", "<speaker:2>", "<|phoneme_start|>", "\u200b", "\u200d", "\u200c", "\ufeff",
        "\x1b", "\r", "\n", " ", "a", "7", "\u0301", "\u0628", "\u094d", "\U0001f680", "\ufe0f", "\u00ad", "<", "|", ">",
    )  # fmt: skip
    accepted = 0
    for _ in range(4000):
        text = "".join(random_source.choices(pieces, k=random_source.randint(1, 12)))
        try:
            cleaned = clean(text)
        except InvalidRequest:
            continue
        accepted += 1
        assert clean(cleaned) == cleaned, ascii(text)
        assert unicodedata.is_normalized("NFC", cleaned)
        assert cleaned == cleaned.strip()
        assert "<|im_end|>" not in cleaned
        assert not any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in cleaned)
        assert cleaned.count("7") == text.count("7")
    assert accepted > 500


@pytest.mark.parametrize(
    "unit", ["\u200d", " \n", "<|", "<speaker:", "<|speaker:1|>", "\u0301\u0323", "\ufe0f", "a\u0301", "\U0001f680\u200d", "["]
)
def test_no_text_takes_long(unit: str) -> None:
    started = time.thread_time()
    with contextlib.suppress(InvalidRequest):
        clean(unit * (LIMIT // len(unit) - 1) + "a")
    assert time.thread_time() - started < 0.5


def test_frames_bound() -> None:
    rate = 44100 / 2048
    assert frames_bound("", rate) == 39
    assert frames_bound("a" * 10, 10.0) == 36
    assert frames_bound("\u597d", 10.0) == 24
    assert frames_bound("1\uff12", 10.0) == 36
    assert frames_bound("Hello, how are you?", rate) * 2048 / 44100 > 4


@pytest.mark.parametrize(
    ("text", "natural_s"),
    [
        ((INPUTS / "ref_text.txt").read_text(encoding="utf-8"), 4.03),  # the control clip
        ("Hello, how are you?", 1.3),
        ("你好，世界！今天的火车晚点了十分钟。", 3.6),
        ("駅の前で待っています。", 1.7),
        ("내일은 비가 온대요.", 1.5),
        ("Завтра мы едем на озеро.", 1.8),
        ("Le marché ferme à dix-neuf heures.", 2.1),
        ("The year 2026.", 1.8),
    ],
)
def test_least_seconds_are_about_half_of_speech(text: str, natural_s: float) -> None:
    assert 0.3 < least_seconds(text) / natural_s < 0.7


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 0.0),
        ("... [whispering softly] <b></b>", 0.0),
        ("<|phoneme_start|>EH1 N JH AH0 N<|phoneme_end|>", 0.0),
        ("<|speaker:12|>ab", 0.09),
        ("Nooooooooooo", 3 * 0.045),
        ("e\u0301\u0301", 0.045),
        ("好", 0.1),
        ("あ", 0.06),
        ("1\uff12", 0.16),
    ],
)
def test_least_seconds_of_what_is_not_said_as_it_stands(text: str, seconds: float) -> None:
    assert least_seconds(text) == pytest.approx(seconds)


def test_a_bound_leaves_room_above_the_least() -> None:
    for row in TEXTS:
        text = read(row["file"].removeprefix("texts/"))
        assert 2 * least_seconds(text) < frames_bound(text, 1.0)


@pytest.mark.parametrize(
    ("text", "instructions", "expected"),
    [
        ("Hello.", "calm", "[calm] Hello."),
        ("Hello.", "", "Hello."),
        ("Hello.", " [] <|> ", "Hello."),
        ("Hello.", "[whisper] in a\nlow  voice", "[whisper in a low voice] Hello."),
        ("Hello.", r"\1 \g<0>", r"[\1 \g 0] Hello."),
        ("[laugh] Hello.", "calm", "[calm] [laugh] Hello."),
        ("<|speaker:1|>Hello.", "calm", "<|speaker:1|>[calm] Hello."),
        ("Once.\n<|speaker:1|> Hello.\n<|speaker:12|>Hi.", "x", "[x] Once.\n<|speaker:1|>[x] Hello.\n<|speaker:12|>[x] Hi."),
    ],
)
def test_instructions_become_one_tag(text: str, instructions: str, expected: str) -> None:
    assert styled(text, instructions) == expected
    assert clean(styled(text, instructions)) == expected
