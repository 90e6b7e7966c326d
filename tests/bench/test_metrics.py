"""Figures of made-up answers, compared with values computed by hand. A frame of these is a tenth of a second."""

from __future__ import annotations

import math

import pytest

from duetts.bench.metrics import (
    Pcm,
    Player,
    Record,
    Run,
    decode_rtf,
    figure,
    figures,
    gaps,
    is_good,
    keeps_up,
    mean,
    percentile,
    rates,
    rtf,
    ttfa,
    ttfp,
    waits,
    worst_wait,
)

PCM = Pcm(rate=1000, frame_length=100)  # 200 bytes a frame, 2000 a second


def record(arrivals: list[tuple[float, int]], *, start: float = 0.0, client: int = 0, error: str = "") -> Record:
    """`arrivals`: times and frames of chunks."""
    chunks = [(time, 200 * frames) for time, frames in arrivals]
    return Record(
        0, client, sum(frames for _, frames in arrivals), start=start, due=start, first_byte=arrivals[0][0] - 0.01,
        first_audio=arrivals[0][0], end=arrivals[-1][0] + 0.05, audio_bytes=sum(size for _, size in chunks), status=200,
        error=error, reads=chunks, chunks=chunks,
    )  # fmt: skip


# First audio after 0.2 s; 0.2 s of it last until 0.4, the second chunk comes at 0.55: a wait of 0.15. It lasts until 0.95.
# The third comes at 0.9, in time, and lasts until 1.35.
LATE = record([(10.2, 2), (10.55, 4), (10.9, 4)], start=10.0)


def test_one_answer() -> None:
    assert ttfa(LATE) == pytest.approx(0.2)
    assert ttfp(LATE) == pytest.approx(0.19)
    assert rtf(LATE, PCM) == pytest.approx(0.95 / 1.0)
    assert decode_rtf(LATE, PCM) == pytest.approx([0.7 / 0.8])
    assert waits(LATE, PCM) == pytest.approx([0.15])
    assert worst_wait(LATE, PCM) == pytest.approx(0.15)
    assert gaps(LATE) == pytest.approx([0.35, 0.35])
    assert not is_good(LATE, PCM)
    assert is_good(record([(0.25, 2), (0.54, 1)]), PCM)  # a wait of 0.09
    assert not is_good(record([(0.26, 2)]), PCM)


def test_a_failure_is_infinite_and_never_left_out() -> None:
    broken = record([(10.2, 2), (10.4, 1)], start=10.0, error="the connection broke")
    assert {ttfa(broken), ttfp(broken), rtf(broken, PCM), worst_wait(broken, PCM)} == {math.inf}
    assert decode_rtf(broken, PCM) == [math.inf]
    found = figures([Run([LATE, broken], 1)], PCM)
    assert found["ttfa_ms_p50"][0] == pytest.approx(200)
    assert found["ttfa_ms_p95"][0] == math.inf
    assert (found["requests"][0], found["failures"][0], found["continuity"][0]) == (2, 1, 0)


def test_of_one_chunk_there_is_no_decode_rtf_and_of_a_paced_reader_no_gap() -> None:
    assert decode_rtf(record([(1, 3)]), PCM) == []
    slow = record([(0.1, 1), (0.2, 1)])
    slow.paced = True
    assert gaps(slow) == []


def test_a_player_waits_again_only_when_it_is_empty_again() -> None:
    player = Player(PCM)
    assert player.ahead_s(5.0) == 0
    for now in (5.0, 5.3, 5.3, 5.6):  # 0.1 s each: waits 0.2, then 0.2 s are in hand until 5.5, waits 0.1
        player.hear(now, 200)
    assert player.waits == pytest.approx([0.2, 0.1])
    assert player.ahead_s(5.65) == pytest.approx(0.05)


