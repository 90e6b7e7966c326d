"""Reference codes: encoded once, shared by those who ask at once, and kept within a bound."""

import asyncio

import numpy as np
import pytest

from duetts.config import Limits
from duetts.types import Float32, Int32
from duetts.voices.reference import ReferenceCodes


class Encoder:
    """Codes of 400 bytes whose value is the clip's first sample; waits until it may go on, fails if told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.go = asyncio.Event()
        self.go.set()
        self.error: Exception | None = None

    async def encode(self, wave: Float32) -> Int32:
        self.calls += 1
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return np.full((10, 10), int(wave[0]), np.int32)


def clip(value: int) -> Float32:
    return np.full(100, value, np.float32)


async def test_one_clip_is_encoded_once_whoever_asks_and_leaves() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, 44100, Limits())
    encoder.go.clear()
    waiting = [asyncio.ensure_future(codes.codes(clip(3))) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    encoder.go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert [(await task)[0, 0] for task in waiting[1:]] == [3, 3]
    assert (await codes.codes(clip(3)))[0, 0] == 3
    assert (encoder.calls, codes.misses, codes.hits) == (1, 1, 3)


async def test_a_failure_is_told_to_all_and_not_kept() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, 44100, Limits())
    encoder.error = ValueError("broken")
    results = await asyncio.gather(*(codes.codes(clip(1)) for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [ValueError, ValueError]
    encoder.error = None
    assert (await codes.codes(clip(1)))[0, 0] == 1
    assert encoder.calls == 2


async def test_the_least_lately_used_go_even_if_many_end_at_once() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, 44100, Limits(reference_cache_bytes=1000))
    encoder.go.clear()
    waiting = [asyncio.ensure_future(codes.codes(clip(value))) for value in range(8)]
    await asyncio.sleep(0)
    encoder.go.set()
    await asyncio.gather(*waiting)
    assert encoder.calls == 8
    await codes.codes(clip(6))
    await codes.codes(clip(8))  # puts out 7, which was asked for before 6
    await codes.codes(clip(6))
    assert encoder.calls == 9
    await codes.codes(clip(7))
    assert encoder.calls == 10


async def test_codes_larger_than_the_bound_are_kept_alone() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, 44100, Limits(reference_cache_bytes=100))
    for _ in range(2):
        await codes.codes(clip(1))
    assert encoder.calls == 1
    await codes.codes(clip(2))
    await codes.codes(clip(1))
    assert encoder.calls == 3
