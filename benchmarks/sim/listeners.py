"""Who asks for speech in a simulation, for how much, in which voice and how often; and what each of them was given.

Seconds of speech are log-normal between 2 and 40 (43 to 860 frames). Everything is a function of the seed, the client's number
and how many requests it made before, so that all policies are asked the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from benchmarks.sim.model import FRAME_S

from duetts.engine.playout import Playout
from duetts.types import Int32, Sampling, Utterance

SHORTEST, LONGEST = 43, 860  # frames
MEDIAN, SPREAD = math.sqrt(SHORTEST * LONGEST), 0.75  # of the log-normal: its ends are at two standard deviations
MEAN_S = 10.96  # of speech, after clipping; a test checks it
BOUND = 2.0  # how many times longer than it is a speech may become, as far as the engine knows
CODEBOOKS = 10
REFERENCE = 240  # prompt positions of a voice: 216 frames, 10 s, and what is said in them
PLAIN = 16  # of a prompt without a voice, before its text
FRAMES_PER_TOKEN = 6

State = Literal["open", "done", "refused", "left", "interrupted"]


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for. `listeners` is a population each of whom asks again when the last frame has been played, or with
    Poisson arrivals the mean number of those who would be listening if all began at once.

    `batch_clients` fetch complete answers, one after another, and never pause. Who has heard nothing for `patience_s` leaves.
    A share of the listeners' requests is `interrupted` in the middle, at any time alike, as in a conversation.
    """

    listeners: int
    arrivals: Literal["closed", "poisson"] = "closed"
    batch_clients: int = 0
    voices: int = 64
    plain_share: float = 0.2  # requests without a voice
    interrupted: float = 0.0
    patience_s: float = 10.0
    seed: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One request and what came of it. `submitted` and `ended` are times, the other seconds are durations."""

    client: int
    number: int  # among the client's
    utterance: Utterance
    frames: int
    listening: bool
    submitted: float
    state: State = "open"
    first_audio_s: float | None = None
    listens_s: float = math.inf  # from the first chunk on, at most
    worst_s: float = 0.0  # longest wait in the middle
    waited_s: float = 0.0  # all waits together
    heard: int = 0  # frames
    ended: float | None = None

    def hear(self, playout: Playout, now: float) -> None:
        """Brings the waits up to date."""
        if playout.began is not None and self.first_audio_s is not None:
            waiting_s = max(0.0, -playout.buffer_s(now)) if self.heard < self.frames else 0.0
            self.worst_s = max(playout.worst_underrun_s, waiting_s)
            self.waited_s = playout.began - self.submitted - self.first_audio_s + waiting_s

    @property
    def played(self) -> float:
        """When a listener is done with what was handed over, or has interrupted it."""
        if self.first_audio_s is None:
            return self.submitted
        return self.submitted + self.first_audio_s + min(self.heard * FRAME_S + self.waited_s, self.listens_s)


@dataclass(slots=True)
class Voices:
    """The prompts' common beginnings, and how popular each is: the n-th 1/n as popular as the first."""

    prompts: list[Int32]
    popularity: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, count: int, seed: int) -> Voices:
        draw = np.random.default_rng((seed, count))
        prompts = [draw.integers(0, 1024, (1 + CODEBOOKS, REFERENCE), dtype=np.int32) for _ in range(count)]
        weights = 1 / np.arange(1, count + 1)
        return cls(prompts, list(np.cumsum(weights / weights.sum())))

    def pick(self, draw: np.random.Generator) -> int:
        return min(int(np.searchsorted(self.popularity, draw.random())), len(self.prompts) - 1)


def make_request(load: Load, voices: Voices, client: int, number: int, now: float) -> Request:
    """The `number`-th request of a client; batch clients have negative numbers."""
    draw = np.random.default_rng((load.seed, client + 1_000_000, number))
    frames = int(np.clip(draw.lognormal(math.log(MEDIAN), SPREAD), SHORTEST, LONGEST))
    voice = None if draw.random() < load.plain_share else voices.pick(draw)
    begin = voices.prompts[voice] if voice is not None else np.zeros((1 + CODEBOOKS, PLAIN), np.int32)
    text = np.zeros((1 + CODEBOOKS, 8 + frames // FRAMES_PER_TOKEN), np.int32)
    text[0] = draw.integers(0, 150_000, text.shape[1])
    utterance = Utterance(
        request_id=f"{client}.{number}",
        prompt=np.concatenate((begin, text), axis=1),
        sampling=Sampling(),
        seed=0,
        max_frames=int(BOUND * frames),
        streaming=client >= 0,
        voice_key="" if voice is None else f"voice-{voice}",
        shared_positions=begin.shape[1],
    )
    request = Request(client, number, utterance, frames, client >= 0, now)
    if request.listening and draw.random() < load.interrupted:
        request.listens_s = float(draw.random()) * frames * FRAME_S
    return request


def first_arrivals(load: Load, until: float) -> Iterator[tuple[float, int]]:
    """When each client first asks. A closed population comes in evenly while an average speech lasts, so that it is soon as
    mixed as it will be; batch clients (negative numbers) do the same."""
    draw = np.random.default_rng((load.seed, 1))
    if load.arrivals == "closed":
        for client in range(load.listeners):
            yield float(draw.uniform(0, MEAN_S)), client
    else:
        now, client = 0.0, 0
        while (now := now + float(draw.exponential(MEAN_S / load.listeners))) < until:
            yield now, client
            client += 1
    for client in range(load.batch_clients):
        yield float(draw.uniform(0, MEAN_S / 2)), -1 - client
