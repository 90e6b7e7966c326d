"""The sentences of every gate: `python -m training.judge.sentences LINES > training/judge/sentences.txt`.

A rule, not a choice: held-out lines (`training.data.texts`) that a listener can write down in one way only. They have no
digits, names, abbreviations or hyphens, nothing that would be read out with embarrassment, and each of their words is in at
least `KNOWN_LINES` of the lines that train; so no oddity of a dictionary's spelling counts as a fault of a voice. Of each range
of lengths, in the order of the hash that holds lines out, the first 25 are taken; what longer ranges lack, shorter ones give.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from training.data.texts import Lines, read_lines

HERE = Path(__file__).parent / "sentences.txt"
COUNT = 100
KNOWN_LINES = 10
RANGES = ((12, 35), (9, 11), (6, 8), (3, 5))  # words
UNSUITED = frozenset(
    ["sex", "sexual", "sexually", "testes", "testis", "penis", "genital", "genitals", "anus", "rectum", "vagina", "erotic"]
)  # fmt: skip
PLAIN = re.compile(r"[A-Z][a-z]*(?:,? (?:[a-z]+|I))*[.?!]")


def spelled(line: str) -> list[str]:
    return re.findall(r"[a-z]+", line.lower())


def clean(lines: Lines, known_lines: int = KNOWN_LINES) -> list[str]:
    """Held-out lines that pass the rule, in their order."""
    known = Counter(word for line in lines.train for word in set(spelled(line)))
    return [
        line
        for line in lines.held_out
        if PLAIN.fullmatch(line)
        and all(known[word] >= known_lines for word in spelled(line))
        and not UNSUITED.intersection(spelled(line))
    ]


def choose(lines: Lines, count: int = COUNT) -> list[str]:
    """The sentences, shortest range first. Raises `ValueError` if there are not enough."""
    plain = clean(lines)
    chosen: list[list[str]] = []
    missing = 0
    for index, (least, most) in enumerate(RANGES):
        wanted = missing + count * (index + 1) // len(RANGES) - count * index // len(RANGES)
        found = [line for line in plain if least <= len(line.split()) <= most][:wanted]
        missing = wanted - len(found)
        chosen.append(found)
    if missing:
        raise ValueError(f"{missing} of {count} sentences are missing")
    return [line for found in reversed(chosen) for line in found]


def read_sentences() -> list[str]:
    """The list as it is committed."""
    return HERE.read_text(encoding="utf-8").splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", type=Path, help="file written by training.data.texts")
    print("\n".join(choose(read_lines(parser.parse_args().lines))))


if __name__ == "__main__":
    main()
