"""Everything that /metrics tells, declared side by side. What the server counts is counted here as it happens; what the engines
count is read from their last figures when somebody asks. Labels have few values, never a user's.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from duetts.types import Outcome

PREFIX = "duetts:"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FRAME_S = 2048 / 44100  # of S2 Pro: what a listener notices, so the edges stand around it

FIRST_AUDIO_EDGES = tuple(FRAME_S * n for n in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 16, 32, 64, 128))
GAP_EDGES = tuple(FRAME_S * n for n in (0.25, 0.5, 1, 1.5, 2, 4, 8, 16, 32, 64))
UNDERRUN_EDGES = (0.0, *(FRAME_S * n for n in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)))
QUEUE_EDGES = (0.001, *(FRAME_S * n for n in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)))
DURATION_EDGES = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)
RTF_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2, 5, 10)

# Which door a path is. Whatever is not here is "other": users choose paths.
DOORS = {
    "/v1/audio/speech": "speech",
    "/v1/audio/speech/batch": "batch",
    "/v1/audio/speech/stream": "socket",
    "/v1/tts": "fish",
    "/v1/tts/live": "fish_live",
}
DOOR_PREFIXES = {
    "/v1/audio/voice": "voices",
    "/v1/references": "voices",
    "/model": "voices",
    "/v1/models": "models",
    "/v1/audio/models": "models",
    "/v1/vqgan": "codec",
}
HEALTH = ("/live", "/ready", "/health", "/v1/health", "/version", "/v1/test", "/metrics")
BROKEN_OFF = ("client_disconnect", "cancelled", "draining")

disable_created_metrics()  # type: ignore[no-untyped-call]  # a third of all lines, with the time when each series began

door: ContextVar[str] = ContextVar("door", default="other")  # of the request that is answered


def door_of(path: str) -> str:
    """The door of a path without prefix and closing slash."""
    if path in HEALTH:
        return "health"
    prefixed = (name for prefix, name in DOOR_PREFIXES.items() if path.startswith(prefix))
    return DOORS.get(path) or next(prefixed, "other")


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the numbers that `stats` of a service gives."""

    key: str
    name: str
    note: str
    kind: Literal["gauge", "counter"] = "gauge"


# Of each engine.
ENGINE_FIGURES = (
    Figure("running", "num_requests_running", "Requests that are spoken now."),
    Figure("waiting", "num_requests_waiting", "Requests in line."),
    Figure("open", "num_requests_open", "Requests whose end is not out."),
    Figure("encoding", "references_encoding", "Clips that are encoded or wait for it."),
    Figure("decoding", "streams_decoding", "Streams that the codec holds."),
    Figure("steps", "steps", "Steps of the slow decoder.", "counter"),
    Figure("frames", "frames_generated", "Frames of audio made.", "counter"),
    Figure("rows_per_step", "batch_size", "Sequences in a step, on average since the start."),
    Figure("step_s", "step_seconds", "What a step of one row takes, as learned."),
    Figure("codec_frame_s", "codec_frame_seconds", "What the codec takes for a frame, as learned."),
    Figure("pages", "kv_pages", "Pages of the KV cache."),
    Figure("pages_used", "kv_pages_used", "Pages that requests hold."),
    Figure("pages_cached", "kv_pages_cached", "Pages kept for prompts that begin alike."),
    Figure("pages_evicted", "kv_pages_evicted", "Kept pages that were given up for room.", "counter"),
    Figure("prefix_positions_reused", "prefix_positions_reused", "Prompt positions that were not read again.", "counter"),
    Figure("preemptions", "preemptions", "Sequences that lost their pages for a while.", "counter"),
    Figure("smallest_buffer_s", "smallest_buffer_seconds", "Audio in hand of the listener that has least; negative: late."),
    Figure("underruns", "underruns", "Listeners that had to wait for a chunk.", "counter"),
    Figure("stalled_s", "stalled_seconds", "How long the loop has work and makes no step."),
    Figure("attention_hits", "attention_kernel_calls", "Decode attention launched or recorded as its own kernel.", "counter"),
    Figure("attention_fallbacks", "attention_fallbacks", "Decode attention left to plain torch on a GPU.", "counter"),
    Figure("starts", "engine_starts", "Starts of the engine's process.", "counter"),
)
# Of the server as a whole.
SERVER_FIGURES = (
    Figure("engines_up", "engines_up", "Engine processes that take work."),
    Figure("waiting_for_engine", "num_requests_waiting_for_engine", "Requests that wait for an engine to be up."),
    Figure("restarts", "engine_restarts", "Starts of engine processes after their first.", "counter"),
    Figure("full", "full", "1 while every place is taken."),
    Figure("reference_hits", "reference_cache_hit", "Clips whose codes were known.", "counter"),
    Figure("reference_disk_hits", "reference_cache_disk_hit", "Of these, those known from the disk.", "counter"),
    Figure("reference_misses", "reference_cache_miss", "Clips that had to be encoded.", "counter"),
    Figure("reference_bytes", "reference_cache_bytes", "Memory of known codes."),
    Figure("voice_hits", "voice_cache_hit", "Uses of a voice whose codes were at hand.", "counter"),
    Figure("voice_misses", "voice_cache_miss", "Uses of a voice that had to be read or encoded.", "counter"),
)


