"""What the engine learns of its own speed, and how many listeners it believes it can serve."""

from __future__ import annotations

import pytest

from duetts.engine.pace import SHARE, Pace

FRAME_S = 0.05


def learned(one_s: float, each_s: float, codec_frame_s: float = 0.0, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> Pace:
    """The pace of steps that take `one_s` with one row and `each_s` for every other."""
    pace = Pace()
    for _ in range(20):
        for rows in sizes:
            pace.saw_step(rows, one_s + each_s * (rows - 1))
    if codec_frame_s:
        pace.saw_codec(4, 4 * codec_frame_s)
    return pace


def test_nothing_is_known_before_the_first_step() -> None:
    pace = Pace()
    assert pace.step_s(1) is None
    assert pace.codec_frame_s == 0
    assert pace.streams(8, FRAME_S, shared_thread=True) == float("inf")


def test_rows_that_a_step_may_have() -> None:
    assert Pace().rows_within(1.0, shared_thread=True) == 0
    pace = learned(0.010, 0.002, codec_frame_s=0.003)
    assert pace.rows_within(0.0245, shared_thread=False) == 8
    assert pace.rows_within(0.0245, shared_thread=True) == 3
    assert pace.rows_within(0.009, shared_thread=False) == 0
    assert learned(0.010, 0.0).rows_within(0.02, shared_thread=False) >= 1000


def test_a_line_over_rows_is_learned() -> None:
    pace = learned(0.010, 0.002)
    assert pace.step_s(1) == pytest.approx(0.010)
    assert pace.step_s(8) == pytest.approx(0.024)
    assert pace.step_s(32) == pytest.approx(0.072)


def test_one_size_alone_tells_no_slope() -> None:
    pace = learned(0.010, 0.0, sizes=(4,))
    assert pace.step_s(1) == pace.step_s(4) == pytest.approx(0.010)


def test_more_rows_never_take_less_and_none_take_no_less_than_nothing() -> None:
    pace = Pace()
    for _ in range(10):
        pace.saw_step(1, 0.02)
        pace.saw_step(8, 0.01)
    assert pace.step_s(8) == pytest.approx(pace.step_s(1) or 0)
    steep = Pace()
    for _ in range(10):
        steep.saw_step(4, 0.001)
        steep.saw_step(8, 0.1)
    assert (steep.step_s(1) or 0) >= 0


def test_what_is_long_ago_is_forgotten() -> None:
    pace = learned(1.0, 0.1)
    for _ in range(500):
        pace.saw_step(1, 0.01)
        pace.saw_step(8, 0.01)
    assert pace.step_s(8) == pytest.approx(0.01, rel=0.05)


def test_the_codec_is_weighed_by_frames() -> None:
    pace = Pace()
    pace.saw_codec(1, 0.010)
    pace.saw_codec(9, 0.010)
    assert pace.codec_frame_s == pytest.approx(0.002, rel=0.02)


def test_listeners_that_are_all_in_time() -> None:
    """Steps of 8 rows in 10 ms: four of them in the planned share of a frame, 34 listeners."""
    pace = learned(0.010, 0.0)
    assert pace.streams(8, FRAME_S, shared_thread=False) == pytest.approx(SHARE * FRAME_S / 0.010 * 8)
    assert pace.streams(1, FRAME_S, shared_thread=False) == pytest.approx(SHARE * FRAME_S / 0.010)


def test_the_codec_takes_its_time_beside_or_between_the_steps() -> None:
    pace = learned(0.010, 0.0, codec_frame_s=0.005)
    assert pace.streams(8, FRAME_S, shared_thread=False) == pytest.approx(SHARE * FRAME_S / 0.005)  # the codec is the wall
    assert pace.streams(8, FRAME_S, shared_thread=True) == pytest.approx(SHARE * FRAME_S / (0.010 / 8 + 0.005), rel=0.15)


def test_a_full_step_that_takes_too_long_leaves_room_for_fewer_rows() -> None:
    pace = learned(0.020, 0.010)
    most = pace.streams(8, FRAME_S, shared_thread=False)
    assert 1 < most < 8
    assert (pace.step_s(1) or 0) + (most - 1) * 0.010 == pytest.approx(SHARE * FRAME_S)


def test_a_machine_that_is_always_late_fills_its_steps_if_company_costs_less_than_waiting() -> None:
    flat = learned(0.100, 0.001)
    assert flat.streams(4, FRAME_S, shared_thread=False) == 4
    assert flat.streams(1, FRAME_S, shared_thread=False) == 1
    steep = learned(0.100, 0.100)
    assert steep.streams(4, FRAME_S, shared_thread=False) == 1
    assert learned(0.1, 0.0, codec_frame_s=0.03).streams(4, FRAME_S, shared_thread=True) == 4
    assert learned(0.1, 0.0, codec_frame_s=0.2).streams(4, FRAME_S, shared_thread=True) == 1
    assert learned(0.1, 0.1, codec_frame_s=9.0).streams(4, FRAME_S, shared_thread=False) == 1


def test_steps_that_a_coarse_clock_does_not_see_set_no_bound() -> None:
    pace = learned(0.0, 0.0)
    assert pace.streams(8, FRAME_S, shared_thread=True) == float("inf")
    assert pace.streams(1, FRAME_S, shared_thread=False) == float("inf")
