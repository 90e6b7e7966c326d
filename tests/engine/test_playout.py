"""Listeners' clocks, and how large chunks become."""

from __future__ import annotations

import pytest

from duetts.engine.playout import ChunkPolicy, Playout

FRAME_S = 0.05


def test_a_listener_has_what_was_handed_over_less_what_has_been_played() -> None:
    playout = Playout(FRAME_S)
    assert playout.buffer_s(100.0) == 0
    assert playout.ahead_s(3, 100.0) == pytest.approx(0.15)
    playout.hand_over(2, 100.0)
    assert playout.began == 100.0
    assert playout.buffer_s(100.0) == pytest.approx(0.1)
    assert playout.buffer_s(100.03) == pytest.approx(0.07)
    assert playout.ahead_s(6, 100.03) == pytest.approx(0.27)
    assert playout.worst_underrun_s == 0


def test_a_wait_shifts_the_clock_and_the_worst_one_is_kept() -> None:
    playout = Playout(FRAME_S)
    playout.hand_over(2, 0.0)
    assert playout.buffer_s(0.3) == pytest.approx(-0.2)
    playout.hand_over(1, 0.3)
    assert playout.worst_underrun_s == pytest.approx(0.2)
    assert playout.buffer_s(0.3) == pytest.approx(FRAME_S)  # only the new frame is left
    playout.hand_over(1, 0.36)
    assert playout.worst_underrun_s == pytest.approx(0.2)
    playout.hand_over(1, 0.41)
    assert playout.handed == 5


def test_audio_in_hand_from_before_counts() -> None:
    playout = Playout(FRAME_S, began=10.0 + 0.5)
    assert playout.buffer_s(10.0) == pytest.approx(0.5)
    playout.hand_over(2, 10.4)
    assert playout.worst_underrun_s == 0
    assert playout.buffer_s(10.4) == pytest.approx(0.2)
    late = Playout(FRAME_S, began=10.5)
    late.hand_over(2, 10.8)
    assert late.worst_underrun_s == pytest.approx(0.3)


def listener(buffer_s: float) -> Playout:
    """One that has so much in hand at 0."""
    return Playout(FRAME_S, began=0.0, handed=round(buffer_s / FRAME_S))


def test_first_chunks_are_small_and_within_the_largest() -> None:
    assert ChunkPolicy(2, 16).size(Playout(FRAME_S), 0, 0.01, 0.0) == 2
    assert ChunkPolicy(8, 3).size(Playout(FRAME_S), 0, 0.01, 0.0) == 3


def test_a_first_chunk_lasts_longer_where_frames_come_slowly() -> None:
    sizes = [ChunkPolicy(2, 16).size(Playout(FRAME_S), 0, share * FRAME_S, 0.0) for share in (0.0, 0.1, 0.3, 0.5, 0.9, 1e9)]
    assert sizes == [2, 2, 2, 3, 4, 4]
    assert ChunkPolicy(2, 3).size(Playout(FRAME_S), 0, FRAME_S, 0.0) == 3


def test_chunks_double_while_the_buffer_lasts_until_they_are_made() -> None:
    policy = ChunkPolicy(1, 16)
    sizes = [1]
    for _ in range(6):
        sizes.append(policy.size(listener(5.0), sizes[-1], 0.01, 0.0))
    assert sizes == [1, 2, 4, 8, 16, 16, 16]
    # 0.3 s of buffer, 0.05 s to make a frame, half as much again for safety: four frames
    assert policy.size(listener(0.3), 8, 0.05, 0.0) == 4
    assert policy.size(listener(0.05), 8, 0.05, 0.0) == 1


def test_a_chunk_has_a_frame_however_late_it_is() -> None:
    policy = ChunkPolicy(1, 16)
    assert policy.size(listener(0.1), 4, 0.05, now=7.0) == 1
    assert policy.size(listener(0.1), 4, 1e300, now=0.0) == 1


@pytest.mark.parametrize("frame_s", [0.0, 5e-324, 1e-300])
def test_a_step_without_time_sets_no_bound(frame_s: float) -> None:
    assert ChunkPolicy(1, 6).size(listener(1e3), 4, frame_s, 0.0) == 6


def test_endless_buffers_set_no_bound() -> None:
    assert ChunkPolicy(1, 6).size(Playout(FRAME_S, began=float("inf")), 2, 0.05, 0.0) == 4
