"""Reference codes: read once, encoded once, shared by those who ask at once, and kept within bounds in memory and on disk."""

import asyncio
import io
import struct
import wave as wavefile
from pathlib import Path

import numpy as np
import pytest

from duetts.config import Limits, cache_folder
from duetts.errors import InvalidRequest, NotReady, Overloaded
from duetts.types import Float32, Int32
from duetts.voices.reference import Clip, ClipCodes, ReferenceCodes
from tests.waiting import turns, until

from ..inputs import REFUSED_CLIPS, clip

RATE = 44100


class Encoder:
    """Codes of 400 bytes that follow from the samples; waits until it may go on, fails if told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.withdrawn = 0
        self.go = asyncio.Event()
        self.go.set()
        self.error: Exception | None = None

    async def encode(self, wave: Float32) -> Int32:
        self.calls += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise
        if self.error is not None:
            raise self.error
        return codes_of(wave)


def codes_of(wave: Float32) -> Int32:
    return np.full((10, 10), int(1000 * np.abs(wave).sum()) % 4096, np.int32)


def known(value: int) -> Clip:
    return Clip(f"key {value}", 100, np.full(100, value, np.float32))


def file(seed: int, seconds: float = 1.2, junk: bytes = b"") -> bytes:
    """A WAV file of noise. `junk` goes into a chunk that says nothing of the samples."""
    samples = np.random.default_rng(seed).normal(0, 3000, int(seconds * RATE)).astype("<i2")
    target = io.BytesIO()
    with wavefile.open(target, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(samples.tobytes())
    content = target.getvalue()
    extra = b"junk" + struct.pack("<I", len(junk)) + junk if junk else b""
    return b"RIFF" + struct.pack("<I", len(content) - 8 + len(extra)) + content[8:] + extra


async def resolve(codes: ReferenceCodes, audio: bytes) -> ClipCodes:
    return await codes.codes(await codes.decode(audio, "ref_audio"))


async def begun(encoder: Encoder, calls: int = 1) -> None:
    await until(lambda: encoder.calls >= calls)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where codes are kept on disk: a cache of this test's own."""
    monkeypatch.setenv("DUETTS_CACHE_DIR", str(tmp_path))
    return cache_folder() / "references"


# -- once ----------------------------------------------------------------------------------------------------------------


async def test_a_thousand_requests_with_one_clip_read_and_encode_it_once() -> None:
    encoder, audio = Encoder(), file(1)
    codes = ReferenceCodes(encoder.encode, RATE, Limits(reference_queue=1000))
    encoder.go.clear()
    waiting = [asyncio.ensure_future(resolve(codes, audio)) for _ in range(600)]
    await begun(encoder)
    waiting += [asyncio.ensure_future(resolve(codes, audio)) for _ in range(200)]  # while it is being encoded
    await asyncio.sleep(0.05)
    encoder.go.set()
    results = [*await asyncio.gather(*waiting), *[await resolve(codes, audio) for _ in range(200)]]
    assert [result.hit for result in results].count(False) == 1
    assert (encoder.calls, codes.num_decoded) == (1, 1)
    assert (codes.misses, codes.hits, codes.disk_hits, codes.num_bytes) == (1, 999, 0, 400)
    assert all(np.array_equal(result.codes, results[0].codes) for result in results)
    codes.close()


async def test_a_known_clip_is_its_length_without_its_samples() -> None:
    codes = ReferenceCodes(Encoder().encode, RATE, Limits())
    first = await codes.decode(file(1, 1.5), "ref_audio")
    assert first.wave is not None
    assert first.num_samples == len(first.wave) == int(1.5 * RATE)
    expected = await codes.codes(first)
    number, key = first.num_samples, first.key
    del first
    again = await codes.decode(file(1, 1.5), "ref_audio")
    assert (again.key, again.num_samples, again.wave) == (key, number, None)
    assert np.array_equal((await codes.codes(again)).codes, expected.codes)


async def test_the_same_samples_in_another_file_are_encoded_once() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, RATE, Limits())
    first, second = await resolve(codes, file(1)), await resolve(codes, file(1, junk=b"take 2"))
    assert (first.hit, second.hit, encoder.calls, codes.num_decoded) == (False, True, 1, 2)