def test_percentiles_are_values_that_occurred() -> None:
    hundred = [float(value) for value in range(1, 101)]
    assert [percentile(hundred, percent) for percent in (1, 50, 95, 99, 100)] == [1, 50, 95, 99, 100]
    assert percentile([3.0, 1.0], 50) == 1
    assert percentile([7.0], 99) == 7
    assert math.isnan(percentile([], 50))


def closed_loop() -> Run:
    """Two clients, both busy from 1 to 7. Answers of 10 frames: client 0 in 0..2, 2..4, 4..7, client 1 in 1..3, 3..6, 6..8."""
    spans = [(0, 0, 2), (0, 2, 4), (0, 4, 7), (1, 1, 3), (1, 3, 6), (1, 6, 8)]
    records = []
    for client, start, end in spans:
        one = record([(start + 0.5, 5), (end, 5)], start=start, client=client)
        one.end = end
        records.append(one)
    return Run(records, 2)


def test_throughput_is_of_the_time_in_which_all_clients_are_busy() -> None:
    run = closed_loop()
    assert run.window() == (1, 7, True)
    found = rates(run, PCM)
    # Halves (0.5 s of audio) that arrive from 1 to 7: at 2, 2.5, 4, 4.5, 7, 1.5, 3, 3.5, 6, 6.5.
    assert found["audio_s_per_s"] == pytest.approx(10 * 0.5 / 6)
    assert found["frames_per_s"] == pytest.approx(50 / 6)
    assert found["acoustic_tokens_per_s"] == pytest.approx(500 / 6)
    # Whole answers from 1 to 7: 2..4, 4..7, 1..3, 3..6.
    assert found["audio_s_per_s_whole"] == pytest.approx(4 / 6)
    assert found["requests_per_s"] == pytest.approx(5 / 6)  # ends at 2, 4, 7, 3, 6
    assert found["window_s"] == 6
    # None is good: 0.5 s to first audio.
    assert found["goodput_per_s"] == 0
    # Each answer waits once, for its second half: at 0.5 + 0.5, or never when it takes 1 s. 6 waits in 6 s of audio.
    assert found["underruns_per_minute"] == pytest.approx(60)


def test_without_a_steady_time_everything_counts() -> None:
    run = Run(closed_loop().records[:1] + closed_loop().records[3:4], 2)
    assert run.window() == (0, 3, False)
    found = rates(run, PCM)
    assert found["audio_s_per_s"] == found["audio_s_per_s_whole"] == pytest.approx(2 / 3)
    assert Run([], 1).window() == (0, 0, False)


def test_the_window_of_an_open_loop_ends_with_the_last_arrival() -> None:
    run = closed_loop()
    run.open_loop = True
    assert run.window() == (0, 6, True)


def test_intervals_come_from_whole_repeats() -> None:
    assert figure([[1.0, 2.0, 3.0]], mean) == (2.0, None, None)
    value, low, high = figure([[1.0], [2.0], [3.0]], mean)
    assert value == 2
    # Of 27 draws of three, 1 in 27 (3.7 %) is all ones and 1 all threes: the 2.5 % at each end are these.
    assert (low, high) == (1, 3)
    assert figure([[4.0], [4.0]], mean) == (4, 4, 4)
    assert figure([[1.0], [math.inf]], lambda values: percentile(values, 50))[2] == math.inf


def test_the_rule_of_capacity() -> None:
    good = [record([(0.4, 2), (0.5, 2)]) for _ in range(100)]
    bad = record([(0.4, 1), (0.7, 1)])  # waits 0.2
    assert keeps_up([Run(good, 1)], PCM)
    assert keeps_up([Run([*good[:99], bad], 1)], PCM)
    assert not keeps_up([Run([*good[:98], bad, bad], 1)], PCM)
    assert not keeps_up([Run(good, 1), Run([*good, record([(0.4, 1)], error="status 429")], 1)], PCM)
    slow = record([(0.51, 2)])
    assert keeps_up([Run([*good[:95], *[slow] * 5], 1)], PCM)
    assert not keeps_up([Run([*good[:94], *[slow] * 6], 1)], PCM)
