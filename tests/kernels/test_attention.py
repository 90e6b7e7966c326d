"""Attention, rotation and pages: twins against the models' plain arithmetic, Triton in its interpreter against the twins."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from duetts.kernels import attention, projection, reference, rotation

NAN = float("nan")
EPS = 1e-6


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def poison(keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, length: int) -> None:
    """What is left of others beyond a row's end is not even finite."""
    page = keys.shape[2]
    for position in range(length, len(table) * page):
        keys[table[position // page], :, position % page] = NAN
        values[table[position // page], :, position % page] = float("inf")


class Rows:
    """Rows of given lengths in shuffled pages, one slot more than rows, and a padding row that points beyond its table."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, dim: int, page: int, width: int, dtype: torch.dtype
    ) -> None:  # fmt: skip
        count = len(lengths)
        self.keys = draw(count * width + 1, kv_heads, page, dim, dtype=dtype)
        self.values = draw(count * width + 1, kv_heads, page, dim, seed=1, dtype=dtype)
        pages = torch.randperm(count * width, generator=torch.Generator().manual_seed(1)).view(count, width)
        self.tables = torch.cat((pages, torch.full((1, width), count * width))).int()
        self.slots = torch.arange(count + 1).roll(1)
        self.positions = torch.tensor([width * page + 5, *lengths])  # slot `count` is that of padding
        for slot, length in zip(self.slots[1:], lengths, strict=True):
            poison(self.keys, self.values, self.tables[slot], length)
        together = draw(count + 1, heads + 2 * kv_heads, dim, dtype=dtype)
        self.new = together[:, :heads], together[:, heads:-kv_heads], together[:, -kv_heads:]

    def attend(self, how: Any, **more: Any) -> tuple[torch.Tensor, ...]:
        """Output of all rows but the padding one, and the memory afterwards with numbers for what is not finite."""
        keys, values = self.keys.clone(), self.values.clone()
        out = how(*self.new, keys, values, self.tables, self.slots, self.positions, **more)
        return out[1:], keys[:-1].nan_to_num(7, 7), values[:-1].nan_to_num(7, 7)


CASES = [
    ([0, 37, 95], 4, 2, 16, 16, 6, torch.float32),
    ([150, 64], 3, 1, 32, 4, 40, torch.float32),  # a group that is no power of two, other pages
    ([128, 143], 4, 2, 16, 16, 9, torch.float16),
]


@pytest.mark.parametrize("case", CASES)
def test_decode_is_the_twin_whatever_lies_beyond_a_row(case: tuple[Any, ...]) -> None:
    rows = Rows(*case)
    expected = rows.attend(reference.decode_attention)
    assert expected[0].isfinite().all()
    found = rows.attend(attention.decode_attention, programs=1)
    assert_near(found[0], expected[0], 1e-3 if case[-1] == torch.float16 else 2e-6)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])
    shared = rows.attend(attention.decode_attention, programs=2)
    assert torch.equal(shared[0], found[0]), "the number of programs decides nothing"
    assert torch.equal(shared[1], expected[1])
    for _ in range(2):  # the second one finds the tickets as the first one did
        joined = rows.attend(attention.decode_attention, programs=3, joined=True)
        assert all(torch.equal(*both) for both in zip(joined, shared, strict=True))


def test_decode_of_a_row_is_the_same_in_other_company() -> None:
    rows = Rows(*CASES[0])
    (all_of_them, *_), one = rows.attend(attention.decode_attention, programs=1), slice(1, 2)
    alone = attention.decode_attention(
        *(tensor[one] for tensor in rows.new), rows.keys, rows.values, rows.tables, rows.slots[one], rows.positions[one],
        programs=3,
    )  # fmt: skip
    assert torch.equal(alone, all_of_them[:1])


def test_decode_twin_is_plain_attention() -> None:
    rows = Rows([37], 4, 2, 16, 16, 3, torch.float32)
    (out, *_) = rows.attend(reference.decode_attention)
    q, k, v = (tensor[1] for tensor in rows.new)
    past = [memory[rows.tables[0].long()].transpose(0, 1).flatten(1, 2)[:, :37] for memory in (rows.keys, rows.values)]
    keys, values = (torch.cat((old, new[:, None]), dim=1) for old, new in zip(past, (k, v), strict=True))
    expected = F.scaled_dot_product_attention(q[None, :, None], keys[None], values[None], enable_gqa=True)
    assert_near(out, expected[:, :, 0])


def test_few_pairs_share_their_rows_and_many_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    card = projection.Device((9, 0), 132, 228 * 1024)
    monkeypatch.setattr(projection, "device_of", lambda x: card)
    programs = [attention.programs_per_pair(torch.empty(rows, 32, 128), 8) for rows in (1, 8, 16, 32, 33, 256)]
    assert programs == [66, 9, 5, 3, 1, 1]


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "dim", "page", "width", "start"),
    [(21, 4, 2, 16, 16, 5, 33), (16, 3, 1, 32, 16, 4, 0), (5, 8, 2, 16, 4, 30, 96)],
)
def test_prefill_is_the_twin(n: int, heads: int, kv_heads: int, dim: int, page: int, width: int, start: int) -> None:
    keys, values = draw(width + 2, kv_heads, page, dim), draw(width + 2, kv_heads, page, dim, seed=1)
    table = torch.randperm(width + 1, generator=torch.Generator().manual_seed(1))[:width].int()
    poison(keys, values, table, start)
    together = draw(n, heads + 2 * kv_heads, dim)
    new = together[:, :heads], together[:, heads:-kv_heads], together[:, -kv_heads:]
    memory = [(keys.clone(), values.clone()) for _ in range(2)]
    expected = reference.prefill_attention(*new, *memory[0], table, torch.tensor([start]))
    assert expected.isfinite().all()
    assert_near(attention.prefill_attention(*new, *memory[1], table, torch.tensor([start])), expected)
    for one, other in zip(*memory, strict=True):
        assert torch.equal(one.nan_to_num(7, 7), other.nan_to_num(7, 7))


def test_prefill_block_by_block_and_decode_are_one_attention() -> None:
    n, page = 19, 4
    keys, values, table = draw(6, 1, page, 16), draw(6, 1, page, 16), torch.arange(5).int()
    q, k, v = draw(n, 2, 16), draw(n, 1, 16), draw(n, 1, 16, seed=1)
    whole = attention.prefill_attention(q, k, v, keys.clone(), values.clone(), table, torch.tensor([0]))
    parts = [
        attention.prefill_attention(q[a:b], k[a:b], v[a:b], keys, values, table, torch.tensor([a]))
        for a, b in ((0, 8), (8, 18))
    ]
    last = attention.decode_attention(
        q[18:], k[18:], v[18:], keys, values, table[None], torch.tensor([0]), torch.tensor([18]), programs=1
    )  # fmt: skip
    assert_near(torch.cat((*parts, last)), whole)


@pytest.mark.parametrize(
    ("batch", "n", "heads", "kv_heads", "dim", "room", "start"),
    [(3, 2, 8, 2, 16, 11, 0), (2, 1, 8, 2, 16, 11, 1), (2, 1, 3, 1, 32, 10, 9), (1, 5, 4, 2, 16, 20, 0)],
)
def test_frame_attention_is_the_twin(
    batch: int, n: int, heads: int, kv_heads: int, dim: int, room: int, start: int
) -> None:  # fmt: skip
    keys, values = draw(batch + 1, kv_heads, room, dim), draw(batch + 1, kv_heads, room, dim, seed=1)
    keys[:, :, start + n :] = NAN
    values[:, :, start + n :] = NAN
    together = draw(batch, n, heads + 2 * kv_heads, dim)
    new = together[:, :, :heads], together[:, :, heads:-kv_heads], together[:, :, -kv_heads:]
    memory = [(keys.clone(), values.clone()) for _ in range(2)]
    expected = reference.frame_attention(*new, *memory[0], start)
    assert_near(attention.frame_attention(*new, *memory[1], start), expected)
    for one, other in zip(*memory, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize(("batch", "n", "rope_rows", "normed"), [(2, 3, 2, True), (3, 1, 1, False)])
def test_norm_rotate_is_the_twin(batch: int, n: int, rope_rows: int, normed: bool) -> None:
    heads, kv_heads, dim = 7, 2, 16
    qkv = draw(batch, n, (heads + 2 * kv_heads) * dim)
    gains = (draw(dim), draw(dim, seed=1)) if normed else (None, None)
    rope = draw(rope_rows, n + 4, dim // 2, 2)[:, 2 : 2 + n]
    expected = reference.norm_rotate(qkv, heads, kv_heads, *gains, EPS, rope)
    for found, one in zip(rotation.norm_rotate(qkv, heads, kv_heads, *gains, EPS, rope), expected, strict=True):
        assert_near(found, one)


def test_rotation_keeps_lengths_and_turns_by_the_table() -> None:
    angle = torch.tensor([[[0.0, 1.0]]])  # position, pair
    rope = torch.stack((angle.cos(), angle.sin()), dim=-1)
    qkv = torch.tensor([1.0, 0, 1, 0, 0, 1, 0, 1, 5, 6, 7, 8]).view(1, 1, 12)
    q, k, v = reference.norm_rotate(qkv, 1, 1, None, None, 0.0, rope)
    cos, sin = float(angle[0, 0, 1].cos()), float(angle[0, 0, 1].sin())
    assert_near(q.flatten(), torch.tensor([1, 0, cos, sin]))
    assert_near(k.flatten(), torch.tensor([0, 1, -sin, cos]))
    assert v.flatten().tolist() == [5, 6, 7, 8]
