"""What may be spoken: cleaning and checks of user text, and how long speech of it can be at most. No model, no tokenizer.

Decisions: text is normalised to NFC. Emoji and SSML or other markup reach the model as they stand, but text that holds
nothing except symbols is refused. `[tags]` pass through, and count as something to speak. Invisible characters that only
break words are dropped; joiners are kept where scripts and emoji need them, that is beside a character that is not Latin.
Tabs become spaces, Unicode and Windows line ends become plain ones.
"""

from __future__ import annotations

import math
import re
import unicodedata

from duetts.errors import InvalidRequest

CONTROL_TOKEN = re.compile(r"<\|[^|<>\n]{1,64}\|>")
ALLOWED_TOKEN = re.compile(r"<\|(speaker:\d+|phoneme_start|phoneme_end)\|>")
LEGACY_SPEAKER = re.compile(r"<speaker:(\d+)>")
LINE_ENDS = re.compile(r"\r\n?|[\u2028\u2029\x85\x0b\x0c]")
INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]")
JOINERS = re.compile("[\u200c\u200d]")
SURROGATES = re.compile("[\ud800-\udfff]")


def clean_text(text: str, *, field: str, max_chars: int) -> str:
    """The text as the model gets it. Raises `InvalidRequest` naming `field` for what cannot be spoken."""
    if "\x00" in text:
        raise InvalidRequest(f"{field} holds a NUL character", field=field)
    if SURROGATES.search(text):
        raise InvalidRequest(f"{field} holds an unpaired surrogate, which is no character", field=field)
    text = LINE_ENDS.sub("\n", text).replace("\t", " ")
    text = INVISIBLE.sub("", text)
    text = JOINERS.sub(_needed_joiner, text)
    text = "".join(c for c in text if c == "\n" or unicodedata.category(c) != "Cc")
    text = unicodedata.normalize("NFC", text).strip()
    if not text:
        raise InvalidRequest(f"{field} is empty", field=field)
    if len(text) > max_chars:
        raise InvalidRequest(
            f"{field} has {len(text)} characters; at most {max_chars} are allowed", field=field, code="input_too_long"
        )
    text = LEGACY_SPEAKER.sub(r"<|speaker:\1|>", text)
    for token in CONTROL_TOKEN.findall(text):
        if not ALLOWED_TOKEN.fullmatch(token):
            raise InvalidRequest(
                f"{field} holds the control token {token}, which is not allowed", field=field,
                code="unsupported_control_token",
            )  # fmt: skip
    if not any(c.isalnum() for c in ALLOWED_TOKEN.sub("", text)):
        raise InvalidRequest(f"{field} has no letter and no digit: nothing to speak", field=field, code="nothing_to_speak")
    return text


def _needed_joiner(match: re.Match[str]) -> str:
    """Keeps a joiner between two characters of which neither is Latin, a digit or a space."""
    text, at = match.string, match.start()
    around = (text[at - 1 : at], text[at + 1 : at + 2])
    return match.group() if all(c and not c.isascii() and not c.isspace() for c in around) else ""


def frames_bound(text: str, frame_rate: float) -> int:
    """The most frames that speech of a text may take: 1.8 s, 0.18 s per UTF-8 byte and 0.5 s per digit.

    About three times what slow speech needs, so that it only ends runs that have lost their text.
    """
    seconds = 1.8 + 0.18 * len(text.encode()) + 0.5 * sum(c.isdigit() for c in text)
    return math.ceil(seconds * frame_rate)
