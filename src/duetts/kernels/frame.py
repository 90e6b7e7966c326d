"""What begins and ends a step: the embedding of a column, and the draws.

`embed_frame` fuses eleven gathers, their sum and its scaling: 11 rows of 5 KB in S2 Pro, 56 KB a row of the batch. The draws
fuse soundness, penalty, softmax, order, both cuts, the random numbers, the race and, for main tokens, the repetition rule. One
program draws for one row: 8 KB of 4,097 bf16 logits or 2 KB of 1,024, ten draws a frame. What counts is latency, and most of it
is order: the best 64 are found by a bitonic selection, and only rows that could still draw another look for the next 64. A
logit's order-preserving bits and its id are one integer, so that equal logits stay in the order of ids. Measured: not yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from duetts.kernels import projection
from duetts.kernels.streaming import follow

_BLOCK = 512  # elements of an embedding that one program sums
_ROUND = 6  # 2 ** this candidates are looked at together
_LARGEST = tl.constexpr(0x7FFFFFFF)
_NOTHING = tl.constexpr(-0x8000000000000000)  # below every key
_REPEAT_WINDOW = tl.constexpr(10)
_MAX_RANKS = tl.constexpr(1 << 20)
_GAMMA = tl.constexpr(-7046029254386353131)
_MIX_1 = tl.constexpr(-4658895280553007687)
_MIX_2 = tl.constexpr(-7723592293110705685)


@triton.jit
def _embed(
    columns, embeddings, codebook_embeddings, out, stride, step, semantic_start, semantic_end, divisor, size, dim,
    CODEBOOKS: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    follow(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < dim
    token = tl.load(columns + row * stride)
    x = tl.load(embeddings + token * dim + place, mask=real, other=0.0)
    if (token >= semantic_start) & (token <= semantic_end):
        total = tl.zeros((BLOCK,), tl.float32)
        for book in tl.static_range(CODEBOOKS):
            code = tl.load(columns + row * stride + (book + 1) * step) + book * size
            total += tl.load(codebook_embeddings + code * dim + place, mask=real, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + total.to(x.dtype).to(tl.float32)).to(x.dtype)
        if SCALED:
            x = (x.to(tl.float32) / divisor).to(x.dtype)
    tl.store(out + row * dim + place, x, mask=real)


def embed_frame(
    columns: Tensor, embeddings: Tensor, codebook_embeddings: Tensor, semantic_start: int, semantic_end: int, divisor: float
) -> Tensor:
    """As `reference.embed_frame`."""
    rows, dim, codebooks = len(columns), embeddings.shape[1], columns.shape[1] - 1
    out = torch.empty(rows, dim, dtype=embeddings.dtype, device=columns.device)
    _embed[(rows, triton.cdiv(dim, _BLOCK))](
        columns, embeddings, codebook_embeddings, out, *columns.stride(), semantic_start, semantic_end, divisor,
        len(codebook_embeddings) // codebooks, dim, CODEBOOKS=codebooks, BLOCK=_BLOCK, SCALED=divisor != 1, num_warps=2,
        **projection._dependent(embeddings),
    )  # fmt: skip
    return out


@triton.jit
def _mix(x):
    """The splitmix64 finaliser, as in `reference`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniforms(seed, frame, draw, rank):
    """Numbers in (0, 1) of ranks. seed and frame are int64 [1]: in the interpreter the overflow of scalars is an error."""
    lanes = draw * _MAX_RANKS + rank.to(tl.int64)
    key = _mix(_mix(seed * _GAMMA) + frame * _GAMMA)
    bits = (_mix(key + (lanes + 1) * _GAMMA) >> 41) & 0x7FFFFF
    return (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 ** -23


@triton.jit
def _choices(logits, recent, penalty, first, choices, WINDOW: tl.constexpr, SIZE: tl.constexpr):
    """SIZE logits from `first` on, penalised, those that are none at -inf; their keys; and whether all of them are finite.

    A key is an integer in the order of logits, among equals that of ids, the first one being the largest.
    """
    ids = first + tl.arange(0, SIZE)
    real = ids < choices
    raw = tl.load(logits + ids, mask=real, other=0.0)
    x = raw.to(tl.float32)
    finite = tl.abs(x) < float("inf")
    x = tl.where(finite, x, 0.0)  # the row is lost, yet what is drawn must be one of its choices
    if WINDOW > 0:
        seen = ids < 0
        for index in tl.static_range(WINDOW):
            seen = seen | (ids == tl.load(recent + index))
        x = tl.where(seen, tl.where(x > 0, x / penalty, x * penalty).to(raw.dtype).to(tl.float32), x)
    x = tl.where(x == 0, 0.0, x)  # -0 is no less than 0
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & _LARGEST)
    keys = (bits.to(tl.int64) << 32) | (ids ^ _LARGEST).to(tl.int64)
    return tl.where(real, x, float("-inf")), tl.where(real, keys, _NOTHING), tl.min(finite.to(tl.int32), 0) > 0


