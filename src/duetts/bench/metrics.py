"""What is measured of spoken answers, and how it becomes figures. Definitions are those of docs/benchmarks.md; no I/O.

Times are seconds of one monotonic clock. A request starts when its last byte has been written; audio is 16-bit mono PCM.
Percentiles are nearest-rank, over all requests of all repeats; whatever failed counts as infinite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CONTINUOUS_S = 0.1  # a worst wait up to this is no break for a listener
GOOD_TTFA_S = 0.25
CAPACITY_TTFA_S, CAPACITY_CONTINUITY = 0.5, 0.99
RESAMPLES = 400


@dataclass(frozen=True, slots=True)
class Pcm:
    """What samples are: Hz, and samples of a frame."""

    rate: int = 44100
    frame_length: int = 2048

    @property
    def bytes_per_s(self) -> int:
        return 2 * self.rate

    @property
    def frame_bytes(self) -> int:
        return 2 * self.frame_length


class Player:
    """Plays from the first byte on and waits whenever nothing is there: the clock of a listener."""

    def __init__(self, pcm: Pcm) -> None:
        self._bytes_per_s = pcm.bytes_per_s
        self.empties_at: float | None = None  # when all that was heard has been played
        self.waits: list[float] = []

    def hear(self, now: float, num_bytes: int) -> None:
        """Samples arrive. The first ones begin the playing."""
        if self.empties_at is None:
            self.empties_at = now
        elif now > self.empties_at:
            self.waits.append(now - self.empties_at)
            self.empties_at = now
        self.empties_at += num_bytes / self._bytes_per_s

    def ahead_s(self, now: float) -> float:
        """Seconds of audio in hand."""
        return 0.0 if self.empties_at is None else self.empties_at - now


@dataclass(slots=True)
class Record:
    """One request and what came of it. `reads` are times and bytes of samples as they were read, `chunks` those of HTTP's
    chunks when they were whole. `error` is empty if all went well."""

    index: int
    client: int
    frames: int  # asked for
    streaming: bool = True
    paced: bool = False  # read at the rate at which it is played
    due: float = math.nan  # when it was meant to be sent
    start: float = math.nan
    first_byte: float = math.nan
    first_audio: float = math.nan
    end: float = math.nan
    audio_bytes: int = 0
    status: int = 0
    error: str = ""
    text_chars: int = 0
    reference_s: float = 0.0
    reads: list[tuple[float, int]] = field(default_factory=list)
    chunks: list[tuple[float, int]] = field(default_factory=list)


def ttfa(record: Record) -> float:
    """Seconds to the first byte of samples."""
    return math.inf if record.error else record.first_audio - record.start


def ttfp(record: Record) -> float:
    """Seconds to the first byte of any body, headers of files included."""
    return math.inf if record.error else record.first_byte - record.start


def rtf(record: Record, pcm: Pcm) -> float:
    """From start to last byte, over the audio's duration."""
    return math.inf if record.error else (record.end - record.start) * pcm.bytes_per_s / record.audio_bytes


def decode_rtf(record: Record, pcm: Pcm) -> list[float]:
    """From first to last byte of samples, over the duration without the first chunk; none if that is all."""
    if record.error:
        return [math.inf]
    later = record.audio_bytes - record.chunks[0][1] if record.chunks else 0
    return [(record.reads[-1][0] - record.first_audio) * pcm.bytes_per_s / later] if later > 0 else []


def waits(record: Record, pcm: Pcm) -> list[float]:
    """How long a player that began with the first byte waited, each time."""
    player = Player(pcm)
    for now, num_bytes in record.reads:
        player.hear(now, num_bytes)
    return player.waits


def worst_wait(record: Record, pcm: Pcm) -> float:
    return math.inf if record.error else max(waits(record, pcm), default=0.0)


def gaps(record: Record) -> list[float]:
    """Seconds between the arrivals of neighbouring chunks. None of answers that were read slowly on purpose."""
    return [] if record.paced else [after[0] - before[0] for before, after in itertools.pairwise(record.chunks)]


def is_good(record: Record, pcm: Pcm) -> bool:
    """What counts for goodput: early first audio and no audible break."""
    return ttfa(record) <= GOOD_TTFA_S and worst_wait(record, pcm) <= CONTINUOUS_S


@dataclass(slots=True)
class Run:
    """One repeat of one load. `open_loop`: requests came whether or not others had ended. What the servers told meanwhile:
    their processor seconds at some times, and frames by engine; and what was done to them in the middle."""

    records: list[Record]
    clients: int
    open_loop: bool = False
    processor_shares: tuple[float, ...] = ()  # of one core each, that the client processes took
    server_processor: list[tuple[float, float]] = field(default_factory=list)
    engine_frames: dict[str, int] = field(default_factory=dict)
    event: dict[str, Any] | None = None

    def window(self) -> tuple[float, float, bool]:
        """Begin, end, and whether it is steady: the time in which all clients were busy, or all requests came. If there is no
        such time, everything from the first start to the last end."""
        done = [record for record in self.records if not math.isnan(record.start) and not math.isnan(record.end)]
        if not done:
            return 0.0, 0.0, False
        first, last = min(record.start for record in done), max(record.end for record in done)
        if self.open_loop:
            stop = max(record.start for record in done)
            return (first, stop, True) if stop > first else (first, last, False)
        starts: dict[int, float] = {}
        ends: dict[int, float] = {}
        for one in done:
            starts[one.client] = min(one.start, starts.get(one.client, math.inf))
            ends[one.client] = max(one.end, ends.get(one.client, -math.inf))
        begin, end = max(starts.values()), min(ends.values())
        steady = len(starts) == self.clients and len(done) > self.clients and end > begin
        return (begin, end, True) if steady else (first, last, False)

    def server_share(self, begin: float, end: float) -> float:
        """How many cores the servers' own processes took from `begin` to `end`; nan if they did not tell it."""
        if len(self.server_processor) < 2 or not end > begin:
            return math.nan
        times, used = zip(*self.server_processor, strict=True)
        begin, end = max(begin, times[0]), min(end, times[-1])
        return float(np.interp(end, times, used) - np.interp(begin, times, used)) / (end - begin) if end > begin else math.nan


