"""The first engine on the tiny model: same bytes in any company, bounds, cancellation, deadlines and failures."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetts.checkpoint import load_model, read_configs
from duetts.config import EngineConfig
from duetts.engine.inprocess import InProcessSpeaker, build_engine, describe
from duetts.engine.memory import choose_device, fit_memory, plan_memory
from duetts.engine.pages import Block
from duetts.engine.parts import UNSOUND, Decoding, Drawn
from duetts.engine.sequence import Sequence
from duetts.errors import Aborted, ConfigError, DeadlineExceeded, EngineFailure, NotEnoughMemory, NotReady, Overloaded
from duetts.json_fields import read_json
from duetts.model_config import ModelConfig
from duetts.models.blocks import Projection
from duetts.text.prompt import build_prompt
from duetts.text.tokenizer import Tokenizer
from duetts.types import Chunk, Int32, Outcome, Sampling, Utterance
from tests.waiting import LIMIT_S, holding, until

CPU = torch.device("cpu")
TEXTS = ["Hi.", "One two three.", "Hello, how are you?", "A longer sentence, with a comma and 42 in it. " * 4]


@pytest.fixture(scope="module")
def prompts(tiny_folder: Path) -> list[Int32]:
    tokenizer = Tokenizer.load(tiny_folder, ModelConfig.from_dict(read_json(tiny_folder / "config.json")))
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 32, (4, 11)).astype(np.int32)
    plain = [build_prompt(tokenizer, [], [], text) for text in TEXTS]
    return [*plain, build_prompt(tokenizer, [(codes, "A reference.")], [], TEXTS[0])]


@asynccontextmanager
async def speaker(folder: Path, length: int = 1024, **options: Any) -> AsyncIterator[InProcessSpeaker]:
    config = EngineConfig(device="cpu", **{"max_num_seqs": 6, "max_queue": 64, "cpu_threads": 1, **options})
    model = load_model(folder, device=CPU, dtype=torch.float32, codec_dtype=torch.float32)
    own = InProcessSpeaker(build_engine(model, config, length), describe(model, length, CPU, torch.float32, False))
    try:
        yield own
    finally:
        await own.close()


def utterances(prompts: list[Int32], count: int) -> Iterator[Utterance]:
    """Different texts, seeds, lengths and ways of sampling."""
    for index in range(count):
        sampling = Sampling(
            temperature=(0.0, 0.7, 1.2)[index % 3], top_k=(30, 0, 5, 200)[index % 4], top_p=(0.9, 1.0, 0.5)[index % 3],
            repetition_penalty=(1.0, 1.3)[index % 2],
        )  # fmt: skip
        yield Utterance(f"r{index}", prompts[index % len(prompts)], sampling, 1000 + index, 8 + 5 * (index % 7))


async def collect(own: InProcessSpeaker, utterance: Utterance) -> tuple[bytes, Outcome]:
    pcm = b""
    async for item in own.speak(utterance):
        if isinstance(item, Outcome):
            return pcm, item
        pcm += item.pcm
    raise AssertionError("the stream had no outcome")


async def settled(own: InProcessSpeaker) -> None:
    """The engine is idle, with nothing held."""
    await until(lambda: own.stats()["open"] == 0 and own._engine._codec.idle)
    own._engine.assert_idle()


async def test_same_bytes_alone_and_in_any_company(tiny_folder: Path, prompts: list[Int32]) -> None:
    work = list(utterances(prompts, 24))
    async with speaker(tiny_folder) as own:
        alone = [await collect(own, utterance) for utterance in work]
        for order in (work, work[::-1]):
            together = await asyncio.gather(*(collect(own, utterance) for utterance in order))
            found = dict(zip([utterance.request_id for utterance in order], together, strict=True))
            for utterance, (pcm, outcome) in zip(work, alone, strict=True):
                assert found[utterance.request_id][0] == pcm, utterance.request_id
                assert found[utterance.request_id][1].reason == outcome.reason
        await settled(own)
    assert {outcome.reason for _, outcome in alone} == {"stop", "length"}
    drawn = [pcm for utterance, (pcm, _) in zip(work, alone, strict=True) if utterance.sampling.temperature]
    assert len(set(drawn)) == len(drawn)
    for pcm, outcome in alone:
        assert len(pcm) == 2 * 2048 * outcome.num_frames


async def test_same_bytes_whatever_the_number_of_slots(tiny_folder: Path, prompts: list[Int32]) -> None:
    work = list(utterances(prompts, 6))
    async with speaker(tiny_folder, max_num_seqs=6) as own:
        many = await asyncio.gather(*(collect(own, utterance) for utterance in work))
    async with speaker(tiny_folder, max_num_seqs=1) as own:
        few = await asyncio.gather(*(collect(own, utterance) for utterance in work))
    assert [pcm for pcm, _ in many] == [pcm for pcm, _ in few]


async def test_streamed_chunks_are_whole_frames_and_come_early(tiny_folder: Path, prompts: list[Int32]) -> None:
    utterance = Utterance("r", prompts[0], Sampling(), 5, 40)
    async with speaker(tiny_folder) as own:
        _, outcome = await collect(own, utterance)
        sizes = []
        async for item in own.speak(utterance):
            if isinstance(item, Chunk):
                assert len(item.pcm) == 4096 * item.num_frames
                sizes.append(item.num_frames)
    assert sum(sizes) == outcome.num_frames
    assert max(sizes) <= EngineConfig().codec_quantum
    assert 0 < outcome.timings.prefill_s <= outcome.timings.first_audio_s <= outcome.timings.total_s


async def test_closing_a_stream_frees_its_slot(endless_folder: Path, prompts: list[Int32]) -> None:
    forever = Utterance("long", prompts[0], Sampling(), 1, 900)
    async with speaker(endless_folder, max_num_seqs=1) as own:
        stream = own.speak(forever)
        assert isinstance(await anext(stream), Chunk)
        waiting = asyncio.ensure_future(collect(own, Utterance("next", prompts[1], Sampling(), 2, 3)))
        await until(lambda: own.stats()["waiting"] == 1)
        assert not waiting.done()
        await stream.aclose()
        _, outcome = await asyncio.wait_for(waiting, LIMIT_S)
        assert outcome.reason in ("stop", "length")
        assert own.stats()["finished"]["aborted"] == 1
        await settled(own)


async def test_a_full_line_refuses_at_once(endless_folder: Path, prompts: list[Int32]) -> None:
    async with speaker(endless_folder, max_num_seqs=1, max_queue=2) as own:
        long = [Utterance(str(i), prompts[0], Sampling(), i, 60) for i in range(3)]
        with holding(own._engine._device, "launch"):
            running = [asyncio.ensure_future(collect(own, utterance)) for utterance in long]
            await asyncio.sleep(0)  # they are in line
            with pytest.raises(Overloaded) as refusal:
                await collect(own, Utterance("one more", prompts[1], Sampling(), 0, 3))
        assert refusal.value.retry_after_s >= 1
        assert all(outcome.reason in ("stop", "length") for _, outcome in await asyncio.gather(*running))
        await settled(own)


async def test_a_listener_who_would_wait_too_long_is_refused_at_once(endless_folder: Path, prompts: list[Int32]) -> None:
    async with speaker(endless_folder, max_num_seqs=1, max_line_s=0.0) as own:
        first = Utterance("first", prompts[0], Sampling(), 1, 5, streaming=True)
        await collect(own, first)  # how long a listener stays is known now
        listeners = [replace(first, request_id=str(index), max_frames=60) for index in range(2)]
        with holding(own._engine._device, "launch"):
            running = [asyncio.ensure_future(collect(own, listener)) for listener in listeners]
            await until(lambda: own.stats()["waiting"] == 1)
            with pytest.raises(Overloaded, match=r"a listener would wait for .* s, 0 s are allowed") as refusal:
                await collect(own, replace(first, request_id="one more"))
        assert refusal.value.retry_after_s >= 1
        running.append(asyncio.ensure_future(collect(own, replace(first, request_id="complete", streaming=False))))
        assert all(outcome.reason in ("stop", "length") for _, outcome in await asyncio.gather(*running))
        await settled(own)


async def test_a_deadline_ends_a_request_with_its_reason(endless_folder: Path, prompts: list[Int32]) -> None:
    async with speaker(endless_folder) as own:
        late = Utterance("late", prompts[0], Sampling(), 1, 900, timeout_s=0.15)
        _, outcome = await collect(own, late)
        assert outcome.reason == "timeout"
        assert isinstance(outcome.error, DeadlineExceeded)
        await settled(own)


@pytest.mark.parametrize("part", ["step", "landing", "prompt", "codec"])
async def test_what_fails_inside_the_model_fails_alone(
    endless_folder: Path, prompts: list[Int32], part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Four rows are computed together; the error strikes the call that one of them is in."""
    async with speaker(endless_folder) as own:
        healthy = [Utterance(f"healthy {i}", prompts[i], Sampling(), 3 + i, 24) for i in range(3)]
        expected = [await collect(own, utterance) for utterance in healthy]
        doomed = Utterance("doomed", prompts[0], Sampling(), 40, 30)
        strike(own, part, monkeypatch)
        (_, bad), *found = await asyncio.gather(*(collect(own, one) for one in [doomed, *healthy]))
        assert bad.reason == "failed"
        assert isinstance(bad.error, EngineFailure)
        assert [pcm for pcm, _ in found] == [pcm for pcm, _ in expected]
        await settled(own)
    assert "doomed" in caplog.text


