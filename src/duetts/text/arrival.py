"""Text that arrives bit by bit, and what of it can be spoken already. No model, no tokenizer.

Where it is cut depends on the text alone, never on how it was cut into messages: each place is looked at once, when the word
after it is complete (after a wide full stop: its first character), knowing nothing but the text up to there.

- "sentence" cuts at ends of sentences and turns, "clause" also at ends of clauses, unless a tiny piece would be left.
- Both, and "length" by itself, cut what has grown to `most` without such an end, at the latest place of the best kind.
- "none" cuts nothing.

Open brackets and phoneme pairs stay whole. A turn that is cut goes on with its speaker's tag again. Text without a letter or
digit is no piece of its own.
"""

from __future__ import annotations

import re
import unicodedata

from duetts.errors import InvalidRequest
from duetts.text.pieces import CLAUSE, CLOSERS, JOINERS, LIKELY, SENTENCE, SPACE, SPEAKER_TAG, TERMINALS, has_speech, places
from duetts.text.rules import LEGACY_SPEAKER, SURROGATE
from duetts.types import Granularity

TINY_CLAUSE_BYTES = 20  # models speak tiny pieces badly
WIDE_MARKS = "。！？｡，、；：､—"
# Ends at a place where a piece may begin. Closing marks are taken possessively: all or none.
CANDIDATE = re.compile(
    rf"(?:[{WIDE_MARKS}]{CLOSERS}+\s*|[{TERMINALS},;:،؛–-]{CLOSERS}+\s+|\n\s*|(?={SPEAKER_TAG.pattern}))(?=\S)"
)
WORD = re.compile(r"\S+\s")
OPEN = re.compile(r"\[[^\[\]\n]*\Z|<\|phoneme_start\|>(?!.*<\|phoneme_end\|>).*\Z|<\|?[\w:]*\Z", re.DOTALL)
ABBREVIATED = re.compile(rf"\.{CLOSERS}\s*\Z")


class ArrivingText:
    """What has come and was not yet given back. `most` is in UTF-8 bytes, for "length" in characters."""

    def __init__(self, granularity: Granularity, most: int) -> None:
        self._granularity = granularity
        self._most = most
        self._text = ""
        self._looked = 0  # places before this have been looked at
        self._tag = ""  # of the speaker whose turn what waits belongs to
        self._spoke = False  # whether a piece was given back since the last end

    @property
    def waiting(self) -> int:
        """Characters that were not given back."""
        return len(self._text)

    def add(self, text: str) -> list[str]:
        """The pieces that are now known. Raises `InvalidRequest` for what is no text."""
        if SURROGATE.search(text):
            raise InvalidRequest("text holds an unpaired surrogate, which is no character", field="text")
        self._text += text
        pieces = []
        while place := self._next_place():
            pieces.append(self._take(place))
        return pieces

    def flush(self) -> list[str]:
        """All that waits, but marks alone go on waiting for what they belong to. The turn goes on."""
        pieces = self.add(" ")  # the last word is complete
        return [*pieces, self._take(len(self._text))] if has_speech(self._text) else pieces

    def end(self) -> list[str]:
        """All that waits; what comes next has nothing to do with it. Marks alone are given back if nothing else ever was."""
        pieces = self.flush()
        if self._text.strip() and not self._spoke:
            pieces.append(self._take(len(self._text)))
        self._text, self._looked, self._tag, self._spoke = "", 0, "", False
        return pieces

    def _next_place(self) -> int:
        """Where the next piece ends; 0 if that is not known."""
        if self._granularity == "none":
            return 0
        full = self._full()
        if self._granularity != "length":
            for match in CANDIDATE.finditer(self._text, self._looked):
                place = match.end()
                word = WORD.match(self._text, place)
                known = place + 1 if match[0][:1] and match[0][0] in WIDE_MARKS else word.end() if word else None
                if known is None or (full and known > full):
                    break
                self._looked = place
                if self._is_end(self._text[:known], place):
                    return place
        return _latest(self._text[:full]) if full else 0

    def _full(self) -> int:
        """How many characters a piece may have, if that many have come; else 0."""
        if self._granularity == "length":
            return self._most if len(self._text) >= self._most else 0
        room = self._most
        for index, character in enumerate(self._text):
            room -= len(character.encode())
            if room < 0:
                return max(1, index)
        return 0

    def _is_end(self, text: str, place: int) -> bool:
        before = text[:place]
        if OPEN.search(before) or not has_speech(before) or not has_speech(text[place:]):
            return False
        if SPEAKER_TAG.match(text, place):
            return True
        rank = places(text).get(place, SPACE)
        if self._granularity == "clause" and SENTENCE < rank <= CLAUSE and len(before.encode()) >= TINY_CLAUSE_BYTES:
            return rank == LIKELY or not ABBREVIATED.search(before)
        return rank <= SENTENCE

    def _take(self, place: int) -> str:
        piece = LEGACY_SPEAKER.sub(r"<|speaker:\1|>", self._text[:place].strip())
        self._text, self._looked, self._spoke = self._text[place:], 0, True
        tag = "" if SPEAKER_TAG.match(piece) else self._tag
        self._tag = next(iter(SPEAKER_TAG.findall(piece)[-1:]), self._tag)
        return tag + piece


def _latest(text: str) -> int:
    """Where a text is cut that has grown too long: the latest sentence's end in its last two thirds, else the latest clause's
    in its last half, else the latest space, else between characters. Mere marks are cut at the end."""
    opened = OPEN.search(text)
    last = opened.start() if opened else len(text)
    found = [(place, rank) for place, rank in places(text).items() if place <= last and has_speech(text[:place])]
    for worst, least in ((LIKELY, len(text) / 3), (CLAUSE, len(text) / 2), (SPACE, 1)):
        good = [place for place, rank in found if rank <= worst and place >= least]
        if good:
            return max(good)
    place = len(text)
    while place > 1 and (unicodedata.category(text[place - 1])[0] == "M" or text[place - 1] in JOINERS):
        place -= 1
    place = place - 1 if 1 < place < len(text) else place
    return place if has_speech(text[:place]) else len(text)
