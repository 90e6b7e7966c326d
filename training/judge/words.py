"""Written and heard words: one spelling for both, and what differs between them. No models, no files."""

from __future__ import annotations

import re
from dataclasses import dataclass

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = ((1_000_000, "million"), (1000, "thousand"), (100, "hundred"))
IRREGULAR = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
             "twelve": "twelfth"}  # fmt: skip
LONGEST_NUMBER = 9  # digits
# What British and American writers spell differently is no other word.
SPELLINGS = {
    "theatre": "theater", "theatres": "theaters", "centre": "center", "centres": "centers", "colour": "color",
    "colours": "colors", "coloured": "colored", "grey": "gray", "harbour": "harbor", "neighbour": "neighbor",
    "neighbours": "neighbors", "favourite": "favorite", "travellers": "travelers", "aluminium": "aluminum",
}  # fmt: skip


def number_words(value: int) -> str:
    """1234 -> "one thousand two hundred thirty four"."""
    for size, name in SCALES:
        if value >= size:
            rest = f" {number_words(value % size)}" if value % size else ""
            return f"{number_words(value // size)} {name}{rest}"
    if value < len(ONES):
        return ONES[value]
    return TENS[value // 10 - 2] + (f" {ONES[value % 10]}" if value % 10 else "")


def ordinal_words(value: int) -> str:
    """21 -> "twenty first"."""
    *front, last = number_words(value).split()
    regular = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return " ".join([*front, IRREGULAR.get(last, regular)])


def _number(found: re.Match[str]) -> str:
    digits, ending = found[1], found[2]
    if len(digits) > LONGEST_NUMBER:
        return found[0]
    return f" {ordinal_words(int(digits)) if ending else number_words(int(digits))} "


def words(text: str) -> list[str]:
    """Lower case, no punctuation, hyphens open, one spelling, whole numbers, ordinals and percents in words."""
    text = re.sub(r"(?<=\d),(?=\d)", "", text.lower()).replace("%", " percent")
    text = re.sub(r"(\d+)(st|nd|rd|th)?", _number, text)
    plain = re.sub(r"[^a-z0-9 ]", " ", re.sub(r"['’]", "", text)).split()
    return [SPELLINGS.get(word, word) for word in plain]


@dataclass(frozen=True, slots=True)
class Difference:
    """How heard words differ from written ones: the fewest substituted, dropped and added words that explain it."""

    written: int
    substituted: int = 0
    dropped: int = 0
    added: int = 0

    @property
    def wrong(self) -> int:
        return self.substituted + self.dropped + self.added

    def loses_text(self, most: int) -> bool:
        """Whether more than that many words were left out or said again, or nothing at all was heard."""
        return self.dropped > most or self.added > most or self.dropped == self.written


def compare(written: list[str], heard: list[str]) -> Difference:
    """The edit distance, split up. Among equally short explanations one with few substitutions is as good as another."""
    row = [(added, 0, 0, added) for added in range(len(heard) + 1)]  # wrong, substituted, dropped, added
    for wanted in written:
        corner, row[0] = row[0], (row[0][0] + 1, row[0][1], row[0][2] + 1, row[0][3])
        for j, got in enumerate(heard, 1):
            miss = wanted != got
            options = (
                (corner[0] + miss, corner[1] + miss, corner[2], corner[3]),
                (row[j][0] + 1, row[j][1], row[j][2] + 1, row[j][3]),
                (row[j - 1][0] + 1, row[j - 1][1], row[j - 1][2], row[j - 1][3] + 1),
            )
            corner, row[j] = row[j], min(options)
    _, substituted, dropped, added = row[-1]
    return Difference(len(written), substituted, dropped, added)


def differ(text: str, heard: str) -> Difference:
    """A text as it is written against what a listener wrote down."""
    return compare(words(text), words(heard))


def word_error_rate(differences: list[Difference]) -> float:
    """Wrong words by all words that were to be said."""
    return sum(difference.wrong for difference in differences) / sum(difference.written for difference in differences)
