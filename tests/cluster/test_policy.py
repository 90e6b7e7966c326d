"""How many replicas: by who waits and who is late, within hysteresis, and never by how busy they are."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetts.cluster.policy import by_line_and_lateness, replicas_wanted, unhealthy


@pytest.mark.parametrize(
    ("what", "replicas", "running", "waiting", "late", "wanted"),
    [
        ("nothing to do", 1, 0, 0, 0, 1),
        ("busy without a line is no reason", 1, 8, 0, 0, 1),
        ("nor is it with several", 3, 24, 0, 0, 3),
        ("a line", 1, 8, 4, 0, 2),
        ("a long line: as many as have room for it", 1, 8, 40, 0, 6),
        ("a line although places are free, since one more would make others late", 2, 6, 3, 0, 3),
        ("somebody late", 2, 5, 0, 1.0, 3),
        ("late for a moment is no reason, but nobody leaves", 4, 2, 0, 0.1, 4),
        ("a moment's line is no reason, but nobody leaves", 4, 2, 0.4, 0, 4),
        ("one less would be full", 2, 7, 0, 0, 2),
        ("one less has room to spare", 2, 5, 0, 0, 1),
        ("most have nothing to do", 8, 5, 0, 0, 1),
    ],
)
def test_replicas_wanted(what: str, replicas: int, running: float, waiting: float, late: float, wanted: int) -> None:
    assert replicas_wanted(replicas, 8 * replicas, running, waiting, late) == wanted, what


@given(
    st.integers(0, 1000), st.integers(0, 10_000), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e3),
)  # fmt: skip
def test_there_is_always_one_and_it_changes_for_a_reason(
    replicas: int, places: float, running: float, waiting: float, late: float
) -> None:
    wanted = replicas_wanted(replicas, places, running, waiting, late)
    assert wanted >= 1
    if wanted > max(1, replicas):
        assert late or waiting
    if wanted < replicas:
        assert not waiting
        assert not late


def context(replicas: int, target: int, **told: list[float]) -> SimpleNamespace:
    metrics = {name: dict(enumerate(values)) for name, values in told.items()}
    return SimpleNamespace(current_num_replicas=replicas, target_num_replicas=target, aggregated_metrics=metrics)


def test_what_replicas_tell_is_added_up() -> None:
    told = context(2, 2, places=[8.0, 8.0], running=[8.0, 8.0], waiting=[9.0, 0.0], late=[0.0, 0.0])
    assert by_line_and_lateness(told) == (4, {})


def test_a_replica_that_has_not_told_yet_counts_as_room() -> None:
    """Else a new one would look like none, and one more would be asked for at each look."""
    told = context(2, 2, places=[8.0], running=[8.0], waiting=[2.0], late=[0.0])
    assert by_line_and_lateness(told)[0] == 3
    assert by_line_and_lateness(context(2, 2, places=[8.0], running=[8.0], waiting=[0.0], late=[0.0]))[0] == 2


def test_when_nothing_is_known_nothing_changes() -> None:
    assert by_line_and_lateness(context(1, 3)) == (3, {})
    assert by_line_and_lateness(SimpleNamespace(current_num_replicas=0, target_num_replicas=1, aggregated_metrics=None))[0] == 1


# -- when one is replaced ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "sick", "alive", "down_s", "replaced"),
    [
        ("well", "", True, 0, False),
        ("well again after a while", "", True, 500, False),
        ("its engine is started anew, which took 60 s last time", "no engine is up", False, 100, False),
        ("its engine does not come back", "no engine is up", False, 151, True),
        ("nothing moves", "work is open and nothing has moved for 61 s", True, 0, True),
    ],
)
def test_unhealthy(what: str, sick: str, alive: bool, down_s: float, replaced: bool) -> None:
    stats = {"alive": alive, "engines": [{"start_s": 60.0}, {"start_s": 20.0}]}
    assert unhealthy(sick, stats, 1000.0, 1000.0 + down_s) == (sick if replaced else ""), what