@triton.jit
def _unpacked(keys, rank, choices):
    """Logits and ids of sorted keys; beyond the choices -inf and the last id."""
    bits = (keys >> 32).to(tl.int32)
    x = (bits ^ ((bits >> 31) & _LARGEST)).to(tl.float32, bitcast=True)
    ids = tl.minimum((keys & _LARGEST).to(tl.int32) ^ _LARGEST, choices - 1)
    return tl.where(rank < choices, x, float("-inf")), ids


@triton.jit
def _exchange(keys, SIZE: tl.constexpr, BIT: tl.constexpr, RUN: tl.constexpr):
    """Orders the pairs whose indices differ in BIT: the larger first where bit RUN of the index is 0, last where it is 1."""
    pairs = tl.reshape(keys, (SIZE >> (BIT + 1), 2, 1 << BIT))
    index = tl.reshape(tl.arange(0, SIZE), (SIZE >> (BIT + 1), 2, 1 << BIT))
    partner = tl.sum(pairs, 1, keep_dims=True) - pairs  # sums wrap around, and back
    wants_larger = ((index >> BIT) & 1) == ((index >> RUN) & 1)
    return tl.reshape(tl.where((pairs > partner) == wants_larger, pairs, partner), (SIZE,))


@triton.jit
def _best(keys, SIZE: tl.constexpr, KEPT: tl.constexpr):
    """The 2 ** KEPT largest of 2 ** SIZE keys, the largest first. Runs are sorted by turns down and up; then, level by level,
    the larger ones of two neighbours are a run that falls and rises, or the reverse, and a few exchanges sort it."""
    for stage in tl.static_range(1, KEPT + 1):
        for step in tl.static_range(stage):
            keys = _exchange(keys, 1 << SIZE, stage - 1 - step, stage)
    for level in tl.static_range(1, SIZE - KEPT + 1):
        keys = tl.max(tl.reshape(keys, (1 << (SIZE - KEPT - level), 2, 1 << KEPT)), 1)
        keys = tl.reshape(keys, (1 << (SIZE - level),))
        for step in tl.static_range(KEPT):
            keys = _exchange(keys, 1 << (SIZE - level), KEPT - 1 - step, KEPT)
    return keys


@triton.jit
def _race(
    x, ids, rank, reached, top, best, winner, top_p, limit, temperature, seed, frame, draw, RANKS: tl.constexpr
):  # fmt: skip
    """The best score of a race and who has it, after RANKS more candidates. They are cut at temperature 1, then tempered;
    without temperature rank 0 wins."""
    dropped = ((reached > top_p) | (rank >= limit)) & (rank > 0)
    weights = tl.where(dropped, 0.0, tl.exp((x - top) / tl.maximum(temperature, 1e-5)))
    scores = weights / -tl.log(_uniforms(seed, frame, draw, rank))
    scores = tl.where(temperature > 0, scores, (rank == 0).to(tl.float32))
    score, place = tl.max(scores, 0), tl.argmax(scores, 0)
    found = tl.sum(tl.where(tl.arange(0, RANKS) == place, ids, 0), 0)
    return tl.maximum(score, best), tl.where(score > best, found, winner)


@triton.jit
def _repeated(choice, recent, frame, end, WINDOW: tl.constexpr):
    """Whether a choice occurred in the last ten, of which the very first frame is none."""
    lane = tl.arange(0, 16)
    past = tl.load(recent + WINDOW - _REPEAT_WINDOW + lane, mask=lane < _REPEAT_WINDOW, other=-1)
    counted = tl.sum(frame, 0) - _REPEAT_WINDOW + lane > 0
    return (tl.max(((past == choice) & counted).to(tl.int32), 0) > 0) & (choice != end)


