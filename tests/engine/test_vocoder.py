"""The codec behind the engine: streams in slots, of which one may be lost without the others."""

from typing import cast

import numpy as np
import pytest
import torch

from duetts.checkpoint import randomise_codec
from duetts.engine.codec_worker import CodecWorker
from duetts.engine.pace import Pace
from duetts.engine.playout import ChunkPolicy, Playout
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.engine.vocoder import GPU_DTYPE, CodecVocoder, GraphedVocoder, count_graphed_bytes, to_pcm
from duetts.model_config import CodecConfig
from duetts.models.codec import Codec
from duetts.models.stream_decoder import StreamDecoder
from duetts.types import Chunk, Int32, Sampling, Utterance

from ..dimensions import CODEC


@pytest.fixture(scope="module")
def codec() -> Codec:
    codec = Codec(CodecConfig.from_dict(CODEC)).eval().requires_grad_(False)
    randomise_codec(codec, torch.Generator().manual_seed(1))
    return codec


def graphed(codec: Codec, slots: int) -> GraphedVocoder:
    """On a CPU: the same calls, each done at once."""
    return GraphedVocoder(StreamDecoder(codec, torch.float32), slots=slots, streams=(1, 2, 4), frames=(1, 2, 4), most=8)


def random_codes(streams: int, frames: int, seed: int = 0) -> Int32:
    return np.random.default_rng(seed).integers(0, 32, (streams, 4, frames)).astype(np.int32)


def test_a_stream_with_numbers_that_are_not_finite_is_lost_alone_and_its_slot_serves_again(codec: Codec) -> None:
    own = CodecVocoder(codec, slots=3, quantum=None)
    codes = random_codes(2, 3)
    for slot in (0, 2):
        own.reset(slot)
    expected = own.start([2, 0], codes, keep=False).result()
    assert all(pcm is not None and len(pcm) == 3 * 2048 * 2 for pcm in expected)
    for tail in own._state.tails:
        tail[0] = torch.nan
    found = own.start([2, 0], codes, keep=True).result()
    assert found[0] == expected[0]
    assert found[1] is None
    own.reset(0)
    own.reset(2)
    assert own.start([2, 0], codes, keep=True).result() == expected


def test_recorded_calls_of_any_size_make_the_same_sound(codec: Codec) -> None:
    """Seven streams in recordings of at most four and of at most four frames, each at its own place in its codes."""
    own, plain = graphed(codec, 7), CodecVocoder(codec, slots=7, quantum=None)
    own.prepare(0.0)
    rng = np.random.default_rng(1)
    for slot in range(7):
        own.reset(slot)
        plain.reset(slot)
    for turn, frames in enumerate((3, 1, 7)):
        slots = rng.permutation(7)[: 7 - 2 * turn].tolist()
        if turn == 2:  # a slot that has a new stream, among others that go on
            own.reset(slots[1])
            plain.reset(slots[1])
        codes = random_codes(len(slots), frames, seed=turn)
        call = own.start(slots, codes, keep=True)
        assert call.ready()
        expected = plain.start(slots, codes, keep=True).result()
        for found, sound in zip(call.result(), expected, strict=True):
            assert found is not None
            assert sound is not None
            difference = np.frombuffer(found, "<i2").astype(int) - np.frombuffer(sound, "<i2")
            assert len(difference) == frames * 2048
            assert np.abs(difference).max() <= 3  # 1e-4 of full scale
    assert call.seconds is None


def test_a_recorded_call_loses_only_the_streams_that_are_not_finite(codec: Codec) -> None:
    own, codes = graphed(codec, 3), random_codes(3, 3)
    expected = own.start([0, 1, 2], codes, keep=True).result()
    own._state.tails[1] = torch.nan
    found = own.start([0, 1, 2], codes, keep=True).result()
    assert [pcm is None for pcm in found] == [False, True, False]
    for slot in range(3):
        own.reset(slot)
    assert own.start([0, 1, 2], codes, keep=True).result() == expected


def test_memory_of_a_graphed_vocoder_is_counted(codec: Codec) -> None:
    few, many = graphed(codec, 1), graphed(codec, 11)
    decoder = sum(parameter.numel() for parameter in codec.decoder.parameters()) * 4
    assert few.nbytes > decoder
    state = many._state
    per_slot = sum(each.nbytes for each in (state.tails, state.keys, state.values, state.position)) // 12
    # One slot's largest call is one stream of four frames, eleven slots' eight frames in all.
    assert many.nbytes - few.nbytes == 10 * per_slot + (8 - 4) * few._decoder.bytes_per_frame


def test_memory_can_be_told_before_anything_is_loaded(codec: Codec) -> None:
    made = GraphedVocoder(StreamDecoder(codec, GPU_DTYPE), slots=5)
    assert count_graphed_bytes(codec.config, slots=5) == made.nbytes


def test_full_scale_is_clipped() -> None:
    wave = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0])
    assert np.frombuffer(to_pcm(wave), "<i2").tolist() == [-32768, -32768, 0, 16384, 32767, 32767]


class Ear:
    def __init__(self) -> None:
        self.pcm = bytearray()

    def put(self, item: Chunk) -> None:
        self.pcm += item.pcm

    def wake(self) -> None:
        pass


def test_a_worker_with_recorded_calls_speaks_what_the_codec_decodes(codec: Codec) -> None:
    """Five sequences of other lengths for four slots, listeners and complete answers, frames that come in bursts."""
    clock = iter(range(10**6))
    worker = CodecWorker(graphed(codec, 4), ChunkPolicy(1, 7), Pace(), lambda sequence: None, lambda: next(clock) / 100)
    ears, sequences, codes = [], [], [random_codes(1, frames, seed=frames)[0] for frames in (3, 9, 14, 6, 11)]
    for number, own in enumerate(codes):
        ears.append(Ear())
        utterance = Utterance(str(number), np.zeros((5, 4), np.int32), Sampling(), 0, 20, streaming=number % 2 == 0)
        sequences.append(Sequence(utterance, cast(Channel, ears[-1]), Playout(0.05)))
        assert own.shape[0] == 4
    rng, sent = np.random.default_rng(5), [0] * len(codes)
    while not worker.idle or any(sequence.finished is None for sequence in sequences):
        for index, sequence in enumerate(sequences):
            until = min(codes[index].shape[1], sent[index] + int(rng.integers(0, 4)))
            worker.push((sequence, codes[index][:, frame]) for frame in range(sent[index], until))
            sent[index] = until
            if until == codes[index].shape[1] and sequence.finished is None:
                sequence.finished = "stop"
                worker.end(sequence)
        worker.step()
    for ear, own in zip(ears, codes, strict=True):
        expected = np.frombuffer(to_pcm(codec.decode(torch.from_numpy(own).long()[None])[0]), "<i2").astype(int)
        assert np.abs(np.frombuffer(bytes(ear.pcm), "<i2") - expected).max() <= 3
