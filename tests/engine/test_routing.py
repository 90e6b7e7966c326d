"""The choice of an engine: the least loaded, unless the one that knows the voice is hardly busier."""

from collections import Counter

import numpy as np

from duetts.engine.remote import add_up
from duetts.engine.routing import Candidate, choose, reference_weight, utterance_weight
from duetts.types import Sampling, Utterance

WEIGHT = 100.0


def idle(*indices: int) -> list[Candidate]:
    return [Candidate(index, 0.0) for index in indices]


def place(candidates: list[Candidate], key: str = "") -> int:
    return choose(candidates, key, WEIGHT).index


def test_without_a_voice_the_least_loaded_is_chosen() -> None:
    assert place([Candidate(0, 30), Candidate(1, 10), Candidate(2, 20)]) == 1
    assert place(idle(0, 1, 2)) == 0
    assert place([Candidate(1, 5), Candidate(0, 5)]) == 0


def test_servers_that_know_nothing_of_each_other_begin_at_different_engines() -> None:
    assert [choose(idle(0, 1, 2, 3), "", WEIGHT, first).index for first in range(4)] == [0, 1, 2, 3]
    assert choose([Candidate(0, 5), Candidate(3, 10)], "", WEIGHT, 2).index == 0
    assert choose([*idle(0, 1), Candidate(3, 10)], "", WEIGHT, 2).index == 0


def test_load_is_work_not_a_count() -> None:
    short = Utterance("a", np.zeros((5, 320), np.int32), Sampling(), 0, 10)
    long = Utterance("b", np.zeros((5, 3), np.int32), Sampling(), 0, 1000)
    assert utterance_weight(short) == 20
    assert utterance_weight(long) > 5 * utterance_weight(short)
    assert reference_weight(44100 * 10, 2048) < utterance_weight(short)


def test_a_voice_stays_where_it_is() -> None:
    first = {key: place(idle(0, 1, 2, 3), key) for key in map(str, range(200))}
    assert {place(idle(3, 1, 2, 0), "7") for _ in range(5)} == {first["7"]}
    shares = Counter(first.values())
    assert set(shares) == {0, 1, 2, 3}
    assert max(shares.values()) < 80


def test_an_engine_that_is_away_gives_up_only_its_own_voices() -> None:
    keys = list(map(str, range(100)))
    before = {key: place(idle(0, 1, 2, 3), key) for key in keys}
    after = {key: place(idle(0, 1, 3), key) for key in keys}
    assert {key for key in keys if before[key] != after[key]} == {key for key in keys if before[key] == 2}
    assert {after[key] for key in keys if before[key] == 2} == {0, 1, 3}


def test_a_voice_leaves_an_engine_that_is_clearly_busier() -> None:
    home = place(idle(0, 1), "anna")
    other = 1 - home
    assert place([Candidate(home, 200), Candidate(other, 0)], "anna") == home  # two requests of this weight
    assert place([Candidate(home, 201), Candidate(other, 0)], "anna") == other
    assert place([Candidate(home, 1000), Candidate(other, 900)], "anna") == home
    assert place([Candidate(home, 10_700), Candidate(other, 10_000)], "anna") == home
    assert place([Candidate(home, 10_701), Candidate(other, 10_000)], "anna") == other


def test_a_voice_that_everybody_uses_spreads_over_all_engines() -> None:
    loads = dict.fromkeys(range(4), 0.0)
    for _ in range(400):
        loads[place([Candidate(index, load) for index, load in loads.items()], "default")] += WEIGHT
    assert max(loads.values()) <= 1.05 * min(loads.values()) + 3 * WEIGHT


def test_figures_are_added_and_measures_are_the_worst() -> None:
    one = {"open": 1, "finished": {"stop": 2}, "alive": True, "step_s": 0.01, "smallest_buffer_s": 0.5, "device": "a"}
    two = {"open": 2, "finished": {"stop": 1, "length": 4}, "alive": False, "step_s": 0.03, "smallest_buffer_s": 0.2, "new": 1}
    assert add_up([one, two]) == {
        "open": 3, "finished": {"stop": 3, "length": 4}, "alive": False, "step_s": 0.03, "smallest_buffer_s": 0.2,
        "device": "a", "new": 1,
    }  # fmt: skip
    assert add_up([]) == {}
    assert add_up([one]) == one
