"""What may be spoken: cleaning and checks of user text, and how long speech of it can be. No model, no tokenizer.

Decisions, the same for `input` and transcripts:
- Text is normalised to NFC. Line ends of every kind become newlines, tabs stay, other control characters go (only they: what
  follows an escape character is ordinary text).
- Marks that have no sound go: soft hyphens, zero-width spaces, word joiners, byte-order marks, direction marks. The joiners
  U+200C and U+200D stay after a letter of a script that is written with them, and U+200D inside emoji.
- Emoji, Markdown, HTML and SSML reach the model as they stand: nothing is named, honoured or deleted by default.
- `[tags]` pass through and count as something to speak, as does the content of a phoneme pair. Speaker tags do not.
- More than 30 combining marks on one character (Unicode's stream-safe limit; no language comes near it) are refused.
- Each speaker's turn begins on a line of its own, as the model was trained; text before the first tag is a turn too.
- Control tokens are looked for last, so that no invisible mark can hide one.
"""

from __future__ import annotations

import math
import re
import unicodedata
from itertools import groupby

from duetts.errors import InvalidRequest

CONTROL_TOKEN = re.compile(r"<\|[^|<>]*\|>")
ALLOWED_TOKEN = re.compile(r"<\|(?:speaker:[0-9]+|phoneme_start|phoneme_end)\|>")
LEGACY_SPEAKER = re.compile(r"<speaker:([0-9]+)>")
TURN_START = re.compile(r"(?=<\|speaker:[0-9]+\|>)")
TURN_TAG = re.compile(r"(?:<\|speaker:[0-9]+\|>)?")
NO_TAG = re.compile(r"[\[\]<>|]")  # what cannot stand inside a style tag
SURROGATE = re.compile("[\ud800-\udfff]")

LINE_END = re.compile("\r\n?|[\v\f\x85\u2028\u2029]")
# C0 and C1 controls but tab and newline, then what is invisible and silent everywhere.
SILENT = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
JOINERS = re.compile("[\u200c\u200d]+")
# Arabic to Mandaic, the Indic scripts, Myanmar, Khmer and Mongolian, Arabic presentation forms.
JOINING_SCRIPTS = re.compile("[\u0600-\u0dff\u1000-\u109f\u1780-\u18af\ua840-\uabff\ufb50-\ufdff\ufe70-\ufefe]")
EMOJI_TAIL = re.compile("[\ufe0f\U0001f3fb-\U0001f3ff]")

TOKEN_SHOWN_CHARS = 40
MAX_STACKED_MARKS = 30

BASE_S = 1.8
BYTE_S = 0.18
DIGIT_S = 0.5

# Seconds that a character takes at the very least, about half of what it takes read aloud: English has 11 letters a second,
# Mandarin and Korean 5 syllables, Japanese 8 kana.
LEAST_LETTER_S, LEAST_SYLLABLE_S, LEAST_KANA_S, LEAST_DIGIT_S = 0.045, 0.1, 0.06, 0.08
SYLLABLES = re.compile("[\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U000323af]")
KANA = re.compile("[\u3041-\u309f\u30a1-\u30ff\uff66-\uff9d]")
# Tags and markup, which may not be spoken, and phonemes, which are more letters than sounds.
UNSOUNDED = re.compile(r"\[[^\[\]]*\]|<\|phoneme_start\|>.*?<\|phoneme_end\|>|<[^<>]*>", re.DOTALL)
DRAWN_OUT = re.compile(r"(.)\1{2,}")


