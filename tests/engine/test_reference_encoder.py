"""Reference encoding beside speech: bounded blocks, short clips first, none lost, each failing alone."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from duetts.checkpoint import load_model
from duetts.config import Limits
from duetts.engine.inprocess import InProcessSpeaker
from duetts.engine.reference_encoder import OLDEST_EVERY, EncoderThread, ReferenceEncoder
from duetts.errors import Aborted, EngineFailure, NotReady, Overloaded
from duetts.models.codec import Codec
from duetts.models.codec_state import StreamState, StreamView
from duetts.types import Float32, SpeakerInfo
from duetts.voices.reference import Clip, ReferenceCodes
from tests.waiting import LIMIT_S, turns, until

FRAME = 2048


def noise(samples: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32)


@pytest.fixture(scope="module")
def codec(tiny_folder: Path) -> Codec:
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "codec_dtype": torch.float32}
    return load_model(tiny_folder, **options).codec


@torch.inference_mode()
def whole(codec: Codec, wave: Float32) -> np.ndarray:
    return codec.encode(torch.from_numpy(wave)[None])[0].numpy()


def run(encoder: ReferenceEncoder) -> int:
    """Steps until nothing is to do; how many there were."""
    steps = 0
    while encoder.step():
        steps += 1
    return steps


# -- codes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, FRAME - 1, FRAME, FRAME + 1, 4 * FRAME, 4 * FRAME + 1, 21 * FRAME + 3])
def test_codes_are_those_of_the_whole_clip(codec: Codec, samples: int) -> None:
    encoder = ReferenceEncoder(codec, max_waiting=1, block_frames=4)
    future = encoder.submit(noise(samples))
    assert run(encoder) == -(-samples // (4 * FRAME))
    codes = future.result(0)
    assert codes.dtype == np.int32
    assert np.array_equal(codes, whole(codec, noise(samples)))
    assert encoder.idle


def test_codes_do_not_depend_on_company(codec: Codec) -> None:
    waves = [noise(length * FRAME // 2, length) for length in (3, 21, 9, 8, 1)]
    alone = []
    for wave in waves:
        encoder = ReferenceEncoder(codec, max_waiting=1, block_frames=3)
        future = encoder.submit(wave)
        run(encoder)
        alone.append(future.result(0))
    encoder = ReferenceEncoder(codec, max_waiting=9, block_frames=3, slots=3)
    futures = []
    for wave in waves:  # the later ones come while the earlier ones are under way
        futures.append(encoder.submit(wave))
        encoder.step()
        encoder.step()
    run(encoder)
    assert all(np.array_equal(future.result(0), codes) for future, codes in zip(futures, alone, strict=True))
    assert encoder.idle


async def test_sixty_four_different_clips_at_once_are_all_encoded(codec: Codec) -> None:
    encoder = ReferenceEncoder(codec, max_waiting=64, block_frames=1)
    thread = EncoderThread(encoder, 1)

    async def encode(wave: Float32) -> np.ndarray:
        return await asyncio.wrap_future(encoder.submit(wave))

    codes = ReferenceCodes(encode, 44100, Limits())
    waves = [noise((1 + index % 2) * FRAME, index) for index in range(64)]
    clips = [Clip(str(index), len(wave), wave) for index, wave in enumerate(waves)]
    found = await asyncio.gather(*(codes.codes(clip) for clip in clips for _ in range(2)))
    for index, wave in enumerate(waves):
        assert np.array_equal(found[2 * index].codes, whole(codec, wave))
        assert found[2 * index + 1].codes is found[2 * index].codes
    assert (encoder.num_clips, codes.misses, codes.hits) == (64, 64, 64)
    assert encoder.idle
    await asyncio.to_thread(thread.close)
    assert not thread.alive


# -- a codec without weights, for order and ends -------------------------------------------------------------------------


class AddingCodec:
    """Frames of 4 samples. A frame's code is what all samples up to it add up to; the sum is carried in the state.

    A sample of 99 makes a block fail, 77 makes its values not finite, 55 is a fault that no block should have.
    """

    def __init__(self) -> None:
        self.config = SimpleNamespace(frame_length=4)
        self.quantizer = SimpleNamespace(
            pre_module=SimpleNamespace(norm=SimpleNamespace(weight=torch.zeros(1))), search=self._search
        )
        self.blocks: list[float] = []  # the first sample of each
        self.gate = threading.Event()
        self.gate.set()

    def new_encoder_state(self, slots: int) -> StreamState:
        return StreamState(slots, [(1, 1)], [], device=torch.device("cpu"), dtype=torch.float32)

    def latents(self, wave: Tensor, view: StreamView) -> Tensor:
        self.gate.wait(LIMIT_S)
        self.blocks.append(wave[0, 0].item())
        if (wave == 99).any():
            raise RuntimeError("device lost its mind")
        assert not (wave == 55).any(), "a fault of the program"
        sums = wave.unflatten(-1, (-1, 4)).sum(-1)[:, None]  # [1, 1, frames]
        sums = torch.where((wave == 77).any(), torch.nan, sums)
        carried = view._state.tails[0][view._rows] + sums.cumsum(-1)
        view.extend(0, carried)
        view.advance(sums.shape[-1])
        return carried

    def _search(self, z: Tensor) -> Tensor:
        return z.nan_to_num().long()


def tagged(blocks: int, tag: int, block: int = 2) -> Float32:
    """Samples of a clip of so many blocks, all the same number."""
    return np.full(4 * block * blocks, tag, np.float32)


def expected(wave: Float32) -> np.ndarray:
    return wave.reshape(-1, 4).sum(1).cumsum().astype(np.int32)[None]


def adding(**options: Any) -> tuple[AddingCodec, ReferenceEncoder]:
    codec = AddingCodec()
    fake: Any = codec
    return codec, ReferenceEncoder(fake, **{"max_waiting": 20, "block_frames": 2, **options})


def test_a_short_clip_does_not_wait_for_a_long_one() -> None:
    codec, encoder = adding()
    long = [encoder.submit(tagged(30, tag)) for tag in (1, 2)]
    for _ in range(5):
        encoder.step()
    short = encoder.submit(tagged(3, 3))
    steps = 0
    while not short.done():
        encoder.step()
        steps += 1
    assert steps <= 4  # its own blocks, and one of the oldest's
    assert not any(future.done() for future in long)
    run(encoder)
    assert [np.array_equal(future.result(0), expected(tagged(30, tag))) for tag, future in enumerate(long, 1)] == [True, True]
    assert codec.blocks[5:9].count(3.0) == 3


def test_a_long_clip_gets_its_share_among_short_ones_that_keep_coming() -> None:
    _, encoder = adding(slots=2)
    long = encoder.submit(tagged(10, 1))
    steps = 0
    while not long.done():
        while encoder.waiting < 8:
            encoder.submit(tagged(1, 2))
        encoder.step()
        steps += 1
    assert steps <= 10 * OLDEST_EVERY


def test_every_clip_gets_a_slot_in_the_end_even_if_all_are_taken_by_newer_ones() -> None:
    _, encoder = adding(slots=2)
    first = encoder.submit(tagged(9, 1))
    encoder.step()
    second = encoder.submit(tagged(40, 2))  # longer than all that come: it has only the place of the oldest to hope for
    steps = 0
    while not second.done():
        while encoder.waiting < 6:
            encoder.submit(tagged(2, 3))
        encoder.step()
        steps += 1
    assert first.done()
    assert steps <= (9 + 40) * OLDEST_EVERY


def test_one_slot_serves_one_after_another() -> None:
    codec, encoder = adding(slots=1)
    futures = [encoder.submit(tagged(blocks, tag)) for blocks, tag in ((3, 1), (1, 2), (2, 3))]
    run(encoder)
    assert codec.blocks == [1.0, 1.0, 1.0, 2.0, 3.0, 3.0]
    assert all(future.done() for future in futures)


def test_a_step_is_one_block_beside_other_work() -> None:
    _, encoder = adding()
    futures = [encoder.submit(tagged(4, tag)) for tag in (1, 2, 3)]
    frames = 0
    while not all(future.done() for future in futures):
        frames += 1  # what the loop does between blocks
        before = encoder.num_blocks
        assert encoder.step()
        assert encoder.num_blocks == before + 1
    assert frames == 12
    assert not encoder.step()


def test_a_failing_clip_fails_alone_and_gives_its_slot_back(caplog: pytest.LogCaptureFixture) -> None:
    _, encoder = adding(slots=2)
    good, bad = tagged(4, 1), tagged(4, 2)
    bad[20] = 99
    not_finite = tagged(3, 3)
    not_finite[9] = 77
    futures = [encoder.submit(wave) for wave in (good, bad, not_finite, good)]
    run(encoder)
    for future in futures[1:3]:
        assert isinstance(future.exception(0), EngineFailure)
    assert [np.array_equal(futures[index].result(0), expected(good)) for index in (0, 3)] == [True, True]
    assert encoder.idle
    assert encoder.num_clips == 2
    assert caplog.text.count("could not be encoded") == 1


def test_the_line_has_a_bound_and_who_leaves_it_makes_room() -> None:
    codec, encoder = adding(max_waiting=2)
    first, second = encoder.submit(tagged(2, 1)), encoder.submit(tagged(2, 2))
    with pytest.raises(Overloaded) as refusal:
        encoder.submit(tagged(1, 3))
    assert refusal.value.retry_after_s >= 1
    assert second.cancel()
    third = encoder.submit(tagged(1, 3))
    run(encoder)
    assert np.array_equal(third.result(0), expected(tagged(1, 3)))
    assert first.done()
    assert 2.0 not in codec.blocks
    assert encoder.idle


def test_what_has_begun_cannot_be_cancelled() -> None:
    _, encoder = adding()
    future = encoder.submit(tagged(2, 1))
    encoder.step()
    assert not future.cancel()
    run(encoder)
    assert np.array_equal(future.result(0), expected(tagged(2, 1)))


def test_samples_are_taken_as_they_were_given() -> None:
    _, encoder = adding()
    wave = tagged(2, 1)
    future = encoder.submit(wave)
    wave[:] = 5
    run(encoder)
    assert np.array_equal(future.result(0), expected(tagged(2, 1)))


def test_closing_ends_all_that_wait_and_takes_no_more() -> None:
    _, encoder = adding()
    begun, waiting, left = (encoder.submit(tagged(3, tag)) for tag in (1, 2, 3))
    encoder.step()
    left.cancel()
    encoder.close()
    for future in (begun, waiting):
        assert isinstance(future.exception(0), Aborted)
    assert left.cancelled()
    with pytest.raises(NotReady):
        encoder.submit(tagged(1, 1))
    assert not encoder.step()
    assert not encoder.wait()
    assert encoder.idle
    encoder.close()


class Encoding(RuleBasedStateMachine):
    """Clips of random lengths, some of which fail or are cancelled, in random order with steps."""

    def __init__(self) -> None:
        super().__init__()
        self.codec, self.encoder = adding(max_waiting=6, slots=2)
        self.given: list[tuple[Float32, Future[np.ndarray]]] = []
        self.tag = 0
        self.closed = False

    @rule(
        blocks=st.integers(1, 6),
        missing=st.integers(0, 7),
        fault=st.sampled_from([None, None, None, 99, 77]),
        at=st.floats(0, 1),
    )
    def submit(self, blocks: int, missing: int, fault: int | None, at: float) -> None:
        self.tag = self.tag % 40 + 1
        wave = tagged(blocks, self.tag)[: 8 * blocks - missing]
        if fault is not None:
            wave[int(at * (len(wave) - 1))] = fault
        try:
            self.given.append((wave, self.encoder.submit(wave)))
        except NotReady:
            assert self.closed
        except Overloaded:
            assert self.encoder.waiting == 6

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            try:
                self.encoder.step()
            except RuntimeError:  # several clips in a row have failed: that is the device
                self.encoder.close()
                self.closed = True

    @precondition(lambda self: self.given)
    @rule(which=st.floats(0, 1))
    def cancel(self, which: float) -> None:
        self.given[int(which * (len(self.given) - 1))][1].cancel()

    @rule(close=st.integers(0, 9))
    def sometimes_close(self, close: int) -> None:
        if close == 0:
            self.encoder.close()
            self.closed = True

    @invariant()
    def never_more_begun_than_slots(self) -> None:
        begun = [job for job in self.encoder._jobs if job.slot is not None]
        assert len({job.slot for job in begun}) == len(begun) <= 2
        assert len(begun) + len(self.encoder._free) == 2

    def teardown(self) -> None:
        run(self.encoder)
        assert self.encoder.idle
        for wave, future in self.given:
            assert future.done()
            if future.cancelled():
                continue
            error = future.exception(0)
            if error is None:
                padded = np.pad(wave, (0, -len(wave) % 4))
                assert np.array_equal(future.result(0), expected(padded))
                assert not {99, 77} & set(wave.tolist())
            else:
                assert isinstance(error, Aborted if not {99, 77} & set(wave.tolist()) else Aborted | EngineFailure)


TestEncoding = Encoding.TestCase
TestEncoding.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_device_that_fails_again_and_again_ends_the_encoder() -> None:
    """So that whoever steps it ends, too. A good block between failures shows that they are the clips' own."""
    _, encoder = adding()
    for tag in (99, 99, 1, 99, 99):
        encoder.submit(tagged(1, tag))
        assert encoder.step()
    last = encoder.submit(tagged(1, 99))
    with pytest.raises(RuntimeError):
        encoder.step()
    encoder.close()
    assert isinstance(last.exception(0), Aborted)


