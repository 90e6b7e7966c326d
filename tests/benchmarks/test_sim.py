"""The simulator keeps its promises: nothing is lost, little load is served without a wait, and policies differ only where
there is something to choose."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.sim.fleet import Fleet
from benchmarks.sim.listeners import LONGEST, MEAN_S, SHORTEST, Load, Voices, make_request
from benchmarks.sim.model import FRAME_S, Card
from benchmarks.sim.policies import DEADLINE, FCFS, REFUSING, SHORTEST_QUEUE, Policy, constants
from benchmarks.sim.results import Result, simulate

from duetts.engine import scheduler

MANY = 1000.0  # simulated seconds: everything has ended by then


@pytest.mark.parametrize("policy", [FCFS, DEADLINE, REFUSING], ids=lambda policy: policy.name)
@pytest.mark.parametrize("listeners", [30, 600])
def test_every_frame_is_delivered_once_and_everything_is_given_back(policy: Policy, listeners: int) -> None:
    """Also in an overload with impatient and interrupting listeners; order and completeness are asserted at the ear."""
    fleet = Fleet(Load(listeners, batch_clients=20, interrupted=0.2, patience_s=0.5), policy, 2)
    fleet.start(4.0)
    fleet.run(MANY)
    states = {request.state for request in fleet.requests}
    assert "done" in states
    assert states <= {"done", "interrupted", "left", "refused"}
    assert all(request.heard == request.frames for request in fleet.requests if request.state == "done")
    for gpu in fleet.gpus:
        gpu.scheduler.assert_idle()
        assert gpu.codec.idle
        assert (gpu.owed, gpu.num_open) == (0, 0)
    assert sum(gpu.work.frames for gpu in fleet.gpus) >= sum(request.heard for request in fleet.requests)


def little(policy: Policy) -> Result:
    return simulate(Load(40, batch_clients=2), policy, warm_s=12.0, window_s=12.0)


def test_far_below_capacity_nobody_waits_and_policies_make_the_same() -> None:
    ours, theirs = little(DEADLINE), little(FCFS)
    for result in (ours, theirs):
        assert result.holds
        assert result.unbroken == result.served_well == 1.0
        assert result.ttfa_p95_s < 0.15
    made = [result.audio_s - result.batch_audio_s for result in (ours, theirs)]
    assert made[0] == pytest.approx(made[1], rel=0.1)
    assert made[0] == pytest.approx(40, rel=0.15)


def test_beyond_capacity_it_is_seen() -> None:
    assert not simulate(Load(900), FCFS, warm_s=7.0, window_s=2.0).holds
    refusing = simulate(Load(900), REFUSING, warm_s=7.0, window_s=2.0)
    assert refusing.failed > 0
    assert not refusing.holds


def test_a_run_is_a_function_of_its_seed() -> None:
    def run(seed: int) -> Result:
        return simulate(Load(20, seed=seed, arrivals="poisson"), SHORTEST_QUEUE, 2, warm_s=3.0, window_s=4.0)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_device_is_as_fast_as_the_notes_say() -> None:
    """Milliseconds of a step at 500 positions, and of prompts, from the performance notes."""
    card = Card()
    for rows, expected in {1: 5.0, 16: 5.3, 32: 5.6, 64: 6.3, 128: 7.8}.items():
        assert 1000 * card.step_s(rows, 500 * rows) == pytest.approx(expected, rel=0.06)
    assert 1000 * card.read_s(265, 0) == pytest.approx(4.1, rel=0.02)
    assert 1000 * card.read_s(50, 215) == pytest.approx(2.2, rel=0.04)
    assert 1000 * card.decode_s(256) == pytest.approx(8.84, rel=0.05)
    assert 1000 * card.decode_s(400) == pytest.approx(13.5, rel=0.05)


def test_a_card_of_other_speeds() -> None:
    assert Card(bandwidth=1e12).step_s(1, 500) > 2 * Card().step_s(1, 500)


def test_speeches_have_the_stated_lengths() -> None:
    load = Load(1, voices=4)
    voices = Voices.of(4, 0)
    requests = [make_request(load, voices, 0, number, 0.0) for number in range(3000)]
    frames = np.array([request.frames for request in requests])
    assert (frames.min(), frames.max()) == (SHORTEST, LONGEST)
    assert frames.mean() * FRAME_S == pytest.approx(MEAN_S, rel=0.05)
    plain = sum(not request.utterance.voice_key for request in requests)
    assert plain == pytest.approx(0.2 * len(requests), rel=0.15)
    assert len({request.utterance.voice_key for request in requests}) == 5


def test_constants_are_put_back() -> None:
    before = scheduler.NEED_S
    with constants(NEED_S=7.0):
        assert scheduler.NEED_S == 7.0
    assert before == scheduler.NEED_S
    with pytest.raises(AssertionError), constants(NO_SUCH_CONSTANT=1.0):
        pass