def strike(own: InProcessSpeaker, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one kind of device work fail for the sequence "doomed"."""
    engine = own._engine
    device, vocoder = engine._device, engine._codec._vocoder
    launch, read, start = device.launch, device.read, vocoder.start

    def is_doomed(sequence: Sequence) -> bool:
        return sequence.utterance.request_id == "doomed"

    def failing_launch(rows: list[Sequence]) -> Any:
        if any(is_doomed(sequence) and sequence.launched == 4 for sequence in rows):
            raise RuntimeError("device lost its mind")
        return launch(rows)

    def unsound_launch(rows: list[Sequence]) -> Any:
        columns = launch(rows)().copy()
        for sequence, column in zip(rows, columns, strict=True):
            if is_doomed(sequence) and sequence.launched == 4:
                column[0] = UNSOUND
        return Drawn(columns)

    def failing_read(sequence: Sequence, block: Block) -> None:
        if is_doomed(sequence):
            raise RuntimeError("device lost its mind")
        read(sequence, block)

    def failing_start(slots: list[int], codes: Int32, *, keep: bool) -> Decoding:
        streams = engine._codec._streams.values()
        if any(is_doomed(stream.sequence) and stream.slot in slots and stream.last for stream in streams):
            raise RuntimeError("device lost its mind")
        return start(slots, codes, keep=keep)

    if part == "codec":
        monkeypatch.setattr(vocoder, "start", failing_start)
    else:
        name, work = {
            "step": ("launch", failing_launch),
            "landing": ("launch", unsound_launch),
            "prompt": ("read", failing_read),
        }[part]
        monkeypatch.setattr(device, name, work)


async def test_closing_the_engine_ends_what_runs_and_takes_nothing_new(endless_folder: Path, prompts: list[Int32]) -> None:
    async with speaker(endless_folder) as own:
        running = asyncio.ensure_future(collect(own, Utterance("r", prompts[0], Sampling(), 1, 900)))
        await until(lambda: own.stats()["frames"])
        await own.close()
        _, outcome = await asyncio.wait_for(running, LIMIT_S)
        assert isinstance(outcome.error, Aborted)
        with pytest.raises(NotReady):
            await collect(own, Utterance("r", prompts[0], Sampling(), 1, 3))


async def test_encoding_does_not_depend_on_what_else_runs(tiny_folder: Path, prompts: list[Int32]) -> None:
    wave = np.random.default_rng(1).normal(0, 0.1, 50000).astype(np.float32)
    async with speaker(tiny_folder) as own:
        alone = await own.encode_reference(wave)
        busy = asyncio.gather(*(collect(own, utterance) for utterance in utterances(prompts, 6)))
        beside = await own.encode_reference(wave)
        await busy
    assert alone.shape == (4, 25)
    assert np.array_equal(alone, beside)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = read_configs(tiny_folder)
    longest = models[0].slow.max_positions
    config = EngineConfig(dtype="float32", max_num_seqs=6, max_model_len=longest, gpu_memory_utilization=0.5)
    asked = replace(config, kv_positions=6 * longest)
    plan = plan_memory(*models, asked, CPU)
    loaded = load_model(tiny_folder, device=CPU, dtype=torch.float32, codec_dtype=torch.float32)
    assert plan.weights == sum(p.nbytes for p in loaded.dual_ar.parameters())
    assert plan.codec == sum(p.nbytes for p in loaded.codec.parameters())
    assert plan.position_bytes == 2 * 2 * 2 * 16 * 4  # keys and values, layers, key-value heads, head size, bytes
    assert plan.positions == 6 * longest
    assert fit_memory(plan, models[0], config, CPU) == plan
    cuda = torch.device("cuda")

    def free(share: int, spare: int = 10**12) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (spare, 2 * share))

    free(plan.total)
    assert fit_memory(plan, models[0], asked, cuda) == plan
    free(plan.total - 1)
    assert fit_memory(plan, models[0], config, cuda).positions == 6 * longest - 16
    with pytest.raises(NotEnoughMemory):
        fit_memory(plan, models[0], asked, cuda)
    least = plan.total - 5 * longest * plan.position_bytes
    free(least)
    assert fit_memory(plan, models[0], config, cuda).positions == longest
    for share, spare in ((least - 1, 10**12), (10**12, least - 1)):
        free(share, spare)
        with pytest.raises(NotEnoughMemory, match=r"GB needed: weights .* are free on cuda, 0.5 of .* may be used"):
            fit_memory(plan, models[0], config, cuda)


def test_eight_bits_are_planned_as_they_are_loaded(tiny_folder: Path) -> None:
    plan = plan_memory(*read_configs(tiny_folder), EngineConfig(dtype="float32", quantization="int8"), CPU)
    loaded = load_model(tiny_folder, device=CPU, dtype=torch.float32, codec_dtype=torch.float32, quantization="int8").dual_ar
    scales = sum(m.scale.nbytes for m in loaded.modules() if isinstance(m, Projection) and m.scale is not None)
    assert plan.weights == sum(p.nbytes for p in loaded.parameters()) + scales


def test_devices_are_named_or_refused() -> None:
    assert choose_device("cpu") == CPU
    for name in ("tpu", "cuda:99", "mps"):
        with pytest.raises(ConfigError, match=name):
            choose_device(name)


# -- codes that are known ------------------------------------------------------------------------------------------------


def known(codes: Int32, **changes: Any) -> Utterance:
    """An utterance whose frames are given."""
    prompt = np.concatenate((np.zeros((1, codes.shape[1]), np.int32), codes))
    return Utterance("known", prompt, Sampling(), 0, 1, decode_only=True, **changes)


async def test_known_codes_give_the_sound_that_they_were_spoken_with(tiny_folder: Path, prompts: list[Int32]) -> None:
    """Alone, and while others speak; nothing is drawn for them."""
    work = list(utterances(prompts, 8))
    async with speaker(tiny_folder) as own:
        spoken = [[item async for item in own.speak(utterance)] for utterance in work]
        chunks = [[item for item in items if isinstance(item, Chunk)] for items in spoken]
        codes = [np.concatenate([chunk.codes for chunk in each], axis=1) for each in chunks if each]
        pcm = [b"".join(chunk.pcm for chunk in each) for each in chunks if each]
        await settled(own)  # no step is under way, which would be counted later
        steps = own.stats()["steps"]
        alone = [await collect(own, known(each)) for each in codes]
        assert own.stats()["steps"] == steps
        assert [sound for sound, _ in alone] == pcm
        assert [(outcome.reason, outcome.num_frames) for _, outcome in alone] == [("stop", each.shape[1]) for each in codes]
        busy = [asyncio.create_task(collect(own, utterance)) for utterance in work]
        together = await asyncio.gather(*(collect(own, known(each, streaming=True)) for each in codes))
        assert [sound for sound, _ in together] == pcm
        await asyncio.gather(*busy)
        await settled(own)


async def test_decoding_ends_when_nobody_waits(tiny_folder: Path) -> None:
    codes = np.random.default_rng(1).integers(0, 32, (4, 900)).astype(np.int32)
    async with speaker(tiny_folder, max_num_seqs=1, max_queue=1) as own:
        items = own.speak(known(codes, streaming=True))
        assert isinstance(await anext(items), Chunk)
        await items.aclose()
        await settled(own)
        assert own.stats()["finished"] == {"aborted": 1}
        _, outcome = await collect(own, known(codes, timeout_s=0.05))
        assert isinstance(outcome.error, DeadlineExceeded)
        await settled(own)
        with holding(own._engine._codec._vocoder, "start"):
            waiting = [asyncio.create_task(collect(own, known(codes[:, :20]))) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await collect(own, known(codes))
        assert [outcome.num_frames for _, outcome in await asyncio.gather(*waiting)] == [20, 20]
        await settled(own)