class Metrics:
    """The numbers of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            f"{PREFIX}requests", "Answers by door and status; the reason is how the speech ended, or the error's code.",
            ("door", "status", "reason"), registry=registry,
        )  # fmt: skip
        self.speeches = Counter(
            f"{PREFIX}speeches", "Speeches that had begun, also those in a batch or on a socket, by how they ended.",
            ("door", "reason"), registry=registry,
        )  # fmt: skip
        self.broken_off = Counter(
            f"{PREFIX}stream_aborted", "Speeches that were broken off, by reason.", ("reason",), registry=registry
        )
        self.audio_s = Counter(f"{PREFIX}audio_seconds", "Seconds of audio handed out.", registry=registry)
        self.retried = Counter(f"{PREFIX}pieces_retried", "Pieces of texts that were spoken twice.", registry=registry)
        self.suspect = Counter(
            f"{PREFIX}pieces_suspect", "Pieces that are not what they should be, by what is wrong.", ("why",), registry=registry
        )
        self.first_audio_s = Histogram(
            f"{PREFIX}ttfa_seconds", "From the request to the first audio, for listeners.", ("door",), registry=registry,
            buckets=FIRST_AUDIO_EDGES,
        )  # fmt: skip
        self.gap_s = Histogram(
            f"{PREFIX}inter_chunk_seconds", "Between two chunks, for listeners.", registry=registry, buckets=GAP_EDGES
        )
        self.underrun_s = Histogram(
            f"{PREFIX}underrun_seconds", "The longest wait of a player that began with the first chunk.", registry=registry,
            buckets=UNDERRUN_EDGES,
        )  # fmt: skip
        self.queue_s = Histogram(f"{PREFIX}queue_seconds", "In line.", registry=registry, buckets=QUEUE_EDGES)
        self.total_s = Histogram(
            f"{PREFIX}e2e_seconds", "From the request to the end of its audio.", ("door",), registry=registry,
            buckets=DURATION_EDGES,
        )  # fmt: skip
        self.rtf = Histogram(
            f"{PREFIX}rtf", "Time taken by time that the audio plays.", ("door",), registry=registry, buckets=RTF_EDGES
        )
        self.ready = Gauge(f"{PREFIX}ready", "1 while a new request would be taken.", registry=registry)
        self.places = Gauge(
            f"{PREFIX}num_places", "Requests that all engines together can speak at the same time.", registry=registry
        )
        self.build = Gauge(
            f"{PREFIX}build_info", "What is served; always 1.", ("version", "model", "weights", "device", "dtype"),
            registry=registry,
        )  # fmt: skip
        self.engines = CollectorRegistry()  # apart: several servers may have the same engines
        self._figures = (_ServerFigures(), _EngineFigures())
        registry.register(self._figures[0])
        self.engines.register(self._figures[1])
        ProcessCollector(registry=registry)
        for reason in BROKEN_OFF:
            self.broken_off.labels(reason)

    def watch(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        """From now on the figures of a service are told too. `stats` waits for nothing."""
        for figures in self._figures:
            figures.stats = stats

    def answered(self, door: str, status: int, reason: str) -> None:
        """A request has its last byte, or is broken off."""
        self.requests.labels(door, status, reason).inc()

    def ended(self, reason: str, outcome: Outcome | None, duration_s: float, listened: bool, first_audio_s: float) -> None:
        """A speech that had begun has ended: "stop", "length", or the code of its error. `outcome` is None if it was left."""
        self.speeches.labels(door.get(), reason).inc()
        if reason in BROKEN_OFF:
            self.broken_off.labels(reason).inc()
        self.audio_s.inc(duration_s)
        if listened and duration_s > 0:
            self.first_audio_s.labels(door.get()).observe(first_audio_s)
        if outcome is None:
            return
        self.retried.inc(len(outcome.pieces.redone))
        for piece in outcome.pieces.suspect:
            self.suspect.labels(piece.why).inc()
        timings = outcome.timings
        self.queue_s.observe(timings.queue_s)
        if outcome.error is not None:
            return
        self.total_s.labels(door.get()).observe(timings.total_s)
        if duration_s > 0:
            self.rtf.labels(door.get()).observe(timings.total_s / duration_s)
        if listened:
            self.underrun_s.observe(timings.worst_underrun_s)

    def written(self) -> bytes:
        """All of it as text."""
        return self.of_server() + self.of_engines()

    def of_server(self) -> bytes:
        """The server's own numbers as text. Always in this form, which every Prometheus reads: in OpenMetrics' the library
        changes the names of samples, but not of their families, when they hold a colon."""
        return generate_latest(self.registry)

    def of_engines(self) -> bytes:
        """The numbers of its engines, in the same form."""
        return generate_latest(self.engines)


class _Figures(Collector):
    """Figures of a service, read when somebody asks."""

    def __init__(self) -> None:
        self.stats: Callable[[], Mapping[str, Any]] | None = None

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are checked by the tests, and there may be no service yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        if self.stats is not None:
            yield from self.read(self.stats())

    @abstractmethod
    def read(self, stats: Mapping[str, Any]) -> Iterator[Metric]: ...


class _ServerFigures(_Figures):
    """Those of the server as a whole."""

    def read(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        for figure in SERVER_FIGURES:
            if figure.key in stats:
                family = _family(figure)
                family.add_metric([], stats[figure.key])
                yield family


class _EngineFigures(_Figures):
    """Those of each engine."""

    def read(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        engines = stats.get("engines") or [stats]
        for figure in ENGINE_FIGURES:
            family = _family(figure, ("engine",))
            for index, each in enumerate(engines):
                if figure.key in each:
                    family.add_metric([str(index)], each[figure.key])
            yield family
        yield from _of_engines(engines)


def _family(figure: Figure, labels: tuple[str, ...] = ()) -> Any:
    made = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
    return made(PREFIX + figure.name, figure.note, labels=labels)


def _of_engines(engines: list[Mapping[str, Any]]) -> Iterator[Metric]:
    """What is no plain number: whether they are up, how their requests ended, and their memory."""
    alive = GaugeMetricFamily(f"{PREFIX}engine_up", "1 while the engine takes work.", labels=("engine",))
    ended = CounterMetricFamily(f"{PREFIX}engine_finished", "Ends inside the engine.", labels=("engine", "reason"))
    memory = GaugeMetricFamily(f"{PREFIX}engine_memory_bytes", "Resident memory of its process.", labels=("engine",))
    for index, each in enumerate(engines):
        alive.add_metric([str(index)], each["state"] == "ready" if "state" in each else each.get("alive", True))
        for reason, count in each.get("finished", {}).items():
            ended.add_metric([str(index), reason], count)
        if each.get("pid") and (resident := _resident_bytes(each["pid"])) is not None:
            memory.add_metric([str(index)], resident)
    yield from (alive, ended, memory)
    codecs = {str(index): each["codec"] for index, each in enumerate(engines) if "codec" in each}
    if codecs:
        yield from _of_codecs(codecs)


def _of_codecs(codecs: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """The codec processes of engines that have one."""
    alive = GaugeMetricFamily(f"{PREFIX}codec_up", "1 while the engine's codec process takes work.", labels=("engine",))
    starts = CounterMetricFamily(
        f"{PREFIX}codec_starts", "Starts of the engine's codec process in this life of the engine.", labels=("engine",)
    )
    memory = GaugeMetricFamily(f"{PREFIX}codec_memory_bytes", "Resident memory of that process.", labels=("engine",))
    for index, codec in codecs.items():
        alive.add_metric([index], codec["state"] == "ready")
        starts.add_metric([index], codec["starts"])
        if codec["pid"] and (resident := _resident_bytes(codec["pid"])) is not None:
            memory.add_metric([index], resident)
    yield from (alive, starts, memory)


def _resident_bytes(pid: int) -> int | None:
    """None where it cannot be told: no Linux, or the process has just ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None