def rates(run: Run, pcm: Pcm) -> dict[str, float]:
    """Throughput in the steady window. `audio_s_per_s` is the audio whose bytes arrived in it, over its length: requests that
    cross its borders count by the part that lies inside. `audio_s_per_s_whole` counts only requests that lie inside with
    start and end, which is less the longer requests are; for a window without steadiness the two are equal."""
    begin, end, steady = run.window()
    span = max(end - begin, 1e-9)
    good = [record for record in run.records if not record.error]
    arrived = sum(size for record in good for now, size in record.reads if begin <= now <= end)
    inside = [record for record in good if record.start >= begin and record.end <= end]
    ended = [record for record in good if begin <= record.end <= end]
    audio = arrived / pcm.bytes_per_s / span
    minutes = sum(record.audio_bytes for record in good) / pcm.bytes_per_s / 60
    frames = arrived / pcm.frame_bytes / span
    return {
        "audio_s_per_s": audio,
        "audio_s_per_s_whole": sum(record.audio_bytes for record in inside) / pcm.bytes_per_s / span,
        "requests_per_s": len(ended) / span,
        "frames_per_s": frames,
        "acoustic_tokens_per_s": 10 * frames,
        "goodput_per_s": sum(is_good(record, pcm) for record in ended) / span,
        "underruns_per_minute": sum(len(waits(record, pcm)) for record in good) / minutes if minutes else math.nan,
        "window_s": span,
        "steady": float(steady),
        "client_processor_share": sum(run.processor_shares),
        "client_busiest_share": max(run.processor_shares, default=0.0),
        "server_processor_share": run.server_share(begin, end),
    }


Figure = tuple[float, float | None, float | None]  # a value and its 95 % interval; without several repeats there is none


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed; nan of none."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)] if values else math.nan


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def figure(repeats: Sequence[Sequence[float]], statistic: Callable[[list[float]], float]) -> Figure:
    """A statistic of all repeats together, with its bootstrap interval: whole repeats are drawn anew, with replacement."""

    def of(draw: Iterable[int]) -> float:
        return statistic([value for each in draw for value in repeats[each]])

    count = len(repeats)
    if count < 2:
        return of(range(count)), None, None
    draws = np.sort(np.random.default_rng(0).integers(0, count, (RESAMPLES, count)))
    known = {draw: of(draw) for draw in set(map(tuple, draws.tolist()))}
    found = [known[tuple(draw)] for draw in draws.tolist()]
    return of(range(count)), percentile(found, 2.5), percentile(found, 97.5)


def figures(runs: Sequence[Run], pcm: Pcm) -> dict[str, Figure]:
    """All figures of the repeats of one load. Names end in their unit; `_pNN` are percentiles."""
    values: dict[str, Callable[[Record], list[float]]] = {
        "ttfa_ms": lambda one: [1e3 * ttfa(one)],
        "ttfp_ms": lambda one: [1e3 * ttfp(one)],
        "rtf": lambda one: [rtf(one, pcm)],
        "decode_rtf": lambda one: decode_rtf(one, pcm),
        "underrun_ms": lambda one: [1e3 * worst_wait(one, pcm)],
        "gap_ms": lambda one: [1e3 * gap for gap in gaps(one)],
        "late_ms": lambda one: [] if one.error else [1e3 * (one.start - one.due)],
    }
    found: dict[str, Figure] = {}
    for name, of in values.items():
        repeats = [[value for record in run.records for value in of(record)] for run in runs]
        for percent in (50, 95, 99):
            found[f"{name}_p{percent}"] = figure(repeats, lambda those, percent=percent: percentile(those, percent))  # type: ignore[misc]
    unbroken = [[float(worst_wait(record, pcm) <= CONTINUOUS_S) for record in run.records] for run in runs]
    found["continuity"] = figure(unbroken, mean)
    each = [rates(run, pcm) for run in runs]
    found |= {name: figure([[one[name]] for one in each], mean) for name in each[0]}
    found["requests"] = sum(len(run.records) for run in runs), None, None
    found["failures"] = sum(bool(record.error) for run in runs for record in run.records), None, None
    return found


def keeps_up(runs: Sequence[Run], pcm: Pcm) -> bool:
    """The rule of capacity: no failure, 99 % without an audible break, first audio within 500 ms for 95 %, in every run."""
    return all(
        not any(record.error for record in run.records)
        and mean([worst_wait(record, pcm) <= CONTINUOUS_S for record in run.records]) >= CAPACITY_CONTINUITY
        and percentile([ttfa(record) for record in run.records], 95) <= CAPACITY_TTFA_S
        for run in runs
    )
