"""Text as it is said: marks go and words stay, figures of one reading become words, and what is unsure is left alone."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetts.errors import InvalidRequest
from duetts.text.normalize import CODES, cardinal, check_language, check_words, normalize, ordinal, respell
from duetts.text.rules import clean_text

from ..inputs import INPUTS

MARKS = str.maketrans("", "", "#*`>-[]")


def trial(name: str) -> str:
    return (INPUTS / "texts" / name).read_text(encoding="utf-8")


def test_the_trial_text_of_markdown_keeps_every_word() -> None:
    said = normalize(trial("markdown.txt"))
    assert said.split() == trial("markdown.txt").translate(MARKS).replace("(https://example.com/page)", "").split()
    assert said.splitlines()[0] == "Daily plan"


def test_the_trial_text_of_numbers() -> None:
    assert normalize(trial("numbers.txt")) == (
        "The total is one thousand two hundred four dollars and fifty cents on 03/04/2026 at twelve thirty PM. Call 555-0142. "
        "Flight BA2490, gate 7B. It was minus four degrees Celsius, about 3.5x over one million. Version 2.10.1, fifty "
        "percent, 3½ cups, IV, 192.0.2.7."
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("**Wake** at *six*, __now__ or _later_", "Wake at six, now or later"),
        ("***all*** ~~gone~~ `x = 1` ``a``", "all gone x = 1 a"),
        ("snake_case, x_y_z, 2*3*4, 5 * 6 * 7, a_b", "snake_case, x_y_z, 2*3*4, 5 * 6 * 7, a_b"),
        ("# One\n\n## Two ##\n#hashtag stays", "One\n\nTwo\n#hashtag stays"),
        ("- one\n* two\n+ three\n• four\n- [x] done\n1. first", "one\ntwo\nthree\nfour\ndone\n1. first"),
        ("> quoted\n> > twice", "quoted\ntwice"),
        ("above\n---\nbelow\n* * *\nend", "above\n\nbelow\n\nend"),
        ("```python\nprint(1)\n```", "\nprint(1)\n"),
        ("| name | age |\n|------|:---:|\n| Anna | 7 |", "name, age\n\nAnna, 7"),
        ('[link](https://x.org "title") and ![picture](a.png)', "link and picture"),
        ("![](https://example.org/a.png)", "![](example.org)"),
        ("```python", "```python"),
        ("<|speaker:1|>```python", "<|speaker:1|>```python"),
        ("-5 is cold, -- really", "-5 is cold, -- really"),
        ("a * b", "a * b"),
        ("**open and `open", "**open and `open"),
    ],
)
def test_markdown(text: str, said: str) -> None:
    assert normalize(text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Great 🎉 we won 👩🏽\u200d🚀🇳🇴!", "Great we won!"),
        ("1\ufe0f\u20e3 first ✓ done ❤\ufe0f", "1 first done"),
        ("© 2026 ACME™, 5° north → here", "© 2026 ACME™, 5° north → here"),
        ("🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f wins", "wins"),
        ("See https://www.example.org/a/b?c=1&d=2#e.", "See example.org."),
        ("(http://x.org:8080/y) or HTTPS://A.B", "(x.org) or A.B"),
        ("jo.smith@example.org, www.example.org, ftp://x.y", "jo.smith@example.org, www.example.org, ftp://x.y"),
        ("https://", "https://"),
    ],
)
def test_emoji_and_addresses(text: str, said: str) -> None:
    assert normalize(text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("$1", "one dollar"), ("$0", "zero dollars"), ("$0.01", "one cent"), ("£2.02", "two pounds and two pence"),
        ("£0.01", "one penny"), ("€5.50", "five euros and fifty cents"), ("$2.5 million", "two point five million dollars"),
        ("$1,204", "one thousand two hundred four dollars"), ("$5.", "five dollars."), ("$12.5", "$12.5"),
        ("$1,204.505", "$1,204.505"), ("$5-$7", "$5-$7"), ("US$5", "US$5"), ("$5k", "$5k"), ("$12,34", "$12,34"),
        ("50%", "fifty percent"), ("3.25 %", "three point two five percent"), ("50%-60%", "50%-60%"), ("5%off", "5%off"),
        ("1,000", "one thousand"), ("1,000,000", "one million"), ("1,000,001.5", "1,000,001.5"), ("1,00", "1,00"),
        ("0,123", "0,123"), ("1000", "1000"), ("2026", "2026"), ("7", "7"), ("1,234-5", "1,234-5"),
        ("1st", "first"), ("2nd", "second"), ("3rd", "third"), ("12th", "twelfth"), ("20th", "twentieth"),
        ("21st", "twenty-first"), ("100th", "one hundredth"), ("345th", "three hundred forty-fifth"), ("A1st", "A1st"),
        ("-4°C", "minus four degrees Celsius"), ("1 °F", "one degree Fahrenheit"), ("98.6°", "ninety-eight point six degrees"),
        ("12:30 PM", "twelve thirty PM"), ("9:05 a.m.", "nine oh five AM."), ("10:00PM", "ten PM"), ("13:30 PM", "13:30 PM"),
        ("12:30", "12:30"), ("3:1", "3:1"), ("03/04/2026", "03/04/2026"), ("555-0142", "555-0142"), ("2.10.1", "2.10.1"),
        ("192.0.2.7", "192.0.2.7"), ("3½", "3½"), ("BA2490", "BA2490"),
    ],
)  # fmt: skip
def test_figures_of_english(text: str, said: str) -> None:
    assert normalize(text, "en") == said
    assert normalize(f"And then {text} it was, the end") == f"And then {said} it was, the end"
    assert normalize(text, "de") == text


@pytest.mark.parametrize(
    "text", ["Der Preis ist 1,000 Euro, 50% mehr.", "Le prix est 50%.", "50%", "的 the 50%", "De prijs was 50% in totaal."]
)
def test_figures_are_left_alone_unless_the_text_is_surely_english(text: str) -> None:
    assert normalize(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "<|speaker:1|>Hi there.",
        "[laugh] Hello [whisper in a *low* voice].",
        "<|phoneme_start|>*K* _AE_ T 50%<|phoneme_end|> the",
    ],
)
def test_tags_and_phonemes_are_never_touched(text: str) -> None:
    assert normalize(text, "en") == text


def test_marks_around_a_tag_go_all_the_same() -> None:
    assert normalize("**[laugh] funny** and [*not* a link] here") == "[laugh] funny and [*not* a link] here"


@given(st.text(alphabet=st.sampled_from("ab 1,.$%°*_`#>|-[]()<!~:/\n\t\ue000🎉\ufe0f\u20e3thdnrs"), max_size=60))
def test_any_text_comes_through(text: str) -> None:
    for language in ("", "en"):
        said = normalize(text, language)
        assert said == text or "\ue000" not in said
        again = normalize(said, language)
        assert sum(map(str.isalpha, again)) <= sum(map(str.isalpha, said)) * 30 + 1000


@pytest.mark.parametrize(
    "unit",
    ["*a", "* ", "**", "`", "` ", "_a", "[", "[a](", "![", "[]", "[a", "[.", "# ", "> ", "- ", "| ", "|-", "~~", "http://", "http://a/.",
     "<|", "🎉", "<|phoneme_start|>", "1,000", "$1", "9:0", "50%", " ", "a ", "-°", "the ", ":-"],
)  # fmt: skip
@pytest.mark.parametrize("start", ["", "# ", "| ", "the "])
def test_no_text_takes_long(start: str, unit: str) -> None:
    text = start + unit * (32768 // len(unit))
    began = time.process_time()
    normalize(text + "x", "en")
    respell(text, {"a": "b", "the": "d", "50%": "half"})
    assert time.process_time() - began < 3


def test_numbers_in_words() -> None:
    words = {0: "zero", 19: "nineteen", 20: "twenty", 99: "ninety-nine", 100: "one hundred", 1001: "one thousand one",
             1_000_000: "one million", 12_345: "twelve thousand three hundred forty-five",
             10**14: "one hundred trillion"}  # fmt: skip
    assert {number: cardinal(number) for number in words} == words
    assert [ordinal(number) for number in (5, 8, 9, 30, 1000)] == ["fifth", "eighth", "ninth", "thirtieth", "one thousandth"]


# -- languages and words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "code"),
    [("", ""), ("auto", ""), ("Auto", ""), ("en", "en"), ("EN", "en"), ("en-US", "en"), ("pt_BR", "pt"), ("zh-Hans-CN", "zh"),
     ("English", "en"), (" german ", "de"), ("Cantonese", "yue"), ("yue", "yue")],
)  # fmt: skip
def test_languages(language: str, code: str) -> None:
    assert check_language(language) == code


@pytest.mark.parametrize("language", ["xx", "klingon", "e", "en-", "-en", "en US", "english-us", "en-" + 9 * "x", "1", "en\n1"])
def test_unknown_languages(language: str) -> None:
    with pytest.raises(InvalidRequest, match="language") as refusal:
        check_language(language)
    assert refusal.value.field == "language"


def test_the_table_of_languages() -> None:
    assert len(CODES) == len(set(CODES.values())) >= 170
    assert all(len(code) in (2, 3) and name.isalpha() for name, code in CODES.items())


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("SQL, sql, MySQL", {"SQL": "sequel"}, "sequel, sql, MySQL"),
        ("nginx NGINX nginx2", {"nginx": "engine x"}, "engine x engine x nginx2"),
        ("New York and York", {"York": "Yawk", "New York": "Noo Yawk"}, "Noo Yawk and Yawk"),
        ("C++ and C", {"C++": "see plus plus"}, "see plus plus and C"),
        ("a.b axb", {"a.b": r"\1"}, r"\1 axb"),
        ("<|speaker:1|>cat [cat] cat", {"cat": "dog"}, "<|speaker:1|>dog [cat] dog"),
        ("東京 です", {"東京": "とうきょう"}, "とうきょう です"),
        ("x", {}, "x"),
    ],
)
def test_respelling(text: str, words: dict[str, str], said: str) -> None:
    assert respell(text, words) == said


@pytest.mark.parametrize(
    "words", [{"": "x"}, {" a": "x"}, {65 * "a": "x"}, {"a": 257 * "x"}, {str(n): "x" for n in range(257)}]
)
def test_words_that_are_refused(words: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="256") as refusal:
        check_words(words)
    assert refusal.value.field == "pronunciation"


def test_what_is_normalised_is_clean() -> None:
    for text in ("**a** 🎉", "# x\n\n> y", "50% of the 1,000"):
        said = clean_text(normalize(text, "en"), field="input", max_chars=1000)
        assert clean_text(said, field="input", max_chars=1000) == said