# -- its own thread ------------------------------------------------------------------------------------------------------


@contextmanager
def threaded(**options: Any) -> Iterator[tuple[AddingCodec, ReferenceEncoder, EncoderThread]]:
    codec, encoder = adding(**options)
    thread = EncoderThread(encoder, 1)
    try:
        yield codec, encoder, thread
    finally:
        codec.gate.set()
        thread.close()


def test_a_thread_serves_many_submitters() -> None:
    woken = []
    with threaded(max_waiting=100, on_work=lambda: woken.append(1)) as (_, encoder, _):
        futures: dict[int, Future[np.ndarray]] = {}

        def submit(start: int) -> None:
            for tag in range(start, start + 20):
                futures[tag] = encoder.submit(tagged(1 + tag % 5, tag))

        submitters = [threading.Thread(target=submit, args=(start,)) for start in (1, 21)]
        for submitter in submitters:
            submitter.start()
        for submitter in submitters:
            submitter.join()
        for tag, future in futures.items():
            assert np.array_equal(future.result(LIMIT_S), expected(tagged(1 + tag % 5, tag)))
        assert encoder.idle
    assert len(woken) == 40


def test_closing_during_a_block_leaves_nobody_waiting() -> None:
    with threaded() as (codec, encoder, thread):
        codec.gate.clear()
        begun, waiting = encoder.submit(tagged(1, 1)), encoder.submit(tagged(1, 2))
        for _ in range(500):
            if begun.running():
                break
            threading.Event().wait(0.01)
        encoder.close()
        for future in (begun, waiting):
            assert isinstance(future.exception(LIMIT_S), Aborted)
        codec.gate.set()
        thread.close()
        assert not thread.alive
        assert encoder.idle


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_program_ends_the_thread_visibly() -> None:
    with threaded() as (_, encoder, thread):
        faulty, waiting = encoder.submit(tagged(2, 55)), encoder.submit(tagged(2, 1))
        for future in (faulty, waiting):
            assert isinstance(future.exception(LIMIT_S), Aborted)
        thread._thread.join(LIMIT_S)
        assert not thread.alive
        with pytest.raises(NotReady):
            encoder.submit(tagged(1, 1))


