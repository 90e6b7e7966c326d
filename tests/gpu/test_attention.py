"""Attention on a GPU: all types, S2 Pro's sizes, CUDA graphs, a cache beyond 2 ** 31 elements, and rows that must not depend on
their company."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from duetts import kernels
from duetts.attention import fish_kvcache_attn
from duetts.kernels import guard, reference

pytestmark = pytest.mark.gpu
attention = pytest.importorskip("duetts.kernels.attention")

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # of outputs of about 1
EPS = 1e-6


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, device=DEVICE).normal_().to(dtype)


def new(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as a model has them: parts of one tensor [..., heads, DIM]."""
    together = draw(*shape, HEADS + 2 * KV_HEADS, DIM, dtype=dtype)
    return together[..., :HEADS, :], together[..., HEADS:-KV_HEADS, :], together[..., -KV_HEADS:, :]


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert ((found.double() - expected.double()).abs() <= TOLERANCE[dtype] * (1 + expected.double().abs())).all()


class Rows:
    """Rows of given lengths in shuffled pages. What lies beyond a row's end is not a number."""

    def __init__(self, lengths: list[int], width: int, dtype: torch.dtype) -> None:
        self.dtype, count = dtype, len(lengths)
        shape = (count * width + 1, KV_HEADS, PAGE, DIM)
        self.keys, self.values = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
        pages = torch.randperm(count * width, device=DEVICE).view(count, width)
        self.tables = torch.cat((pages, torch.full((1, width), count * width, device=DEVICE))).int()
        self.slots = torch.randperm(count, device=DEVICE)
        self.positions = torch.tensor(lengths, device=DEVICE)
        beyond = torch.arange(width * PAGE, device=DEVICE) >= self.positions[:, None]
        rows, places = beyond.nonzero(as_tuple=True)
        own = self.tables[self.slots[rows], places // PAGE].long()
        for memory in (self.keys, self.values):
            memory[own, :, places % PAGE] = float("nan")
        self.new = new(count, dtype=dtype)

    def attend(self, how: Callable[..., torch.Tensor], **more: Any) -> tuple[torch.Tensor, ...]:
        keys, values = self.keys.clone(), self.values.clone()
        out = how(*self.new, keys, values, self.tables, self.slots, self.positions, **more)
        return out, keys.nan_to_num(7), values.nan_to_num(7)


LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 128, 500, 1000, 1151]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_decode(dtype: torch.dtype) -> None:
    rows = Rows(LENGTHS, 72, dtype)
    keys, values = rows.keys.double(), rows.values.double()
    wide = (tensor.double() for tensor in rows.new)
    expected = reference.decode_attention(*wide, keys, values, rows.tables, rows.slots, rows.positions)
    found, *memory = rows.attend(attention.decode_attention, programs=1)
    assert_near(found, expected, dtype)
    _, *twins = rows.attend(reference.decode_attention)
    assert all(torch.equal(one, other) for one, other in zip(memory, twins, strict=True))
    for programs, joined in ((2, False), (5, True), (64, False), (64, True), (3, True)):
        shared, *memory = rows.attend(attention.decode_attention, programs=programs, joined=joined)
        assert torch.equal(shared, found), (programs, joined)
        assert all(torch.equal(one, other) for one, other in zip(memory, twins, strict=True))


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_company() -> None:
    rows = Rows(LENGTHS * 8, 72, torch.bfloat16)
    found, *_ = rows.attend(kernels.decode_attention)
    for count in (1, 4, 12, 40):
        some = slice(0, count)
        out = kernels.decode_attention(
            *(tensor[some] for tensor in rows.new), rows.keys.clone(), rows.values.clone(), rows.tables, rows.slots[some],
            rows.positions[some],
        )  # fmt: skip
        assert torch.equal(out, found[some]), count


@torch.inference_mode()
def test_a_gpu_has_the_kernel_and_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "DECODE", guard.DecodeUse(required=True))
    for count in (1, 64):
        Rows([20] * count, 2, torch.bfloat16).attend(kernels.decode_attention)
    status = fish_kvcache_attn.status()
    assert status["available"]
    assert (status["hits_long"], status["hits_short"], status["fallbacks"]) == (1, 1, {})
    with pytest.raises(RuntimeError, match="float64"):
        Rows([20], 2, torch.float64).attend(kernels.decode_attention)


@torch.inference_mode()
def test_the_self_test_passes() -> None:
    assert fish_kvcache_attn.self_test("cuda") <= fish_kvcache_attn.TOLERANCE
    assert fish_kvcache_attn.self_test("cuda", torch.float32) <= 1e-4


