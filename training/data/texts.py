"""The lines that are spoken: WordNet examples and glosses, our own grammar, and which of them are held out.

Run `python -m training.data.texts OUT.txt.xz` where the WordNet database is installed (Debian: wordnet-base).
"""

from __future__ import annotations

import hashlib
import lzma
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.data.grammar import made_lines
from training.report import say

WORDNET = Path("/usr/share/wordnet")
NUM_MADE = 30_000
NUM_HELD_OUT = 500
CLEAN = re.compile(r"[A-Za-z0-9 ,.!?'$%&;:-]+")


@dataclass(frozen=True, slots=True)
class Lines:
    """All lines by purpose. Held-out lines are never spoken for training."""

    train: list[str]
    held_out: list[str]


def sentence(raw: str) -> str | None:
    """A line as a written sentence, or None when it is not plain text of a useful length."""
    line = re.sub(r"\([^()]*\)", " ", raw)
    line = re.sub(r"\s+", " ", line).strip(" ,;:-")
    if not 8 <= len(line) <= 180 or not CLEAN.fullmatch(line) or "--" in line:
        return None
    if len(re.findall(r"[A-Za-z]", line)) < 0.6 * len(line):
        return None
    line = line[0].upper() + line[1:]
    return line if line[-1] in ".!?" else line + "."


def wordnet_lines(folder: Path = WORDNET) -> Iterator[str]:
    """Examples and definitions, in the order of the database."""
    for part in ("noun", "verb", "adj", "adv"):
        for row in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
            if row.startswith(" "):
                continue
            gloss = row.split("|", 1)[1]
            quoted = re.findall(r'"([^"]+)"', gloss)
            definition = re.sub(r'"[^"]*"', "", gloss).split(";")
            yield from (line for raw in (*definition, *quoted) if (line := sentence(raw)))


def digest(line: str) -> bytes:
    return hashlib.blake2b(line.encode(), digest_size=8).digest()


def split(lines: list[str]) -> Lines:
    """Holds out the lines with the smallest hashes, so that the choice survives a change of order."""
    held = set(sorted(lines, key=digest)[:NUM_HELD_OUT])
    return Lines([line for line in lines if line not in held], sorted(held, key=digest))


def read_lines(path: Path) -> Lines:
    """Lines from a file written by this module."""
    return split(lzma.decompress(path.read_bytes()).decode().splitlines())


def main(out: str) -> None:
    lines = list(dict.fromkeys((*wordnet_lines(), *made_lines(NUM_MADE))))
    Path(out).write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))
    parts = split(lines)
    say(f"{len(parts.train)} lines to train on, {len(parts.held_out)} held out, {Path(out).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