def clean_text(text: str | None, *, field: str, max_chars: int, spoken: bool = True) -> str:
    """The text as the model gets it. Cleaning what is clean changes nothing. What is not `spoken` may be empty.

    `max_chars` counts what was sent, trimmed. Raises `InvalidRequest` with `field` and a code: `invalid_value` (missing,
    empty, NUL, unpaired surrogate, stacked marks), `input_too_long`, `unsupported_control_token`, `nothing_to_speak`.
    """
    if text is None:
        raise InvalidRequest(f"{field} is missing", field=field)
    if "\x00" in text:
        raise InvalidRequest(f"{field} holds a NUL character", field=field)
    if SURROGATE.search(text):
        raise InvalidRequest(f"{field} holds an unpaired surrogate, which is no character", field=field)
    length = len(text.strip().removeprefix("\ufeff").strip())
    if length > max_chars:
        raise InvalidRequest(
            f"{field} has {length} characters; at most {max_chars} are allowed", field=field, code="input_too_long"
        )
    text = JOINERS.sub(_needed_joiner, SILENT.sub("", LINE_END.sub("\n", text)))
    if _stacked_marks(text) > MAX_STACKED_MARKS:  # normalising them takes quadratic time
        raise InvalidRequest(f"{field} stacks more than {MAX_STACKED_MARKS} marks on one character", field=field)
    text = unicodedata.normalize("NFC", text)
    text = LEGACY_SPEAKER.sub(r"<|speaker:\1|>", text)
    turns = [turn.strip() for turn in TURN_START.split(text)]
    text = "\n".join(turn for turn in turns if turn)
    _check_tokens(text, field)
    if not spoken:
        return text
    if not text:
        raise InvalidRequest(f"{field} is empty", field=field)
    if not any(character.isalnum() for character in ALLOWED_TOKEN.sub("", text)):
        raise InvalidRequest(f"{field} has no letter and no digit: nothing to speak", field=field, code="nothing_to_speak")
    return text


def styled(text: str, instructions: str) -> str:
    """The text with instructions of how to speak it as one tag, at its beginning and at that of each speaker's turn."""
    words = " ".join(NO_TAG.sub(" ", instructions).split())
    if not words:
        return text
    turns = [(turn, len(found[0])) for turn in TURN_START.split(text) if turn and (found := TURN_TAG.match(turn))]
    return "".join(f"{turn[:tag]}[{words}] {turn[tag:].lstrip()}" for turn, tag in turns)


def _check_tokens(text: str, field: str) -> None:
    for token in CONTROL_TOKEN.findall(text):
        if not ALLOWED_TOKEN.fullmatch(token):
            shown = token if len(token) <= TOKEN_SHOWN_CHARS else token[:TOKEN_SHOWN_CHARS] + "..."
            raise InvalidRequest(
                f"{field} holds the control token {shown}; only speaker and phoneme tokens are allowed",
                field=field,
                code="unsupported_control_token",
            )


def _stacked_marks(text: str) -> int:
    """The longest run of combining marks."""
    if text.isascii():
        return 0
    runs = groupby(text, key=lambda character: unicodedata.combining(character) != 0)
    return max((sum(1 for _ in run) for stacked, run in runs if stacked), default=0)


def _needed_joiner(match: re.Match[str]) -> str:
    """The first of a run of joiners where it changes what is read, else nothing."""
    text, joiner = match.string, match.group()[0]
    before, after = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
    base = match.start() - 1
    while base >= 0 and unicodedata.combining(text[base]):
        base -= 1
    if base >= 0 and JOINING_SCRIPTS.match(text, base) and unicodedata.category(text[base])[0] in "LM":
        return joiner
    in_emoji = joiner == "\u200d" and after and unicodedata.category(after) == "So"
    return joiner if in_emoji and (EMOJI_TAIL.match(before) or unicodedata.category(before or " ") == "So") else ""


def frames_bound(text: str, frame_rate: float) -> int:
    """The most frames that speech of a text may take: 1.8 s, 0.18 s for each UTF-8 byte and 0.5 s more for each digit.

    English is spoken at about 0.07 s a byte, so the bound ends only runs that have lost their text.
    """
    digits = sum(character.isdigit() for character in text)
    seconds = BASE_S + BYTE_S * len(text.encode()) + DIGIT_S * digits
    return math.ceil(seconds * frame_rate)


def least_seconds(text: str) -> float:
    """How long speech of a text must last; if it is shorter, words are missing. About half of its natural length.

    By characters, as bytes mislead: 0.1 s for a Chinese character or Korean syllable, 0.06 s for a kana, 0.08 s for a digit,
    0.045 s for any other letter, nothing for space, marks, tags and markup. Of one character many times in a row two count.
    """
    text = DRAWN_OUT.sub(r"\1\1", UNSOUNDED.sub("", text))
    syllables, kana = len(SYLLABLES.findall(text)), len(KANA.findall(text))
    digits = sum(character.isdigit() for character in text)
    letters = sum(character.isalpha() for character in text) - syllables - kana
    return LEAST_LETTER_S * letters + LEAST_SYLLABLE_S * syllables + LEAST_KANA_S * kana + LEAST_DIGIT_S * digits