@torch.inference_mode()
def test_a_cache_of_more_than_2_to_the_31_elements() -> None:
    pages = (1 << 31) // (KV_HEADS * PAGE * DIM) + 64
    keys, values = (torch.zeros(pages, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    table = torch.arange(pages - 8, pages, device=DEVICE).int()
    keys[table[0] :], values[table[0] :] = draw(8, KV_HEADS, PAGE, DIM), draw(8, KV_HEADS, PAGE, DIM)
    q, k, v = new(20, dtype=torch.bfloat16)
    start = torch.tensor([50], device=DEVICE)
    small_keys, small_values, small = keys[table[0] :].clone(), values[table[0] :].clone(), torch.arange(8, device=DEVICE).int()
    expected = reference.prefill_attention(q, k, v, small_keys, small_values, small, start)
    assert_near(attention.prefill_attention(q, k, v, keys, values, table, start), expected, torch.bfloat16)
    slot, position = torch.tensor([0], device=DEVICE), torch.tensor([70], device=DEVICE)
    one = q[:1], k[:1], v[:1]
    expected = reference.decode_attention(*one, small_keys, small_values, small[None], slot, position)
    for programs in (1, 4):
        out = attention.decode_attention(*one, keys, values, table[None], slot, position, programs=programs)
        assert_near(out, expected, torch.bfloat16)
    assert torch.equal(keys[table[0] :], small_keys)
    assert torch.equal(values[table[0] :], small_values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "start"), [(1, 0), (17, 0), (100, 33), (512, 500), (64, 1000)])
@torch.inference_mode()
def test_prefill(n: int, start: int, dtype: torch.dtype) -> None:
    rows = Rows([start], 72, dtype)
    table, q = rows.tables[rows.slots[0]], new(n, dtype=dtype)
    begin = torch.tensor([start], device=DEVICE)
    wide = (tensor.double() for tensor in q)
    expected = reference.prefill_attention(*wide, rows.keys.double(), rows.values.double(), table, begin)
    memory = [(rows.keys.clone(), rows.values.clone()) for _ in range(2)]
    assert_near(kernels.prefill_attention(*q, *memory[0], table, begin), expected, dtype)
    reference.prefill_attention(*q, *memory[1], table, begin)
    for one, other in zip(*memory, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 3, 256])
@torch.inference_mode()
def test_a_frame(batch: int, dtype: torch.dtype) -> None:
    keys, values = (torch.full((batch, KV_HEADS, 11, DIM), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    twin_keys, twin_values = keys.clone(), values.clone()
    for start, n in [(0, 2), *((start, 1) for start in range(2, 11))]:
        q = new(batch, n, dtype=dtype)
        expected = reference.frame_attention(*q, twin_keys, twin_values, start)
        assert_near(kernels.frame_attention(*q, keys, values, start), expected, dtype)
    assert torch.equal(keys, twin_keys)
    assert torch.equal(values, twin_values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_norm_and_rotation(dtype: torch.dtype) -> None:
    for batch, n, rope_rows in ((1, 1, 1), (64, 1, 64), (1, 300, 1), (5, 2, 1)):
        qkv = draw(batch, n, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
        gains, rope = (draw(DIM, dtype=dtype), draw(DIM, dtype=dtype)), draw(rope_rows, n, DIM // 2, 2, dtype=torch.float32)
        for q_gain, k_gain in (gains, (None, None)):
            expected = reference.norm_rotate(qkv, HEADS, KV_HEADS, q_gain, k_gain, EPS, rope)
            for found, one in zip(kernels.norm_rotate(qkv, HEADS, KV_HEADS, q_gain, k_gain, EPS, rope), expected, strict=True):
                assert_near(found, one, dtype)


@torch.inference_mode()
def test_the_last_of_many_programs_sees_what_all_have_left() -> None:
    """Many times over, as a program that folds too early would not be wrong every time."""
    rows = Rows([1151, 900, 0, 64], 72, torch.bfloat16)
    expected, *_ = rows.attend(attention.decode_attention, programs=1)
    inputs = (*rows.new, rows.keys, rows.values, rows.tables, rows.slots, rows.positions)
    outputs = [attention.decode_attention(*inputs, programs=16, joined=True) for _ in range(500)]
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("batch", [1, 12, 96])
@torch.inference_mode()
def test_one_recorded_layer_serves_all_lengths(batch: int) -> None:
    """Rotation and attention in a CUDA graph, whose positions, slots and tables change between replays."""
    rows = Rows([3] * batch, 72, torch.bfloat16)
    rows.keys.nan_to_num_(0)
    rows.values.nan_to_num_(0)
    qkv = draw(batch, 1, (HEADS + 2 * KV_HEADS) * DIM)
    gains, ropes = (draw(DIM), draw(DIM)), draw(72 * PAGE, DIM // 2, 2, dtype=torch.float32)

    def layer(room: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        q, k, v = room.norm_rotate(qkv, HEADS, KV_HEADS, *gains, EPS, ropes[rows.positions][:, None])
        out: torch.Tensor = room.decode_attention(
            q[:, 0], k[:, 0], v[:, 0], keys, values, rows.tables, rows.slots, rows.positions
        )  # fmt: skip
        return out

    memory = rows.keys.clone(), rows.values.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(kernels, *memory)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = layer(kernels, *memory)
    for lengths in ([3, 700, 64], [1151, 0, 65], [40, 41, 42]):
        rows.positions.copy_(torch.tensor((lengths * batch)[:batch]))
        rows.slots.copy_(torch.randperm(batch))
        qkv.copy_(draw(*qkv.shape))
        for target, source in zip(memory, (rows.keys, rows.values), strict=True):
            target.copy_(source)
        graph.replay()
        expected = layer(reference, rows.keys.clone(), rows.values.clone())
        assert_near(recorded, expected, torch.bfloat16)