async def test_codes_of_one_clip_are_never_anothers() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, RATE, Limits())
    waves = {seed: (await codes.decode(file(seed), "ref_audio")).wave for seed in range(40)}
    found = await asyncio.gather(*(resolve(codes, file(seed % 40)) for seed in range(80)))
    for seed, result in enumerate(found):
        wave = waves[seed % 40]
        assert wave is not None
        assert np.array_equal(result.codes, codes_of(wave))
    assert encoder.calls == 40


async def test_codes_cannot_be_changed_by_one_of_those_who_share_them() -> None:
    codes = ReferenceCodes(Encoder().encode, RATE, Limits())
    result = await codes.codes(known(1))
    with pytest.raises(ValueError):
        result.codes[0, 0] = 5


# -- who leaves ----------------------------------------------------------------------------------------------------------


async def test_a_caller_that_leaves_does_not_end_what_others_wait_for() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, RATE, Limits())
    encoder.go.clear()
    waiting = [asyncio.ensure_future(codes.codes(known(3))) for _ in range(3)]
    await begun(encoder)
    waiting[0].cancel()
    await asyncio.sleep(0)
    encoder.go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert [(await task).hit for task in waiting[1:]] == [True, True]
    assert (await codes.codes(known(3))).hit
    assert (encoder.calls, encoder.withdrawn) == (1, 0)


async def test_when_all_have_left_the_encoding_is_withdrawn() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, RATE, Limits())
    encoder.go.clear()
    waiting = [asyncio.ensure_future(codes.codes(known(3))) for _ in range(3)]
    await begun(encoder)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await turns()
    assert encoder.withdrawn == 1
    encoder.go.set()
    assert not (await codes.codes(known(3))).hit
    assert encoder.calls == 2


async def test_what_is_finished_although_all_have_left_is_kept() -> None:
    """So an engine whose encoding takes longer than its clients are patient serves them at the second try."""
    go = asyncio.Event()

    async def encode(wave: Float32) -> Int32:
        try:
            await go.wait()
        except asyncio.CancelledError:
            await go.wait()
        return codes_of(wave)

    codes = ReferenceCodes(encode, RATE, Limits())
    impatient = asyncio.ensure_future(codes.codes(known(3)))
    await turns()
    impatient.cancel()
    await asyncio.wait([impatient])
    go.set()
    await turns()
    assert (await codes.codes(known(3))).hit


async def test_a_failure_is_told_to_all_and_not_kept() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, RATE, Limits())
    encoder.error = ValueError("broken")
    results = await asyncio.gather(*(codes.codes(known(1)) for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [ValueError, ValueError]
    encoder.error = None
    assert not (await codes.codes(known(1))).hit
    assert (encoder.calls, codes.misses) == (2, 2)


# -- memory --------------------------------------------------------------------------------------------------------------


async def test_the_least_lately_used_go_even_if_many_end_at_once() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, RATE, Limits(reference_cache_bytes=1000))
    encoder.go.clear()
    waiting = [asyncio.ensure_future(codes.codes(known(value))) for value in range(8)]
    await begun(encoder, 8)
    encoder.go.set()
    await asyncio.gather(*waiting)
    assert (encoder.calls, codes.num_bytes) == (8, 800)
    await codes.codes(known(6))
    await codes.codes(known(8))  # puts out 7, which was asked for before 6
    await codes.codes(known(6))
    assert encoder.calls == 9
    await codes.codes(known(7))
    assert encoder.calls == 10


async def test_codes_larger_than_the_bound_are_kept_alone() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, RATE, Limits(reference_cache_bytes=100))
    for _ in range(2):
        await codes.codes(known(1))
    assert encoder.calls == 1
    await codes.codes(known(2))
    await codes.codes(known(1))
    assert encoder.calls == 3


async def test_a_clip_whose_codes_were_forgotten_is_read_and_encoded_again() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, RATE, Limits(reference_cache_bytes=400))
    first = await resolve(codes, file(1))
    await resolve(codes, file(2))
    again = await resolve(codes, file(1))
    assert (again.hit, encoder.calls, codes.num_decoded) == (False, 3, 3)
    assert np.array_equal(again.codes, first.codes)


# -- disk ----------------------------------------------------------------------------------------------------------------


def files(disk: Path) -> list[Path]:
    return list(disk.rglob("*.safetensors"))


