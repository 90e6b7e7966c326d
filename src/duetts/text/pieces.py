"""Long text as pieces that are spoken one after another: where it may be cut, and which cuts are made. No model, no tokenizer.

A piece has at most so many UTF-8 bytes. Text that fits is one piece, exactly as it stands. Otherwise:
- Cuts are made at turns of speakers and ends of sentences; inside a sentence only if it does not fit, or if one of its
  neighbours would be left as a tiny piece, which models speak badly. Then at likely ends (a full stop before a small letter,
  a new line), ends of clauses, spaces, and at last inside a word, where characters with their marks stay whole.
- A turn that fits is never cut; turns are packed as the reference does it, full pieces first, at most five turns each. What
  is cut inside a turn goes on with the turn's tag again. Everything else is packed into pieces as equal as can be.
- `[tags]` up to a piece's length, phoneme pairs and speaker tags are never cut, and no tag ends a piece for want of a space.
- Text without a letter or digit is no piece of its own: it stays with its neighbour. Only by much of it, by a turn of nothing
  else, or by a phoneme pair or speaker tag that leaves no room, can a piece be longer than the bound; whoever speaks it
  checks that it fits.
- Every character that is no space is in one piece, once and in order.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sentencex import segment
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from duetts.text.rules import ALLOWED_TOKEN, TURN_START

# How good a place for a cut is; the first is the best.
TURN, SENTENCE, LIKELY, CLAUSE, SPACE, INSIDE = range(6)

# What a cut costs, against the square of the share of a piece that stays empty (at most 1). One cut may spare two of the next
# better kind, hence the steps of more than two. A tiny piece is worse than a cut at a space and better than one in a word.
CUT_COSTS = (0.0, 0.0, 2.0, 5.0, 11.0, 26.0)
TINY_COST = 12.0
TINY_BYTES = 30
MAX_TURNS = 5

SPEAKER_TAG = re.compile(r"<\|speaker:[0-9]+\|>")
WHITESPACE = re.compile(r"\s")
WORD_START = re.compile(r"(?<!\s)\s+(?=\S*[^\W_])")
CLOSERS = r"""["'”’»›)\]」』）】》〉]*"""
TERMINALS = ".!?…。！？｡؟۔।॥։።፧။។"
WIDE_TERMINALS = "。！？｡"  # no space follows them
LIKELY_END = re.compile(rf"[{TERMINALS}]+{CLOSERS}(?=\s)|[{WIDE_TERMINALS}]+{CLOSERS}|\n")
CLAUSE_END = re.compile(rf"[,;:،؛–-]+{CLOSERS}(?=\s)|[，、；：､—]+{CLOSERS}")
LINE_TERMINAL = re.compile(rf"[{TERMINALS}]{CLOSERS}$")
# "M. Dupont", "z. B.", "am 3. Oktober", "usw.": the stop may be an abbreviation's. The first is for ends that sentencex found.
DOUBTFUL = re.compile(r"(?:^|\W)(?:[^\W\d]|[0-9]{1,2})\.\s*$")
SHORT_WORD = re.compile(r"(?:^|\W)\w{1,3}$")
BRACKETS = re.compile(r"\[[^\[\]\n]*\]")
TOKEN = re.compile(r"<\|(?:speaker:[0-9]+|(phoneme_start)|(phoneme_end))\|>")

SEGMENT_CHARS = 2000  # sentencex takes time that grows with the square of what it is given at once
VIRAMA = 9  # combining class: joins two consonants
JOINERS = "\u200c\u200d"
CLUSTERS = Split(Regex(r"\X"), "isolated")


def cut(text: str, max_bytes: int) -> list[str]:
    """Cleaned text (`rules.clean_text`) to its pieces, in order; at least one."""
    turns = _turns(text)
    if len(text.encode()) <= max_bytes and len(turns) <= MAX_TURNS:
        return [text]
    places = _Places(text)
    units = [unit for index, turn in enumerate(turns) for unit in _Turn(places, turn, index, max_bytes).units()]
    units = _merge_small(_merge_silent(units, places, max_bytes), places, max_bytes // 8)
    groups = _pack(units, places, max_bytes)
    return [first.tag + text[first.start : last.end] for first, last in groups]


def places(text: str) -> dict[int, int]:
    """Where a text may be cut, and the rank of each place; those inside of words are left out."""
    found = _Places(text)
    return dict.fromkeys(found.words(0, len(text), len(text.encode())), SPACE) | found.ranks


def has_speech(text: str) -> bool:
    """Whether there is a letter or digit outside speaker tags and phoneme tokens."""
    return any(character.isalnum() for character in ALLOWED_TOKEN.sub("", text))


def _turns(text: str) -> list[tuple[int, int]]:
    """Spans of the turns, without space around them."""
    starts = sorted({0, *(match.start() for match in TURN_START.finditer(text)), len(text)})
    return [span for start, end in pairwise(starts) if (span := _stripped(text, start, end))[0] < span[1]]


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


@dataclass(frozen=True, slots=True)
class _Unit:
    """A span that is not cut any further, without space around it. `rank` is that of the cut after it, `tag` what is spoken
    before it if it begins a piece, `whole` says that it is made of whole turns."""

    start: int
    end: int
    rank: int
    tag: str
    whole: bool
    first_turn: int
    last_turn: int


class _Places:
    """A text, its byte offsets, and the places where it may be cut. A place is the index of the first character after it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.offsets = [0, *accumulate(len(character.encode()) for character in text)]
        self._spans = sorted(_protected(text))
        self._starts = [start for start, _ in self._spans]
        self._tag_ends = {end for _, end in self._spans}
        ranks: dict[int, int] = {}
        for place, rank in _ends(text):
            place = self._skip_space(place)
            if 0 < place < len(text) and self.may_cut(place, len(text)):
                ranks[place] = min(rank, ranks.get(place, rank))
        self.ranks = ranks
        self.ordered = sorted(ranks)

    def size(self, start: int, end: int) -> int:
        """Bytes of a span."""
        return self.offsets[end] - self.offsets[start]

    def span_of(self, place: int, max_bytes: int) -> tuple[int, int] | None:
        """The protected span that a place lies inside; brackets that hold more than a piece are ordinary text."""
        index = bisect_left(self._starts, place) - 1
        if index < 0 or place >= self._spans[index][1]:
            return None
        start, end = self._spans[index]
        return (start, end) if self.text[start] != "[" or self.size(start, end) <= max_bytes else None

    def may_cut(self, place: int, max_bytes: int) -> bool:
        """Neither inside a protected span nor before a mark that belongs to the character before it, be that a space."""
        character = self.text[place]
        joins = character in JOINERS or unicodedata.category(character)[0] == "M"
        return not joins and self.span_of(place, max_bytes) is None

    def words(self, start: int, end: int, max_bytes: int) -> list[int]:
        """Places after a space, but neither after a tag, which belongs to what follows, nor at lone marks: "quoi ?", "- so"."""
        places = [match.end() for match in WORD_START.finditer(self.text, start, end)]
        sound = next((place for place in range(start, end) if self.text[place].isalnum()), end)
        return [place for place in places if place > sound and self.may_cut(place, max_bytes) and not self._after_tag(place)]

    def _after_tag(self, place: int) -> bool:
        return _stripped(self.text, 0, place)[1] in self._tag_ends

    def _skip_space(self, place: int) -> int:
        while place < len(self.text) and self.text[place].isspace():
            place += 1
        return place

    def inside(self, start: int, target: int, max_bytes: int) -> int:
        """A place in a run without spaces, after `start` and at most `max_bytes` from it, at or before the byte offset
        `target` if there is one, and not before a mark that would then begin a piece if there is another."""
        near = self._inside(start, self._reach(start, target - self.offsets[start]), max_bytes)
        if near:
            return next((place for place in reversed(near) if self.text[place].isalnum()), near[-1])
        span = self.span_of(start + 1, max_bytes)
        if span is not None:
            return span[1]
        last = self._reach(start, max_bytes)
        return next(iter(self._inside(start, last, max_bytes)), last)

    def _reach(self, start: int, num_bytes: int) -> int:
        """The last place so many bytes from `start`, at least one character from it."""
        return max(start + 1, bisect_right(self.offsets, self.offsets[start] + num_bytes) - 1)

    def _inside(self, start: int, last: int, max_bytes: int) -> list[int]:
        """Places between characters as people see them, after `start` and up to `last`, but not before a space."""
        ends = [start + stop for _, (_, stop) in CLUSTERS.pre_tokenize_str(self.text[start : last + 1])][:-1]
        return [place for place in ends if not self._joined(place) and self.may_cut(place, max_bytes)]

    def _joined(self, place: int) -> bool:
        before = self.text[place - 1]
        return before in JOINERS or unicodedata.combining(before) == VIRAMA or self.text[place].isspace()


def _protected(text: str) -> Iterator[tuple[int, int]]:
    """Spans that must not be cut: bracketed tags, phoneme pairs, speaker tags."""
    opened: int | None = None
    tokens: list[tuple[int, int]] = []
    for match in TOKEN.finditer(text):
        if match[1] and opened is None:
            opened = match.start()
        elif match[2] and opened is not None:
            tokens.append((opened, match.end()))
            opened = None
        elif opened is None:
            tokens.append(match.span())
    if opened is not None:  # never closed: its token alone
        tokens += [match.span() for match in TOKEN.finditer(text, opened)]
    yield from tokens
    starts = [start for start, _ in tokens]
    for match in BRACKETS.finditer(text):
        index = bisect_right(starts, match.start()) - 1
        if index < 0 or tokens[index][1] <= match.start():
            yield match.span()


def _ends(text: str) -> Iterator[tuple[int, int]]:
    """Places of likely cuts and their ranks, space after them not yet skipped; a place may come more than once."""
    start = 0
    for line in text.split("\n"):
        for end in _sentence_ends(line):
            if not DOUBTFUL.search(line[max(0, end - 8) : end]) and not line[end : end + 1].islower():
                yield start + end, SENTENCE
        start += len(line) + 1
        following = text[start : start + 1]
        bare = line.rstrip()
        if not bare or (LINE_TERMINAL.search(bare[-8:]) and not DOUBTFUL.search(bare[-8:]) and not following.islower()):
            yield min(start, len(text)), SENTENCE
    for match in LIKELY_END.finditer(text):
        short = match[0] == "." and SHORT_WORD.search(text[max(0, match.start() - 4) : match.start()])
        yield match.end(), CLAUSE if short else LIKELY
    yield from ((match.end(), CLAUSE) for match in CLAUSE_END.finditer(text))


def _sentence_ends(line: str) -> Iterator[int]:
    """Where sentences end inside a line, space included, by sentencex.

    Its English rules know the marks of other scripts too. It must not see wide spaces: version 1.0.32 panics at a capital, a
    no-break space and a full stop.
    """
    line = WHITESPACE.sub(" ", line)
    start = 0
    while start < len(line):
        part = line[start : start + SEGMENT_CHARS]
        stops = list(accumulate(map(len, segment("en", part))))[:-1]
        yield from (start + stop for stop in stops)
        at_end = start + len(part) == len(line)
        start += stops[-1] if stops and not at_end else len(part)


class _Turn:
    """One speaker's turn, or a text without turns."""

    def __init__(self, places: _Places, span: tuple[int, int], index: int, max_bytes: int) -> None:
        self._places, self._index, self._max_bytes = places, index, max_bytes
        self._start, self._end = span
        match = SPEAKER_TAG.match(places.text, *span)
        self._tag = match[0] if match else ""
        self._room = max(max_bytes - len(self._tag), max_bytes // 2)  # of what has the tag put before it

    def units(self) -> list[_Unit]:
        if self._places.size(self._start, self._end) <= self._max_bytes:
            return [_Unit(self._start, self._end, TURN, "", True, self._index, self._index)]
        ordered = self._places.ordered
        inner = ordered[bisect_right(ordered, self._start) : bisect_left(ordered, self._end)]
        clauses: list[tuple[int, int, int]] = []
        sounding = False
        for start, end in pairwise([self._start, *inner, self._end]):
            speaks = has_speech(self._places.text[start:end])
            if clauses and not (speaks and sounding):  # lone marks stay with what is before; the first ones with what follows
                start = clauses.pop()[0]
            clauses.append((start, end, self._places.ranks.get(end, TURN)))
            sounding = sounding or speaks
        return [unit for start, end, rank in clauses for unit in self._split(*_stripped(self._places.text, start, end), rank)]

    def _split(self, start: int, end: int, rank: int) -> Iterator[_Unit]:
        """A clause as units of about a quarter of a piece, which leave a choice of places that make pieces equal."""
        places, quarter = self._places, self._max_bytes // 4
        stops = self._stops(start, end) if places.size(start, end) > quarter else []
        offsets = [places.offsets[place] for place, _ in stops]
        while (size := places.size(start, end)) > quarter and stops and stops[-1][0] > start:
            target = places.offsets[start] + size / -(-size // quarter)
            after = bisect_right(offsets, target)
            choice = [stop for stop in stops[max(0, after - 1) : after + 1] if stop[0] > start]
            near = [stop for stop in choice if places.size(start, stop[0]) <= self._room] or choice[:1]
            if not near:
                break
            place, kind = min(near, key=lambda stop: abs(places.offsets[stop[0]] - target))
            yield self._unit(start, place, kind)
            start = place
        yield self._unit(start, end, rank)

    def _stops(self, start: int, end: int) -> list[tuple[int, int]]:
        """Places of a clause after spaces, and inside of words that do not fit."""
        places, room = self._places, self._room
        stops: list[tuple[int, int]] = []
        words = places.words(start + (len(self._tag) if start == self._start else 0), end, room)
        for first, last in pairwise([start, *words, end]):
            if places.size(first, last) > room:
                parts = -(-places.size(first, last) // (self._max_bytes // 4))
                while parts > 1 and places.size(first, last) > 0:
                    target = places.offsets[first] + places.size(first, last) // parts
                    first = places.inside(first, target, room)
                    if first >= last:
                        break
                    stops.append((first, INSIDE))
                    parts -= 1
            if last < end:
                stops.append((last, SPACE))
        return stops

    def _unit(self, start: int, end: int, rank: int) -> _Unit:
        start, end = _stripped(self._places.text, start, end)
        return _Unit(start, end, rank, "" if start == self._start else self._tag, False, self._index, self._index)


def _join(first: _Unit, second: _Unit) -> _Unit:
    whole = first.whole and second.whole
    return _Unit(first.start, second.end, second.rank, first.tag, whole, first.first_turn, second.last_turn)


def _merge_silent(units: list[_Unit], places: _Places, max_bytes: int) -> list[_Unit]:
    """Joins what has no letter or digit to what is before it; if it does not fit there, to what follows."""
    merged: list[_Unit] = []
    silent: _Unit | None = None  # what waits for its successor
    for unit in units:
        speaks = has_speech(places.text[unit.start : unit.end])
        if silent is not None:
            unit, silent = _join(silent, unit), None
        if speaks:
            merged.append(unit)
        elif merged and places.size(merged[-1].start, unit.end) + len(merged[-1].tag) <= max_bytes:
            merged[-1] = _join(merged[-1], unit)
        else:
            silent = unit
    if silent is not None:
        merged[-1:] = [_join(merged[-1], silent) if merged else silent]
    return merged


def _merge_small(units: list[_Unit], places: _Places, max_bytes: int) -> list[_Unit]:
    """Joins neighbours that are small together and have no better cut between them than after them: fewer ways to try."""
    merged: list[_Unit] = []
    for unit in units:
        while (
            merged
            and not unit.whole
            and merged[-1].last_turn == unit.first_turn
            and merged[-1].rank >= unit.rank
            and places.size(merged[-1].start, unit.end) <= max_bytes
        ):
            unit = _join(merged.pop(), unit)
        merged.append(unit)
    return merged


def _pack(units: list[_Unit], places: _Places, max_bytes: int) -> list[tuple[_Unit, _Unit]]:
    """The cheapest way to join units into pieces -> first and last unit of each. Of equals that with the fuller first piece."""
    count = len(units)
    costs = [0.0] * (count + 1)  # of the pieces from a unit on
    lasts = [0] * count
    for i in range(count - 1, -1, -1):
        best = float("inf")
        whole = True
        for j in range(i, count):
            size = places.size(units[i].start, units[j].end) + len(units[i].tag)
            if j > i and (size > max_bytes or units[j].last_turn - units[i].first_turn >= MAX_TURNS):
                break
            whole = whole and units[j].whole
            cost = 1.0 if whole else max(0.0, 1 - size / max_bytes) ** 2
            cost += TINY_COST if size < min(TINY_BYTES, max_bytes // 5) else 0.0
            cost += costs[j + 1] + (CUT_COSTS[units[j].rank] if j + 1 < count else 0.0)
            if cost <= best:
                best, lasts[i] = cost, j
        costs[i] = best
    groups, i = [], 0
    while i < count:
        groups.append((units[i], units[lasts[i]]))
        i = lasts[i] + 1
    return groups
