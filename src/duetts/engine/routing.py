"""Which engine gets the next piece of work. Pure functions of loads and keys: no sockets, no torch, no state to be bounded.

Work is counted in frames, because a frame costs the same whoever asks for it, and a request may be for 10 or for 2,000.
Voices are placed by rendezvous hashing: every voice has its own order of the engines, so that all servers agree without
talking, an engine that is away gives up only its own voices, and nothing has to be remembered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from duetts.types import Utterance

POSITIONS_PER_FRAME = 32  # prompt positions that cost about as much as one frame
SLACK = 0.05  # how much busier the engine of a voice may be than the least busy one,
SLACK_REQUESTS = 2  # besides so many requests like the new one


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that takes work: its number and the frames that it still owes."""

    index: int
    load: float


def utterance_weight(utterance: Utterance) -> float:
    """The work of an utterance in frames, at most."""
    return utterance.max_frames + int(utterance.prompt.shape[1]) / POSITIONS_PER_FRAME


def reference_weight(num_samples: int, frame_length: int) -> float:
    """The work of encoding a reference in frames."""
    return num_samples / frame_length / POSITIONS_PER_FRAME


def choose(candidates: Sequence[Candidate], key: str, weight: float, first: int = 0) -> Candidate:
    """The first engine in the order of `key` that is not clearly busier than the least busy one; without a key, that one. Of
    several that are equally busy the next from number `first` on, so that servers that know little of each other spread out.

    `weight` is that of the new work. What a voice saves is a part of one prompt's reading, so it may not unbalance engines by
    more than a few hundredths of what they carry: near their capacity the busiest one decides how many listeners are served.
    """
    assert candidates, "nobody to choose from"
    least = min(candidates, key=lambda candidate: (candidate.load, candidate.index < first, candidate.index))
    if not key:
        return least
    allowed = (1 + SLACK) * least.load + SLACK_REQUESTS * weight
    return max((c for c in candidates if c.load <= allowed), key=lambda candidate: _rank(key, candidate.index))


def _rank(key: str, index: int) -> bytes:
    return hashlib.blake2b(f"{index} {key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
