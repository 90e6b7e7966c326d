"""Pieces spoken one after another, in front of a speaker that does as it is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from duetts import narration
from duetts.errors import Aborted, DeadlineExceeded, EmptyGeneration, EngineFailure, Overloaded
from duetts.narration import READ_AHEAD_S, Narration, Piece, Script, bridge, piece_seed
from duetts.text.prompt import Turn
from duetts.types import Chunk, FinishReason, Float32, Int32, Outcome, Sampling, SpeakerInfo, Suspect, Timings, Utterance
from tests.waiting import until

FRAME, BOOKS = 16, 2
INFO = SpeakerInfo("told", 160, FRAME, BOOKS, 1000)  # 10 frames a second
TEXT = "four or five words here."  # 19 letters: at least 0.855 s, that is 9 frames
ENOUGH, LITTLE = 17, 3


@dataclass
class Told:
    """What one utterance comes to: frames in chunks of two, then an outcome."""

    frames: int = ENOUGH
    reason: FinishReason = "stop"
    error: Exception | None = None
    first_wait_s: float = 0.0
    wait_s: float = 0.0


@dataclass
class ToldSpeaker:
    """Speaks as `plan` says, by seed or else in order; codes and samples hold a number of the utterance."""

    plan: dict[int, Told] = field(default_factory=dict)
    info: SpeakerInfo = INFO
    asked: list[Utterance] = field(default_factory=list)
    cancelled: int = 0

    async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        self.asked.append(utterance)
        number = len(self.asked)
        told = self.plan.get(number - 1, Told())
        if isinstance(told.error, Overloaded):
            raise told.error
        ended = False
        try:
            await asyncio.sleep(told.first_wait_s)
            for start in range(0, told.frames, 2):
                await asyncio.sleep(told.wait_s if start else 0)
                size = min(2, told.frames - start)
                pcm = np.full(size * FRAME, 1000 * number, "<i2").tobytes()
                yield Chunk(pcm, np.full((BOOKS, size), number, np.int32))
            ended = True
            error = told.error or (EmptyGeneration("nothing") if not told.frames else None)
            yield Outcome("failed" if error else told.reason, told.frames, 5, Timings(0.1, 0.2, 0.3, 0.4), error)  # type: ignore[arg-type]
        finally:
            self.cancelled += not ended

    async def encode_reference(self, wave: Float32) -> Int32:
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass


@dataclass
class Prompts:
    """The prompt is 10 positions, one for each character and one for each frame of history; what it was asked is kept."""

    asked: list[tuple[list[Turn], str]] = field(default_factory=list)

    def __call__(self, history: Sequence[Turn], text: str) -> Int32:
        self.asked.append((list(history), text))
        size = 10 + len(text) + sum(len(turn.text) + turn.codes.shape[1] for turn in history)
        return np.zeros((1 + BOOKS, size), np.int32)


def script(count: int = 3, prompts: Prompts | None = None, **changes: Any) -> Script:
    """Pieces of equal size that differ in a letter; changes of the first utterance or of the script."""
    pieces = [Piece(TEXT + "abcdefghijklmnop"[index], 100) for index in range(count)]
    prompt = prompts or Prompts()
    own = {name: changes.pop(name) for name in ("max_frames", "checked", "conditioned", "continues") if name in changes}
    first = Utterance("r", np.zeros((1 + BOOKS, 10), np.int32), Sampling(), 1000, own.get("max_frames") or 100, **changes)
    return Script(pieces, first, prompt, 77, **own)


async def run(speaker: ToldSpeaker, what: Script) -> tuple[list[Chunk], Outcome]:
    items = [item async for item in Narration(speaker, what).speak()]
    assert isinstance(items[-1], Outcome)
    chunks = [item for item in items if isinstance(item, Chunk)]
    assert len(chunks) == len(items) - 1
    return chunks, items[-1]


def numbers(chunks: list[Chunk]) -> list[int]:
    """The utterances that the chunks are of, each once."""
    return list(dict.fromkeys(int(chunk.codes[0, 0]) for chunk in chunks))


@pytest.mark.parametrize("streaming", [False, True])
async def test_pieces_follow_one_another_with_what_was_said_before(streaming: bool) -> None:
    speaker, prompts = ToldSpeaker(), Prompts()
    what = script(prompts=prompts, streaming=streaming)
    chunks, outcome = await run(speaker, what)
    assert numbers(chunks) == [1, 2, 3]
    assert sum(chunk.num_frames for chunk in chunks) == outcome.num_frames == 3 * ENOUGH
    assert all(len(chunk.pcm) == 2 * FRAME * chunk.num_frames for chunk in chunks)
    assert (outcome.reason, outcome.error, outcome.input_tokens) == ("stop", None, 77)
    assert (outcome.pieces.total, outcome.pieces.spoken, outcome.pieces.redone, outcome.pieces.suspect) == (3, 3, (), ())
    assert [text for _, text in prompts.asked] == [piece.text for piece in what.pieces[1:]]
    for index, (history, _) in enumerate(prompts.asked):
        assert [turn.text for turn in history] == [what.pieces[index].text]
        assert np.array_equal(history[0].codes, np.full((BOOKS, ENOUGH), index + 1))
    assert [utterance.continues for utterance in speaker.asked] == [False, True, True]
    assert speaker.asked[0] is what.first
    assert len({utterance.voice_key for utterance in speaker.asked}) == 1


async def test_pieces_may_be_spoken_each_for_itself() -> None:
    speaker, prompts = ToldSpeaker(), Prompts()
    await run(speaker, script(prompts=prompts, conditioned=False))
    assert [history for history, _ in prompts.asked] == [[], []]


async def test_a_request_goes_on_from_what_another_left() -> None:
    speaker, prompts = ToldSpeaker(), Prompts()
    began = time.monotonic()
    _, first = await run(speaker, script(2, streaming=True))
    said = first.said
    assert said is not None
    assert (said.text, said.codes.tolist()) == (TEXT + "b", [[2] * ENOUGH] * BOOKS)
    assert (said.seed, said.last_sample) == (piece_seed(1000, 2), 2000)
    assert began <= said.heard_at - 2 * ENOUGH / 10 <= time.monotonic()
    chunks, second = await run(speaker, script(2, prompts, streaming=True, continues=said))
    assert [[turn.text for turn in history] for history, _ in prompts.asked] == [[TEXT + "b"], [TEXT + "a"]]
    assert [utterance.continues for utterance in speaker.asked] == [False, True, True, True]
    assert said.heard_at - time.monotonic() <= speaker.asked[2].lead_s <= 2 * ENOUGH / 10
    assert int(np.frombuffer(chunks[0].pcm, "<i2")[0]) == 2000
    assert second.timings.worst_underrun_s == 0
    assert second.said is not None
    assert second.said.heard_at > said.heard_at + 3


async def test_late_text_is_not_counted_as_late_audio() -> None:
    speaker = ToldSpeaker()
    _, first = await run(speaker, script(1, streaming=True))
    assert first.said is not None
    _, second = await run(speaker, script(1, streaming=True, continues=replace(first.said, heard_at=time.monotonic() - 60)))
    assert second.timings.worst_underrun_s < 30  # of 60
    assert speaker.asked[1].lead_s == 0


async def test_what_comes_to_nothing_leaves_what_was_said_before_it() -> None:
    _, first = await run(ToldSpeaker(), script(1))
    nothing = Told(error=EngineFailure("lost"))
    _, second = await run(ToldSpeaker({0: nothing}), script(1, continues=first.said))
    assert second.said is first.said
    _, alone = await run(ToldSpeaker({0: nothing}), script(1))
    assert alone.said is None


async def test_one_piece_is_handed_on_as_it_is() -> None:
    speaker = ToldSpeaker()
    what, began = script(1), time.monotonic()
    chunks, outcome = await run(speaker, what)
    took = time.monotonic() - began
    assert speaker.asked == [what.first]
    assert set(b"".join(chunk.pcm for chunk in chunks)) == {1000 & 255, 1000 >> 8}
    assert outcome.timings.queue_s == 0.1
    assert 0.3 <= outcome.timings.first_audio_s <= 0.3 + took


async def test_history_that_does_not_fit_is_left_out() -> None:
    prompts = Prompts()
    room = 10 + len(TEXT) + 1 + 100  # of prompt and bound without history
    for size, kept in ((room, False), (room + len(TEXT) + 1 + ENOUGH, True)):
        speaker = ToldSpeaker(info=replace(INFO, max_model_len=size))
        await run(speaker, script(2, prompts))
        assert (speaker.asked[1].prompt.shape[1] > 10 + len(TEXT) + 1) == kept
        assert speaker.asked[1].prompt.shape[1] + speaker.asked[1].max_frames <= size


def test_seeds_are_spread_and_repeatable() -> None:
    for seed in (0, 1, -(2**63), 2**63 - 1, 123456789):
        seeds = [piece_seed(seed, index) for index in range(2000)]
        assert seeds[0] == seed
        assert len({one | 1 for one in seeds}) == 2000  # second tries are others, too
        assert all(-(2**63) <= one < 2**63 for one in seeds)
    assert piece_seed(5, 3) == (5 + 3 * 0x9E3779B97F4A7C15) % 2**64 - 2**64


@pytest.mark.parametrize("streaming", [False, True])
async def test_every_piece_has_its_own_seed(streaming: bool) -> None:
    speaker = ToldSpeaker()
    await run(speaker, script(streaming=streaming))
    assert [utterance.seed for utterance in speaker.asked] == [piece_seed(1000, index) for index in range(3)]


# -- bad pieces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "kept", "suspect"),
    [
        (Told(LITTLE), Told(ENOUGH), 3, None),
        (Told(100, "length"), Told(ENOUGH), 3, None),
        (Told(LITTLE), Told(LITTLE + 2), 3, "too_short"),  # of two bad ones the better
        (Told(LITTLE), Told(LITTLE - 2), 2, "too_short"),
        (Told(LITTLE), Told(LITTLE), 2, "too_short"),
        (Told(8), Told(100, "length"), 2, "too_short"),
        (Told(1), Told(40, "length"), 3, "length"),
        (Told(LITTLE), Told(0), 2, "too_short"),  # nothing at all is worse than little
        (Told(0), Told(ENOUGH), 3, None),
        (Told(0), Told(LITTLE), 3, "too_short"),
    ],
)
async def test_a_bad_piece_of_a_complete_answer_is_tried_once_more(first: Told, second: Told, kept: int, suspect: str) -> None:
    speaker = ToldSpeaker({1: first, 2: second})
    chunks, outcome = await run(speaker, script())
    assert numbers(chunks) == [1, kept, 4]
    assert outcome.pieces.redone == (1,)
    assert outcome.pieces.suspect == ((Suspect(1, suspect),) if suspect else ())  # type: ignore[arg-type]
    assert outcome.num_frames == 2 * ENOUGH + (first if kept == 2 else second).frames
    assert outcome.reason == ("length" if suspect == "length" else "stop")
    again = speaker.asked[2]
    assert again.seed == speaker.asked[1].seed ^ 1
    assert again.continues
    assert np.array_equal(again.prompt, speaker.asked[1].prompt)


async def test_the_first_piece_and_a_single_one_are_tried_again_too() -> None:
    for count in (1, 2):
        speaker = ToldSpeaker({0: Told(LITTLE)})
        chunks, outcome = await run(speaker, script(count))
        assert numbers(chunks) == [2, 3][:count]
        assert outcome.pieces.redone == (0,)
        assert [utterance.continues for utterance in speaker.asked] == [False, True, True][: count + 1]


async def test_what_has_been_sent_is_reported_not_redone() -> None:
    speaker = ToldSpeaker({0: Told(LITTLE), 2: Told(100, "length")})
    chunks, outcome = await run(speaker, script(4, streaming=True))
    assert numbers(chunks) == [1, 2, 3, 4]
    assert outcome.pieces.redone == ()
    assert outcome.pieces.suspect == (Suspect(0, "too_short"), Suspect(2, "length"))
    assert outcome.reason == "length"


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
async def test_nothing_at_all_is_always_tried_again(streaming: bool, checked: bool) -> None:
    speaker = ToldSpeaker({1: Told(0)})
    chunks, outcome = await run(speaker, script(streaming=streaming, checked=checked))
    assert numbers(chunks) == [1, 3, 4]
    assert outcome.pieces.redone == (1,)
    assert speaker.asked[2].seed == speaker.asked[1].seed ^ 1
    twice = ToldSpeaker({1: Told(0), 2: Told(0)})
    chunks, outcome = await run(twice, script(streaming=streaming, checked=checked))
    assert numbers(chunks) == [1]
    assert isinstance(outcome.error, EmptyGeneration)
    assert (outcome.reason, outcome.pieces.spoken, outcome.pieces.total) == ("failed", 1, 3)
    assert len(twice.asked) == 3


@pytest.mark.parametrize("streaming", [False, True])
async def test_without_checks_nothing_is_called_bad(streaming: bool) -> None:
    speaker = ToldSpeaker({0: Told(LITTLE), 1: Told(100, "length")})
    chunks, outcome = await run(speaker, script(checked=False, streaming=streaming))
    assert numbers(chunks) == [1, 2, 3]
    assert (outcome.pieces.redone, outcome.pieces.suspect, outcome.reason) == ((), (), "length")


async def test_a_bad_piece_is_no_example_for_the_next() -> None:
    prompts = Prompts()
    speaker = ToldSpeaker({1: Told(LITTLE), 2: Told(100, "length")})
    what = script(4, prompts, streaming=True)
    await run(speaker, what)
    assert [[turn.text for turn in history] for history, _ in prompts.asked] == [[what.pieces[0].text]] * 3
    prompts = Prompts()
    await run(ToldSpeaker({0: Told(LITTLE)}), script(2, prompts, streaming=True))
    assert prompts.asked[0][0] == []


async def test_streamed_and_complete_have_the_same_samples() -> None:
    whole, _ = await run(ToldSpeaker(), script(5))
    streamed, _ = await run(ToldSpeaker(), script(5, streaming=True))
    assert b"".join(chunk.pcm for chunk in whole) == b"".join(chunk.pcm for chunk in streamed)


# -- bounds and ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_requests_own_frames_are_for_all_pieces(streaming: bool) -> None:
    speaker = ToldSpeaker({2: Told(6, "length")})
    chunks, outcome = await run(speaker, script(5, max_frames=40, checked=False, streaming=streaming))
    assert [utterance.max_frames for utterance in speaker.asked] == [40, 40 - ENOUGH, 40 - 2 * ENOUGH]
    assert sum(chunk.num_frames for chunk in chunks) == outcome.num_frames == 40
    assert (outcome.reason, outcome.pieces.spoken, outcome.pieces.total, outcome.error) == ("length", 3, 5, None)


async def test_frames_that_just_suffice() -> None:
    _, outcome = await run(ToldSpeaker(), script(2, max_frames=2 * ENOUGH, checked=False))
    assert (outcome.reason, outcome.pieces.spoken) == ("stop", 2)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_piece_that_fails_ends_the_request(streaming: bool) -> None:
    failure = EngineFailure("a step failed")
    speaker = ToldSpeaker({1: Told(6, error=failure)})
    chunks, outcome = await run(speaker, script(streaming=streaming))
    assert (outcome.reason, outcome.error, outcome.pieces.spoken) == ("failed", failure, 1)
    assert len(speaker.asked) == 2
    assert numbers(chunks) == ([1, 2] if streaming else [1])


async def test_a_second_try_that_fails_ends_the_request() -> None:
    failure = EngineFailure("a step failed")
    _, outcome = await run(ToldSpeaker({0: Told(LITTLE), 1: Told(6, error=failure)}), script())
    assert outcome.error is failure


@pytest.mark.parametrize("number", [0, 1])
async def test_a_refusal_is_raised(number: int) -> None:
    refusal = Overloaded("full", retry_after_s=3)
    with pytest.raises(Overloaded) as raised:
        await run(ToldSpeaker({number: Told(error=refusal)}), script())
    assert raised.value is refusal


async def test_a_speaker_that_just_stops_is_a_failure() -> None:
    class Stopping(ToldSpeaker):
        async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
            async with aclosing(super().speak(utterance)) as items:
                async for item in items:
                    if isinstance(item, Chunk):
                        yield item

    with pytest.raises(EngineFailure, match="without an outcome"):
        await run(Stopping(), script())


async def test_a_fault_of_ours_is_raised_not_waited_for() -> None:
    def broken(history: Sequence[Turn], text: str) -> Int32:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run(ToldSpeaker(), replace(script(), prompt=broken))


# -- time ------------------------------------------------------------------------------------------------------------------


async def test_a_later_piece_has_the_time_that_is_left() -> None:
    speaker = ToldSpeaker({0: Told(first_wait_s=0.1)})
    await run(speaker, script(timeout_s=50.0))
    assert speaker.asked[0].timeout_s == 50.0
    assert speaker.asked[1].timeout_s is not None
    assert 40 < speaker.asked[1].timeout_s <= 49.9
    _, outcome = await run(ToldSpeaker({0: Told(first_wait_s=0.1)}), script(timeout_s=0.05))
    assert (outcome.reason, outcome.pieces.spoken) == ("timeout", 1)
    assert isinstance(outcome.error, DeadlineExceeded)
    assert "0.05 s" in str(outcome.error)


async def test_a_deadline_met_by_the_engine_names_the_requests_own_limit() -> None:
    late = Told(2, error=DeadlineExceeded("what was left of it"))

    class Late(ToldSpeaker):
        async def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
            async for item in super().speak(utterance):
                yield replace(item, reason="timeout") if isinstance(item, Outcome) and item.error else item

    _, outcome = await run(Late({1: late}), script(timeout_s=60.0))
    assert (outcome.reason, str(outcome.error)) == ("timeout", "the request's limit of 60.0 s has passed")


async def test_a_slow_listeners_time_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    later_s = 0.0
    monkeypatch.setattr(narration, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later_s))
    long = Told(int(10 * READ_AHEAD_S) + 6)
    speaker = ToldSpeaker({0: long})
    speech = Narration(speaker, script(2, streaming=True, timeout_s=500.0, checked=False))
    items = speech.speak()
    await anext(items)
    await until(lambda: speech._unread * FRAME / 160 > READ_AHEAD_S)
    await asyncio.sleep(0.05)  # it waits for its listener
    assert len(speaker.asked) == 1
    later_s = 1000.0
    rest = [item async for item in items]
    assert isinstance(rest[-1], Outcome)
    assert rest[-1].reason == "stop"
    assert rest[-1].timings.total_s < 500


async def test_timings_are_those_of_the_first_piece_and_of_all() -> None:
    began = time.monotonic()
    _, outcome = await run(ToldSpeaker({2: Told(first_wait_s=0.15)}), script(streaming=True))
    timings = outcome.timings
    assert timings.queue_s == 0.1
    took = time.monotonic() - began
    assert 0.2 <= timings.prefill_s <= 0.2 + took
    assert 0.3 <= timings.first_audio_s <= 0.3 + took
    assert timings.total_s >= 0.15
    assert timings.worst_underrun_s == 0.0  # 3.4 s were in hand when the third piece took 0.15 s
    _, retried = await run(ToldSpeaker({0: Told(LITTLE, first_wait_s=0.15)}), script())
    assert retried.timings.queue_s == 0.1
    assert retried.timings.first_audio_s >= 0.15 + 0.3


async def test_a_gap_between_pieces_is_an_underrun() -> None:
    speaker = ToldSpeaker({0: Told(1), 1: Told(first_wait_s=0.4)})
    began = time.monotonic()
    _, outcome = await run(speaker, script(2, streaming=True, checked=False))
    assert 0.2 < outcome.timings.worst_underrun_s <= time.monotonic() - began


async def test_the_engine_is_told_of_the_lead() -> None:
    speaker, began = ToldSpeaker(), time.monotonic()
    await run(speaker, script(streaming=True))
    took = time.monotonic() - began
    for utterance, most in zip(speaker.asked, (0.0, 1.7, 3.4), strict=True):
        assert max(0.0, most - took) <= utterance.lead_s <= most
    quiet = ToldSpeaker()
    await run(quiet, script())
    assert [utterance.lead_s for utterance in quiet.asked] == [0.0, 0.0, 0.0]


async def test_the_next_piece_does_not_wait_for_the_reader_but_for_a_very_slow_one() -> None:
    count = 12
    speaker = ToldSpeaker()
    items = Narration(speaker, script(count, streaming=True)).speak()
    await anext(items)
    ahead = int(READ_AHEAD_S / (ENOUGH / 10)) + 2  # pieces until more than the bound is unread
    await until(lambda: len(speaker.asked) >= ahead)
    await asyncio.sleep(0.05)
    assert len(speaker.asked) == ahead < count
    rest = [item async for item in items]
    assert len(speaker.asked) == count
    assert isinstance(rest[-1], Outcome)
    assert rest[-1].pieces.spoken == count


@pytest.mark.parametrize("taken", [0, 1, 12])
async def test_leaving_ends_the_piece_that_runs(taken: int) -> None:
    speaker = ToldSpeaker({0: Told(wait_s=0.005), 1: Told(100, wait_s=0.01)})
    items = Narration(speaker, script(streaming=True)).speak()
    for _ in range(taken):
        await anext(items)
    await items.aclose()
    await items.aclose()
    await until(lambda: speaker.cancelled == (taken > 0))
    assert len(speaker.asked) == (taken > 0) + (taken > 10)


async def test_a_reader_that_is_cancelled_may_close_at_once() -> None:
    speaker = ToldSpeaker({0: Told(first_wait_s=30)})
    items = Narration(speaker, script()).speak()
    reader = asyncio.ensure_future(anext(items))
    await until(lambda: speaker.asked)
    reader.cancel()
    await asyncio.sleep(0)
    await items.aclose()
    await until(lambda: speaker.cancelled == 1)
    assert reader.cancelled()


async def test_an_engine_that_closes_is_told() -> None:
    _, outcome = await run(ToldSpeaker({1: Told(4, error=Aborted("closing"))}), script())
    assert isinstance(outcome.error, Aborted)


# -- joins -----------------------------------------------------------------------------------------------------------------


def test_a_bridge_takes_the_step_back() -> None:
    wave = (8000 * np.sin(np.arange(2000) / 7)).astype("<i2")
    for before in (-20000, -3, 0, 500, 32767):
        bridged = np.frombuffer(bridge(wave.tobytes(), before, 220), "<i2").astype(int)
        assert len(bridged) == len(wave)
        assert bridged[0] == before
        assert np.array_equal(bridged[220:], wave[220:])
        own = np.abs(np.diff(wave.astype(int))).max()
        slope = abs(before - int(wave[0])) * np.pi / 2 / 220
        assert np.abs(np.diff(bridged)).max() <= own + slope + 2


def test_a_bridge_between_equal_values_changes_nothing() -> None:
    wave = np.array([5, 900, -7, 32767, -32768, 3] * 50, "<i2")
    assert bridge(wave.tobytes(), 5, 220) == wave.tobytes()


def test_a_bridge_does_not_wrap_around() -> None:
    wave = np.full(300, -32768, "<i2")
    wave[3:20] = 32767
    bridged = np.frombuffer(bridge(wave.tobytes(), 32767, 220), "<i2").astype(int)
    assert bridged[3:20].min() == 32767


@pytest.mark.parametrize("streaming", [False, True])
async def test_pieces_are_joined_without_a_step(streaming: bool) -> None:
    """The pieces of this speaker are constants that differ by 1,000."""
    speaker = ToldSpeaker(info=replace(INFO, sample_rate=16000))
    chunks, _ = await run(speaker, script(streaming=streaming, checked=False))
    wave = np.frombuffer(b"".join(chunk.pcm for chunk in chunks), "<i2").astype(int)
    assert len(wave) == 3 * ENOUGH * FRAME
    assert (wave[0], wave[-1]) == (1000, 3000)
    assert np.abs(np.diff(wave)).max() < 60