@triton.jit
def _sample(
    logits, recent, frames, seeds, temperatures, top_ps, top_ks, penalties, out, sounds, stride, draw, end, choices,
    WINDOW: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, KEPT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Draws for one row: 2 ** KEPT candidates at a time, the best first, until all that are left would be dropped."""
    follow(DEPENDENT)
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    recent += row * WINDOW
    seed, frame = tl.load(seeds + row + tl.arange(0, 1)), tl.load(frames + row + tl.arange(0, 1))
    temperature, top_p, top_k = tl.load(temperatures + row), tl.load(top_ps + row), tl.load(top_ks + row)
    penalty = tl.load(penalties + row)
    all_x, keys, sound = _choices(logits, recent, penalty, 0, choices, WINDOW, 1 << FIRST)
    top = tl.max(all_x, 0)
    if REST > 0:
        rest_x, rest_keys, rest_sound = _choices(logits, recent, penalty, 1 << FIRST, choices, WINDOW, 1 << REST)
        top, sound = tl.maximum(top, tl.max(rest_x, 0)), sound & rest_sound
        total = tl.sum(tl.exp(all_x - top), 0) + tl.sum(tl.exp(rest_x - top), 0)
    else:
        total = tl.sum(tl.exp(all_x - top), 0)
    limit = tl.minimum(tl.where(top_k > 0, top_k, choices), choices).to(tl.int32)
    base, reached = limit * 0, total * 0.0
    best, again_best = reached - 1.0, reached - 1.0
    choice, again = base, base
    while base < limit:
        kept = _best(keys, FIRST, KEPT)
        if REST > 0:
            both = tl.join(kept, _best(rest_keys, REST, KEPT))
            kept = _best(tl.reshape(both, (2 << KEPT,)), KEPT + 1, KEPT)
        rank = base + tl.arange(0, 1 << KEPT)
        x, ids = _unpacked(kept, rank, choices)
        sums = reached + tl.cumsum(tl.exp(x - top) / total, 0)
        best, choice = _race(
            x, ids, rank, sums, top, best, choice, top_p, limit, temperature, seed, frame, draw, 1 << KEPT
        )  # fmt: skip
        if WINDOW > 0:
            again_best, again = _race(
                x, ids, rank, sums, top, again_best, again, 0.9, limit, 1.0, seed, frame, draw + 1, 1 << KEPT
            )  # fmt: skip
        reached = tl.max(sums, 0)
        done = reached > top_p
        if WINDOW > 0:
            done = done & (reached > 0.9)
        base = tl.where(done, limit, base + (1 << KEPT))
        lowest = tl.min(kept, 0)
        keys = tl.where(keys < lowest, keys, _NOTHING)
        if REST > 0:
            rest_keys = tl.where(rest_keys < lowest, rest_keys, _NOTHING)
    if WINDOW > 0:
        choice = tl.where(_repeated(choice, recent, frame, end, WINDOW) & (temperature > 0), again, choice)
    tl.store(out + row, choice.to(tl.int64))
    tl.store(sounds + row, sound)


def _launch(
    logits: Tensor, recent: Tensor, frame: Tensor, seed: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor,
    penalty: Tensor, draw: int, end: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, choices = logits.shape
    every = max(_ROUND, (choices - 1).bit_length())  # sizes are powers of two, given as exponents
    rest = max(_ROUND, (choices - (1 << (every - 1)) - 1).bit_length())
    split = every > _ROUND and rest < every - 1  # 4,097 choices are 4,096 and one: half the work of 8,192
    out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    sound = torch.empty(batch, dtype=torch.bool, device=logits.device)
    _sample[(batch,)](
        logits, recent, frame, seed, temperature, top_p, top_k, penalty, out, sound, logits.stride(0), draw, end, choices,
        WINDOW=window, FIRST=every - 1 if split else every, REST=rest if split else 0, KEPT=_ROUND,
        num_warps=16 if every > 11 else 4, **projection._dependent(logits),
    )  # fmt: skip
    return out, sound


def sample_main(
    logits: Tensor, recent: Tensor, frame: Tensor, seed: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor,
    penalty: Tensor, end: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `reference.sample_main`, in one launch."""
    return _launch(logits, recent.contiguous(), frame, seed, temperature, top_p, top_k, penalty, 0, end, recent.shape[1])


def sample_residual(
    book: int, logits: Tensor, frame: Tensor, seed: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor
) -> tuple[Tensor, Tensor]:
    """As `reference.sample_residual`, in one launch."""
    return _launch(logits, frame, frame, seed, temperature, top_p, top_k, temperature, book + 1, -1, 0)
