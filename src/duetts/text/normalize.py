"""Text as it is written made text as it is said, where a request asks for it: Markdown, emoji, addresses, figures of English.

What is unsure is left alone: the models read plain figures in any language by themselves. So only what has one reading becomes
words (amounts, per cent, grouped thousands, ordinals, degrees, times of day), and that in English only, which is what
`language` says or, without it, what a text with English words in ASCII letters is taken for. Dates, years, numbers of phones,
flights and versions stay as they are. Tags, tokens and phonemes are never touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from duetts.errors import InvalidRequest

# ISO 639-1, and some of 639-3 that are asked for, with the names that requests may use.
LANGUAGES = """
aa Afar, ab Abkhazian, af Afrikaans, ak Akan, am Amharic, an Aragonese, ar Arabic, as Assamese, av Avaric, ay Aymara,
az Azerbaijani, ba Bashkir, be Belarusian, bg Bulgarian, bi Bislama, bm Bambara, bn Bengali, bo Tibetan, br Breton, bs Bosnian,
ca Catalan, ce Chechen, ch Chamorro, co Corsican, cr Cree, cs Czech, cv Chuvash, cy Welsh, da Danish, de German, dv Dhivehi,
dz Dzongkha, ee Ewe, el Greek, en English, eo Esperanto, es Spanish, et Estonian, eu Basque, fa Persian, ff Fula, fi Finnish,
fj Fijian, fo Faroese, fr French, fy Frisian, ga Irish, gd Gaelic, gl Galician, gn Guarani, gu Gujarati, gv Manx, ha Hausa,
he Hebrew, hi Hindi, hr Croatian, ht Haitian, hu Hungarian, hy Armenian, ia Interlingua, id Indonesian, ig Igbo, is Icelandic,
it Italian, iu Inuktitut, ja Japanese, jv Javanese, ka Georgian, kg Kongo, ki Kikuyu, kk Kazakh, kl Greenlandic, km Khmer,
kn Kannada, ko Korean, ks Kashmiri, ku Kurdish, kv Komi, kw Cornish, ky Kyrgyz, la Latin, lb Luxembourgish, lg Ganda,
ln Lingala, lo Lao, lt Lithuanian, lv Latvian, mg Malagasy, mh Marshallese, mi Maori, mk Macedonian, ml Malayalam, mn Mongolian,
mr Marathi, ms Malay, mt Maltese, my Burmese, nb Bokmal, ne Nepali, nl Dutch, nn Nynorsk, no Norwegian, nv Navajo, ny Chichewa,
oc Occitan, om Oromo, or Odia, os Ossetian, pa Punjabi, pl Polish, ps Pashto, pt Portuguese, qu Quechua, rm Romansh, rn Rundi,
ro Romanian, ru Russian, rw Kinyarwanda, sa Sanskrit, sc Sardinian, sd Sindhi, se Sami, sg Sango, si Sinhala, sk Slovak,
sl Slovenian, sm Samoan, sn Shona, so Somali, sq Albanian, sr Serbian, ss Swati, st Sotho, su Sundanese, sv Swedish, sw Swahili,
ta Tamil, te Telugu, tg Tajik, th Thai, ti Tigrinya, tk Turkmen, tl Tagalog, tn Tswana, to Tongan, tr Turkish, ts Tsonga,
tt Tatar, tw Twi, ty Tahitian, ug Uyghur, uk Ukrainian, ur Urdu, uz Uzbek, ve Venda, vi Vietnamese, wo Wolof, xh Xhosa,
yi Yiddish, yo Yoruba, za Zhuang, zh Chinese, zu Zulu, yue Cantonese, cmn Mandarin, wuu Wu, nan Hokkien, fil Filipino,
haw Hawaiian, ceb Cebuano
"""
CODES = {name.lower(): code for code, name in (entry.split() for entry in LANGUAGES.split(","))}
ANY_LANGUAGE = ("", "auto")
TAG = re.compile(r"([a-z]{2,3})([-_][a-z0-9]{1,8}){0,4}")

# Words of English that are none of another language in ASCII letters.
ENGLISH = re.compile(r"\b(the|and|you|your|this|they|what|with|would|should|please|there|which)\b", re.IGNORECASE)

MAX_WORDS, MAX_WORD_CHARS, MAX_SAID_CHARS = 256, 64, 256  # of a pronunciation
KEPT = "\ue000"  # in the place of what is not touched; a private character, which says nothing
TOKEN = re.compile(r"<\|[^|<>]*\|>")
UNTOUCHED = re.compile(r"<\|phoneme_start\|>[^<]*<\|phoneme_end\|>|<\|[^|<>]*\|>|\[(?![ xX]\])[^\[\]\n]*\](?!\()")

EMOJI = re.compile(
    "(?<=[0-9#*])\ufe0f?\u20e3|"
    "[\U0001f000-\U0001faff\u2600-\u27bf\u2b00-\u2bff\u231a\u231b\u23e9-\u23fa\U000e0020-\U000e007f\ufe0e\ufe0f]\u200d?"
)
SPACES = re.compile(r"[ \t]+")
NO_SPACE_BEFORE = frozenset((*".,;:!?)\n", ""))
HEADING = re.compile(r"^[ \t]*#{1,6}[ \t]+(.*)$", re.MULTILINE)
# Each of these takes time in proportion to the text, whatever that is.
MARKDOWN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.MULTILINE), said)
    for pattern, said in (
        (r"^[ \t]*(?:```|~~~)[^\n`]*$", ""),  # the ends of a block of code
        (r"^[ \t]*(?:[-*_][ \t]*){3,}$", ""),  # a line across the page
        (r"^[ \t]*(?:\|[ \t]*)?(?::?-{3,}:?[ \t]*\|[ \t]*)+(?::?-{3,}:?[ \t]*)?$", ""),  # below a table's head
        (r"^[ \t]*(?:>[ \t]?)+", ""),
        (r"^[ \t]*[-*+•][ \t]+(?:\[[ xX]\][ \t]+)?", ""),
        (r"!?\[(?=[^\[\]\n]*\w)([^\[\]\n]*)\]\([^()\s]*(?:[ \t]+\"[^\"\n]*\")?\)", r"\1"),
        (r"(?<!`)(`{1,3})([^`\n]+)\1(?!`)", r"\2"),
        (r"(?<![\w*])(\*{1,3})(?=\S)([^*\n]+?)(?<=\S)\1(?![\w*])", r"\2"),
        (r"(?<!\w)(_{1,3})(?=\S)([^_\n]+?)(?<=\S)\1(?!\w)", r"\2"),
        (r"~~(?=\S)([^~\n]+?)(?<=\S)~~", r"\1"),
    )
)
TABLE_ROW = re.compile(r"^[ \t]*\|(.+)\|[ \t]*$", re.MULTILINE)
WEB_ADDRESS = re.compile(r"\bhttps?://(?:www\.)?([^\s/?#:<>\"']+)(?:[:/?#][^\s<>\"']*[^\s<>\"'.,;:!?)\]])?/?", re.IGNORECASE)

ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ("", " thousand", " million", " billion", " trillion")
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
            "twelve": "twelfth"}  # fmt: skip
CURRENCIES = {"$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny")}
ALONE, END = r"(?<![\w.,:/+\-–$€£])", r"(?![\w%°]|[.,:/\-–][0-9$€£])"  # nothing before or behind makes another number of it
WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{1,12})"


def check_language(language: str) -> str:
    """The code of a language by its BCP-47 tag or English name; empty if none is said. Raises `InvalidRequest`."""
    name = language.strip().lower()
    if name in ANY_LANGUAGE:
        return ""
    if name in CODES:
        return CODES[name]
    tag = TAG.fullmatch(name)
    if tag is not None and tag[1] in CODES.values():
        return tag[1]
    raise InvalidRequest(
        "language is neither a tag such as en or pt-BR nor the English name of a language", field="language"
    )  # fmt: skip


def normalize(text: str, language: str = "") -> str:
    """The text as it is said; as it stands, if nothing would be left to say. `language` is a code of `check_language`."""
    english = language == "en" if language else text.isascii() or not any(c.isalpha() for c in re.sub("[\x00-\x7f]", "", text))
    said = _untouched(text, lambda rest: _clean(rest, english and (bool(language) or ENGLISH.search(rest) is not None)))
    return said if any(character.isalnum() for character in TOKEN.sub("", said)) else text


def check_words(words: Mapping[str, str]) -> None:
    """Refuses words and respellings of odd number or length."""
    fits = [
        1 <= len(word) <= MAX_WORD_CHARS and word == word.strip() and len(said) <= MAX_SAID_CHARS
        for word, said in words.items()
    ]
    if len(fits) > MAX_WORDS or not all(fits):
        raise InvalidRequest(
            f"pronunciation must have at most {MAX_WORDS} words of 1 to {MAX_WORD_CHARS} characters, no space at an end, and "
            f"at most {MAX_SAID_CHARS} characters for each", field="pronunciation",
        )  # fmt: skip


def respell(text: str, words: Mapping[str, str]) -> str:
    """The text with whole words replaced. A word with capitals is meant in this spelling only, others in any."""
    if not words:
        return text
    exact = {word: said for word, said in words.items() if word != word.lower()}
    loose = {word: said for word, said in words.items() if word == word.lower()}
    any_word = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?:{any_word})(?!\w)", re.IGNORECASE)

    def said(match: re.Match[str]) -> str:
        return exact.get(match[0], loose.get(match[0].lower(), match[0]))

    return _untouched(text, lambda rest: pattern.sub(said, rest))


def _untouched(text: str, change: Callable[[str], str]) -> str:
    """The changed text, but for tags, tokens and phonemes."""
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return KEPT

    changed = change(UNTOUCHED.sub(keep, text.replace(KEPT, "")))
    parts = iter(kept)
    return re.sub(KEPT, lambda _: next(parts), changed)


def _clean(text: str, english: bool) -> str:
    for pattern, said in MARKDOWN:
        text = pattern.sub(said, text)
    text = HEADING.sub(lambda heading: heading[1].rstrip("# \t"), text)
    text = TABLE_ROW.sub(lambda row: ", ".join(cell.strip() for cell in row[1].split("|") if cell.strip()), text)
    text = EMOJI.sub("", WEB_ADDRESS.sub(r"\1", text))
    if english:
        for figure, words in FIGURES:
            text = figure.sub(words, text)
    return SPACES.sub(_space, text)


def _space(match: re.Match[str]) -> str:
    """One space, or none at the ends of lines and before what closes."""
    text, start, end = match.string, match.start(), match.end()
    return "" if text[start - 1 : start] in ("", "\n") or text[end : end + 1] in NO_SPACE_BEFORE else " "


# -- figures of English --------------------------------------------------------------------------------------------------


def cardinal(number: int) -> str:
    """A number from 0 to 10^15 in words."""
    if number < 1000:
        return _hundreds(number)
    groups, scale = [], 0
    while number:
        number, group = divmod(number, 1000)
        if group:
            groups.append(_hundreds(group) + SCALES[scale])
        scale += 1
    return " ".join(reversed(groups))


def _hundreds(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    return f"{ONES[number // 100]} hundred" + (f" {_hundreds(number % 100)}" if number % 100 else "")


def ordinal(number: int) -> str:
    """As `cardinal`, in order."""
    words = cardinal(number)
    head = re.match(r"(.*[ -])?(.*)", words)
    assert head is not None, "any text matches"
    last = head[2]
    last = ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return (head[1] or "") + last


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _decimal(text: str) -> str:
    """A number with or without a point in words."""
    whole, point, rest = text.partition(".")
    words = cardinal(_whole(whole))
    return f"{words} point {' '.join(ONES[int(digit)] for digit in rest)}" if point else words


def _amount(match: re.Match[str]) -> str:
    unit, small = CURRENCIES[match["sign"]]
    if match["scale"]:
        return f"{_decimal(match['whole'] + (match['rest'] or ''))} {match['scale']} {unit}s"
    whole, cents = _whole(match["whole"]), int((match["rest"] or ".0")[1:])
    if match["rest"] and len(match["rest"]) != 3:
        return match[0]
    smalls = "pence" if small == "penny" else f"{small}s"
    parts = [f"{cardinal(whole)} {unit}{'' if whole == 1 else 's'}"] if whole or not cents else []
    parts += [f"{cardinal(cents)} {small if cents == 1 else smalls}"] if cents else []
    return " and ".join(parts)


def _time(match: re.Match[str]) -> str:
    hour, minute = int(match[1]), int(match[2])
    minutes = "" if not minute else f" oh {ONES[minute]}" if minute < 10 else f" {cardinal(minute)}"
    return f"{cardinal(hour)}{minutes} {match[3].upper().replace('.', '')}"


def _degrees(match: re.Match[str]) -> str:
    scale = {"C": " Celsius", "F": " Fahrenheit", "": ""}[match[3]]
    plural = "" if match[2] == "1" else "s"
    return f"{'minus ' if match[1] else ''}{_decimal(match[2])} degree{plural}{scale}"


AMOUNT = rf"(?P<sign>[$€£])(?P<whole>{WHOLE})(?P<rest>\.[0-9]{{1,3}})?(?:[ ](?P<scale>million|billion|trillion)\b)?"
FIGURES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (re.compile(rf"{ALONE}{AMOUNT}{END}"), _amount),
    (re.compile(rf"{ALONE}({WHOLE}(?:\.[0-9]{{1,6}})?) ?%{END}"), lambda match: f"{_decimal(match[1])} percent"),
    (re.compile(r"(?<![\w.,:/+–$€£])([-−]?)([0-9]{1,4}(?:\.[0-9]{1,3})?) ?°([CF]?)(?!\w)"), _degrees),
    (re.compile(rf"{ALONE}(1[0-2]|0?[1-9]):([0-5][0-9]) ?([AaPp]\.?[Mm]\b)"), _time),
    (re.compile(rf"{ALONE}([0-9]{{1,4}})(?:st|nd|rd|th)\b"), lambda match: ordinal(int(match[1]))),
    (re.compile(rf"{ALONE}([1-9][0-9]{{0,2}}(?:,[0-9]{{3}}){{1,4}}){END}"), lambda match: cardinal(_whole(match[1]))),
)  # fmt: skip