async def stored(disk: Path, count: int) -> list[Path]:
    """The files on disk, as soon as there are `count`: they are written when nobody waits."""
    await until(lambda: len(files(disk)) == count)
    return files(disk)


async def test_a_restart_finds_its_codes_on_disk(disk: Path) -> None:
    before, after = Encoder(), Encoder()
    codes = ReferenceCodes(before.encode, RATE, Limits(), "codec")
    first = await resolve(codes, file(1))
    await stored(disk, 1)
    codes = ReferenceCodes(after.encode, RATE, Limits(), "codec")
    found = await asyncio.gather(*(resolve(codes, file(1)) for _ in range(5)))
    assert all(np.array_equal(result.codes, first.codes) and result.hit for result in found)
    assert (after.calls, codes.hits, codes.disk_hits, codes.misses) == (0, 5, 1, 0)


async def test_codes_of_another_codec_are_not_used(disk: Path) -> None:
    encoder = Encoder()
    await resolve(ReferenceCodes(encoder.encode, RATE, Limits(), "one codec"), file(1))
    await stored(disk, 1)
    assert not (await resolve(ReferenceCodes(encoder.encode, RATE, Limits(), "another"), file(1))).hit
    assert encoder.calls == 2


async def test_what_memory_forgot_is_neither_read_nor_encoded_again(disk: Path) -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, RATE, Limits(reference_cache_bytes=400), "codec")
    for seed in (1, 2):
        await resolve(codes, file(seed))
    await stored(disk, 2)
    assert (await resolve(codes, file(1))).hit
    assert (encoder.calls, codes.num_decoded, codes.disk_hits) == (2, 2, 1)


async def test_damaged_codes_are_made_again(disk: Path) -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, RATE, Limits(reference_cache_bytes=400), "codec")
    first = await resolve(codes, file(1))
    (path,) = await stored(disk, 1)
    await resolve(codes, file(2))
    path.write_bytes(path.read_bytes()[:-7])
    again = await resolve(codes, file(1))
    assert not again.hit
    assert np.array_equal(again.codes, first.codes)
    assert (encoder.calls, codes.disk_hits) == (3, 0)


@pytest.mark.parametrize(("codec_id", "limits"), [("", Limits()), ("codec", Limits(reference_disk_bytes=0))])
async def test_the_disk_can_be_left_alone(disk: Path, codec_id: str, limits: Limits) -> None:
    codes = ReferenceCodes(Encoder().encode, RATE, limits, codec_id)
    await resolve(codes, file(1))
    codes.close()
    await asyncio.sleep(0.05)
    assert files(disk) == []


# -- bounds --------------------------------------------------------------------------------------------------------------


async def test_refused_clips_leave_nothing_behind() -> None:
    encoder = Encoder()
    codes = ReferenceCodes(encoder.encode, RATE, Limits())
    for name, code in REFUSED_CLIPS.items():
        for _ in range(2):
            with pytest.raises(InvalidRequest) as refusal:
                await codes.decode(clip(name), "ref_audio")
            assert refusal.value.code == code
    with pytest.raises(InvalidRequest) as refusal:
        await ReferenceCodes(encoder.encode, RATE, Limits(reference_bytes=1024)).decode(file(1), "references")
    assert (refusal.value.code, refusal.value.field) == ("reference_too_large", "references")
    assert (encoder.calls, codes.num_decoded, codes.num_bytes) == (0, 0, 0)


async def test_a_known_file_is_still_refused_by_the_field_it_came_in() -> None:
    codes = ReferenceCodes(Encoder().encode, RATE, Limits())
    results = await asyncio.gather(
        *(codes.decode(b"no audio", field) for field in ("ref_audio", "references")), return_exceptions=True
    )
    assert [getattr(result, "field", None) for result in results] == ["ref_audio", "references"]


async def test_too_many_clips_at_once_are_refused_and_none_is_lost() -> None:
    codes = ReferenceCodes(Encoder().encode, RATE, Limits(reference_queue=4))
    results = await asyncio.gather(*(resolve(codes, file(seed)) for seed in range(40)), return_exceptions=True)
    assert {type(result) for result in results} == {ClipCodes, Overloaded}
    assert all(result.retry_after_s >= 1 for result in results if isinstance(result, Overloaded))
    assert isinstance(await resolve(codes, file(0)), ClipCodes)
    codes.close()
    with pytest.raises(NotReady):
        await resolve(codes, file(50))
