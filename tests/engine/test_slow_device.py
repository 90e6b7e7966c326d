"""A CPU too slow for its listeners, held by hand: it fills its steps, where it once served one listener after another."""

from __future__ import annotations

from itertools import islice
from typing import cast

import numpy as np
import pytest

from duetts.engine.engine import Engine
from duetts.engine.parts import Parts, Result
from duetts.engine.playout import ChunkPolicy
from duetts.engine.scheduler import Room
from duetts.engine.sequence import Sequence
from duetts.engine.stream import Channel
from duetts.types import Sampling, Utterance

from .null_parts import BOOKS, END, Ear, NullDevice, NullEncoder, NullVocoder, solo

ROWS, FRAME_S, FRAMES = 4, 0.05, 40


class Slow(NullDevice):
    """Notes how many rows its steps have. A call takes `step_s`."""

    def __init__(self) -> None:
        super().__init__(60, rows=ROWS, tick=self._pass)
        self.now, self.step_s, self.steps = 100.0, 0.0, list[int]()

    def _pass(self) -> None:
        self.now += self.step_s

    def launch(self, rows: list[Sequence]) -> Result:
        self.steps.append(len(rows))
        return super().launch(rows)


def speak(engine: Engine, count: int) -> None:
    """Several listeners to answers of `FRAMES`, until all have theirs."""
    prompt = np.arange(8 * (1 + BOOKS), dtype=np.int32).reshape(1 + BOOKS, 8)
    any_length = (Utterance(f"r{seed}", prompt, Sampling(), seed, FRAMES, streaming=True) for seed in range(1000))
    ears = []
    for utterance in islice((one for one in any_length if solo(one)[1] == "length"), count):
        ears.append(Ear())
        engine.submit(utterance, cast(Channel, ears[-1]))
    while any(ear.outcome is None for ear in ears):
        engine._turn()


@pytest.mark.parametrize("padded", [True, False])
def test_a_step_of_more_rows_that_took_longer_by_chance_keeps_nobody_out_where_rows_cost_nothing(padded: bool) -> None:
    device = Slow()
    room = Room(8, ROWS, 32, 160, FRAME_S, padded=padded)
    parts = Parts(device, NullVocoder(16, 4), NullEncoder(), room, 60, END, 8, ChunkPolicy(2, 16))
    engine = Engine(parts, start=False, clock=lambda: device.now)
    device.step_s = 0.02
    speak(engine, 1)
    device.step_s = 0.06  # another program has begun
    speak(engine, 2)
    device.steps.clear()
    speak(engine, 4)
    assert (device.steps.count(ROWS) > 0.8 * len(device.steps)) == padded, device.steps


def test_what_the_codec_took_meanwhile_does_not_count_twice_on_one_core() -> None:
    """Steps of 40 ms on the clock, of which 20 are the codec's."""
    device = Slow()
    room = Room(8, ROWS, 32, 160, FRAME_S, padded=True, shared_thread=True)
    parts = Parts(device, NullVocoder(16, 4), NullEncoder(), room, 60, END, 8, ChunkPolicy(2, 16))
    engine = Engine(parts, start=False, clock=lambda: device.now, effort=lambda: device.now / 2)
    device.step_s = 0.04
    speak(engine, 1)
    assert engine.pace.step_s(ROWS) == pytest.approx(0.02)
