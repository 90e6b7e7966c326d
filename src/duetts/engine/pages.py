"""Pages of the KV cache: who holds which, and which beginnings of prompts are known. Plain Python, no torch, one thread.

A prompt is read in *blocks*; a block that fills whole pages gets a key over itself and everything before it, and its pages can
then be shared by every sequence that begins the same way. Pages that nobody holds but whose block is known stay until their
room is needed; those not used for longest go first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from duetts.types import Int32

PAGE = 16  # positions in a page


def pages_for(positions: int) -> int:
    """Pages that hold so many positions."""
    return -(-positions // PAGE)


@dataclass(frozen=True, slots=True)
class Block:
    """A run of prompt positions that is read in one go. `key` is None unless it begins and ends at page boundaries."""

    start: int
    end: int
    key: bytes | None

    @property
    def pages(self) -> range:
        """Places of its pages in the sequence's table."""
        return range(self.start // PAGE, pages_for(self.end))


def cut_blocks(columns: Int32, end: int, size: int, border: int = 0) -> list[Block]:
    """The first `end` of prompt columns [1 + codebooks, positions] as blocks of at most `size`, which fills whole pages.

    `border` is where the part ends that other prompts may share: a block ends at the page boundary before it, so that what is
    shared is one run of whole blocks. A key stands for ids and codes of the block and of all before it, and for where they
    were cut: pages under one key hold equal numbers, to the bit, if each block is always computed alone.
    """
    assert size % PAGE == 0, f"blocks of {size} positions do not fill pages of {PAGE}"
    border -= border % PAGE
    blocks: list[Block] = []
    start, key = 0, b""
    while start < end:
        stop = min(start + size, border if start < border else end, end)
        whole = stop % PAGE == 0
        if whole:
            key = hashlib.blake2b(key + columns[:, start:stop].tobytes(), digest_size=16).digest()
        blocks.append(Block(start, stop, key if whole else None))
        start = stop
    return blocks


class PagePool:
    """A fixed number of pages, their holders, and the known blocks."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))[::-1]
        self._holders = [0] * num_pages
        self._known: dict[bytes, tuple[int, ...]] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known pages that nobody holds, least lately used first
        self.evicted = 0

    @property
    def available(self) -> int:
        """Pages that can be had now, those of idle known blocks included."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages that nobody holds and whose contents are known."""
        return len(self._idle)

    @property
    def used(self) -> int:
        return self.num_pages - self.available

    def take(self, count: int) -> list[int]:
        """Pages of no contents, held once. The caller has looked at `available`."""
        assert count <= self.available, f"{count} pages are asked for, {self.available} are there"
        while len(self._free) < count:
            self._forget(next(iter(self._idle)))
            self.evicted += 1
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def knows(self, key: bytes | None) -> bool:
        return key in self._known

    def idle_pages(self, key: bytes) -> int:
        """How many of a known block's pages nobody holds: holding it makes so many fewer available."""
        return sum(page in self._idle for page in self._known[key])

    def hold(self, key: bytes) -> tuple[int, ...]:
        """One more holder of a known block's pages, in order."""
        pages = self._known[key]
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1
        return pages

    def publish(self, key: bytes, pages: Sequence[int]) -> None:
        """Makes held pages known as a block's, unless others are already."""
        if key in self._known:
            return
        self._known[key] = tuple(pages)
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is published and nobody holds it"
            assert page not in self._key_of, f"page {page} is published twice"
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """One holder fewer. Later pages of a prompt are given away first: they are of no use without the earlier ones."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released twice"
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def _forget(self, page: int) -> None:
        """Drops the block that an idle page belongs to."""
        for one in self._known.pop(self._key_of[page]):
            del self._key_of[one]
            if one in self._idle:
                del self._idle[one]
                self._free.append(one)

    def assert_sound(self, tables: Sequence[Sequence[int]] = ()) -> None:
        """Every page is free, idle and known, or held exactly as often as the given tables hold it."""
        holders = [0] * self.num_pages
        for table in tables:
            for page in table:
                holders[page] += 1
        assert holders == self._holders, "pages are held that no sequence has, or the other way round"
        resting = {page for page, count in enumerate(holders) if count == 0}
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert set(self._free) | set(self._idle) == resting, "pages leaked"
        assert not set(self._free) & set(self._idle), "a page is free and idle"
        assert set(self._idle) <= set(self._key_of), "an idle page has no contents"
        assert self._key_of == {page: key for key, pages in self._known.items() for page in pages}, "keys and pages disagree"
