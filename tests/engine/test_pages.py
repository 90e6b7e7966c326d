"""Pages: how prompts are cut, who holds what, what is shared, and what goes first when room is needed."""

from __future__ import annotations

import numpy as np
import pytest

from duetts.engine.pages import PAGE, Block, PagePool, cut_blocks, pages_for
from duetts.types import Int32


def columns(length: int, seed: int = 0) -> Int32:
    return np.random.default_rng(seed).integers(0, 1000, (4, length)).astype(np.int32)


def cuts(blocks: list[Block]) -> list[int]:
    return [block.end for block in blocks]


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_positions(positions: int, pages: int) -> None:
    assert pages_for(positions) == pages


@pytest.mark.parametrize(
    ("end", "size", "border", "expected"),
    [
        (0, 32, 0, []),
        (1, 32, 0, [1]),
        (32, 32, 0, [32]),
        (70, 32, 0, [32, 64, 70]),
        (70, 32, 48, [32, 48, 70]),
        (70, 32, 50, [32, 48, 70]),  # a border inside a page is the page's beginning
        (70, 32, 15, [32, 64, 70]),
        (70, 32, 64, [32, 64, 70]),
        (70, 32, 500, [32, 64, 70]),  # a voice that goes beyond what is read
        (100, 96, 16, [16, 100]),
    ],
)  # fmt: skip
def test_where_prompts_are_cut(end: int, size: int, border: int, expected: list[int]) -> None:
    blocks = cut_blocks(columns(120), end, size, border)
    assert cuts(blocks) == expected
    assert [block.start for block in blocks] == [0, *expected][: len(blocks)]
    for block in blocks:
        assert (block.key is None) == (block.end % PAGE != 0)
        assert list(block.pages) == list(range(block.start // PAGE, pages_for(block.end)))


def test_blocks_must_fill_pages() -> None:
    with pytest.raises(AssertionError, match="do not fill pages"):
        cut_blocks(columns(40), 40, 24)


def test_a_key_stands_for_the_block_for_all_before_it_and_for_the_cuts() -> None:
    one, other = columns(64), columns(64)
    keys = [block.key for block in cut_blocks(one, 64, 32)]
    assert keys == [block.key for block in cut_blocks(other, 64, 32)]
    for row in range(4):  # ids and every codebook count
        other = one.copy()
        other[row, 40] += 1
        changed = [block.key for block in cut_blocks(other, 64, 32)]
        assert changed[0] == keys[0]
        assert changed[1] != keys[1]
    other = one.copy()
    other[0, 3] += 1
    assert all(a != b for a, b in zip(keys, [block.key for block in cut_blocks(other, 64, 32)], strict=True))
    assert cut_blocks(one, 64, 64)[0].key not in keys
    assert cut_blocks(one, 64, 32, border=16)[-1].key not in keys


def test_voices_share_whole_blocks_up_to_their_border_whatever_follows() -> None:
    voice = columns(70)
    prompts = [np.concatenate((voice, columns(length, seed=length)), axis=1) for length in (9, 40)]
    first, second = (cut_blocks(prompt, prompt.shape[1] - 1, 32, border=70) for prompt in prompts)
    assert cuts(first)[:2] == cuts(second)[:2] == [32, 64]
    assert [block.key for block in first[:2]] == [block.key for block in second[:2]]
    assert first[2].key != second[2].key


def test_pages_are_taken_once_and_come_back() -> None:
    pool = PagePool(4)
    one, two = pool.take(3), pool.take(1)
    assert sorted([*one, *two]) == [0, 1, 2, 3]
    assert (pool.available, pool.used, pool.cached) == (0, 4, 0)
    with pytest.raises(AssertionError, match="1 pages are asked for, 0 are there"):
        pool.take(1)
    pool.release(one)
    pool.assert_sound([two])
    assert pool.available == 3
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(one)


def test_known_pages_are_counted_by_their_holders_and_stay_when_nobody_holds_them() -> None:
    pool = PagePool(4)
    own = pool.take(2)
    pool.publish(b"a", own)
    assert pool.knows(b"a")
    assert not pool.knows(None)
    assert pool.idle_pages(b"a") == 0
    shared = pool.hold(b"a")
    assert list(shared) == own
    pool.assert_sound([own, shared])
    pool.release(own)
    assert pool.used == 2
    pool.release(shared)
    assert (pool.used, pool.cached, pool.available, pool.idle_pages(b"a")) == (0, 2, 4, 2)
    pool.assert_sound()
    assert list(pool.hold(b"a")) == own
    assert (pool.used, pool.cached) == (2, 0)


def test_what_is_published_first_stays() -> None:
    pool = PagePool(4)
    first, second = pool.take(2), pool.take(2)
    pool.publish(b"a", first)
    pool.publish(b"a", second)
    assert list(pool.hold(b"a")) == first
    pool.release(second)
    assert pool.cached == 0
    pool.assert_sound([first, first])


def test_pages_that_nobody_holds_cannot_be_published_nor_twice() -> None:
    pool = PagePool(2)
    page = pool.take(1)
    pool.publish(b"a", page)
    with pytest.raises(AssertionError, match="published twice"):
        pool.publish(b"b", page)
    with pytest.raises(AssertionError, match="nobody holds it"):
        PagePool(2).publish(b"c", [0])


def test_what_was_not_used_for_longest_goes_first() -> None:
    pool = PagePool(3)
    for key in (b"a", b"b", b"c"):
        page = pool.take(1)
        pool.publish(key, page)
        pool.release(page)
    pool.release(pool.hold(b"a"))
    pool.take(1)
    assert [pool.knows(key) for key in (b"a", b"b", b"c")] == [True, False, True]
    pool.take(1)
    assert [pool.knows(key) for key in (b"a", b"b", b"c")] == [True, False, False]
    assert pool.evicted == 2


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    pool = PagePool(4)
    pages = pool.take(4)
    pool.publish(b"beginning", pages[:2])
    pool.publish(b"end", pages[2:])
    pool.release(pages)
    pool.take(1)
    assert pool.knows(b"beginning")
    assert not pool.knows(b"end")
    assert (pool.available, pool.cached, pool.evicted) == (3, 2, 1)  # a block goes as a whole: its other page is free


def test_free_pages_go_before_known_ones() -> None:
    pool = PagePool(3)
    page = pool.take(1)
    pool.publish(b"a", page)
    pool.release(page)
    pool.take(2)
    assert pool.knows(b"a")
    assert pool.evicted == 0


def test_held_blocks_are_never_given_away() -> None:
    pool = PagePool(4)
    held = pool.take(2)
    pool.publish(b"held", held)
    rest = pool.take(2)
    pool.publish(b"rest", rest)
    pool.release(rest)
    pool.take(2)
    assert pool.knows(b"held")
    assert not pool.knows(b"rest")


def test_unsound_books_are_noticed() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    for tables, complaint in ([[pages[:1]], "pages are held"], [[pages, pages], "pages are held"]):
        with pytest.raises(AssertionError, match=complaint):
            pool.assert_sound(tables)
    pool._free.append(pool._free[0])
    with pytest.raises(AssertionError, match="free twice"):
        pool.assert_sound([pages])
    pool._free.clear()
    with pytest.raises(AssertionError, match="leaked"):
        pool.assert_sound([pages])