# -- behind the speaker --------------------------------------------------------------------------------------------------


def speaker(encode: Callable[[Float32], Future[np.ndarray]]) -> InProcessSpeaker:
    engine: Any = SimpleNamespace(encode=encode)
    return InProcessSpeaker(engine, SpeakerInfo("null", 44100, 4, 1, 100))


async def test_a_caller_that_leaves_withdraws_only_what_has_not_begun() -> None:
    _, encoder = adding()
    own = speaker(encoder.submit)
    begun = asyncio.ensure_future(own.encode_reference(tagged(2, 1)))
    await asyncio.sleep(0)
    encoder.step()
    waiting = asyncio.ensure_future(own.encode_reference(tagged(2, 2)))
    await asyncio.sleep(0)
    begun.cancel()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert run(encoder) == 1
    assert np.array_equal(await begun, expected(tagged(2, 1)))


async def test_an_impatient_client_gets_its_voice_at_the_second_try() -> None:
    codec, encoder = adding()
    codes = ReferenceCodes(speaker(encoder.submit).encode_reference, 44100, Limits())
    clip = Clip("key", 16, tagged(2, 1))
    first = asyncio.ensure_future(codes.codes(clip))
    await until(lambda: encoder.waiting == 1)
    encoder.step()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    run(encoder)
    await turns()
    assert (await codes.codes(clip)).hit
    abandoned = asyncio.ensure_future(codes.codes(Clip("other", 8, tagged(1, 2))))
    await until(lambda: encoder.waiting == 1)
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    await turns()
    assert not encoder.step()
    assert 2.0 not in codec.blocks
