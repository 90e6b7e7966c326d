"""Engine and server settings: frozen dataclasses checked when built. `DUETTS_*` variables are read here and nowhere else.

This room knows no torch, no HTTP and no model dimensions (those are in `model_config.py`).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from duetts.cores import usable_cores
from duetts.errors import ConfigError

MIB = 1 << 20
EMBEDDED = "duetts-mini"  # the model that ships with the package, also where a folder has that name

DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("none", "fp8", "int8")
ENGINES = ("model", "null")
DIALECTS = ("auto", "native", "openai")
UNKNOWN_FIELDS = ("warn", "ignore", "reject")
INSTRUCTIONS = ("tag", "ignore", "reject")
WAV_STREAM_SIZES = ("max", "2g", "zero")
LOG_LEVELS = ("debug", "info", "warning", "error")

ENVIRONMENT_PREFIX = "DUETTS_"
FISH_KVCACHE_ATTN = ("DUETTS_FISH_KVCACHE_ATTN", "VLLM_OMNI_FISH_KVCACHE_ATTN")
FISH_KVCACHE_ATTN_WORDS = {
    "auto": ("auto",), "on": ("1", "true", "yes", "on"), "off": ("0", "false", "no", "off", "disable", "disabled"),
    "required": ("required",),
}  # fmt: skip


def environment(values: Mapping[str, str] | None = None) -> dict[str, str]:
    """The `DUETTS_*` variables, prefix removed and lower-cased. Empty values count as unset."""
    source = os.environ if values is None else values
    ours = {name: value for name, value in source.items() if name.startswith(ENVIRONMENT_PREFIX) and value}
    return {name.removeprefix(ENVIRONMENT_PREFIX).lower(): value for name, value in ours.items()}


def cache_folder() -> Path:
    """Where duetts keeps what it can make again: `DUETTS_CACHE_DIR`, else the user's cache."""
    chosen = environment().get("cache_dir")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "duetts"


def voices_folder() -> Path | str:
    """Where stored voices live: `DUETTS_VOICES_DIR`, else the user's data folder, as nothing can make them again."""
    chosen = environment().get("voices_dir")
    if chosen:
        return chosen if "://" in chosen else Path(chosen)
    return Path(os.environ.get("XDG_DATA_HOME") or _home() / ".local" / "share") / "duetts" / "voices"


def visible_devices() -> str | None:
    """Which GPUs processes may use, as `CUDA_VISIBLE_DEVICES` has it; None is all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def ray_address() -> str | None:
    """The cluster of `RAY_ADDRESS`. Without one Ray stays on loopback; it learns that by a variable when it is imported."""
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    return os.environ.get("RAY_ADDRESS") or None


def fish_kvcache_attn(values: Mapping[str, str] | None = None) -> str:
    """How decode attention is chosen: auto, on, off or required, by `DUETTS_FISH_KVCACHE_ATTN` or vLLM-Omni's name for it.
    Raises `ConfigError` for any other word."""
    source = os.environ if values is None else values
    for name in FISH_KVCACHE_ATTN:
        word = source.get(name, "").strip().lower()
        if word:
            modes = [mode for mode, words in FISH_KVCACHE_ATTN_WORDS.items() if word in words]
            known = ", ".join(word for words in FISH_KVCACHE_ATTN_WORDS.values() for word in words)
            _require(bool(modes), f"{name} is {word!r}, which is none of {known}")
            return modes[0]
    return "auto"


def _home() -> Path:
    """The user's folder. A user that the machine does not know, as in many containers, has one among the temporary files."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"duetts-{os.getuid()}"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _at_least(minimum: float, **values: float) -> None:
    for name, value in values.items():
        _require(value >= minimum, f"{name} is {value}, below {minimum:g}")


def _one_of(known: tuple[str, ...], **values: str) -> None:
    for name, value in values.items():
        _require(value in known, f"{name} {value!r} is not one of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine runs. `dtype` "auto" is the checkpoint's on a GPU and float32 on a CPU.

    `max_model_len` bounds prompt and output together, in positions; None is the model's own, at most 8192. `kv_positions` is
    how many positions the KV cache has for all sequences together; None is room for `max_num_seqs` of ordinary length, as far
    as `gpu_memory_utilization`, a share of a GPU's memory, allows.
    A listener who would wait longer than `max_line_s` to be let in is refused at once; None lets the queue's bound decide.
    `quantization` keeps the decoders' matrices in 8 bits with a scale for each row; all else stays in `dtype`.
    A listener's first chunk has `first_chunk` frames, no chunk more than `largest_chunk`. `prefill_block` positions of prompts
    are read between two frames; None is 128 on a CPU and 512 on a GPU.
    On a CPU, where results are equal to the bit whoever else is served: `rows` sequences are always computed together,
    `codec_quantum` frames in one codec call, and each of the two parts uses `cpu_threads` threads.
    """

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str = "none"
    max_num_seqs: int = 8
    max_queue: int = 32
    max_model_len: int | None = None
    rows: int = 4
    codec_quantum: int = 4
    prefill_block: int | None = None
    kv_positions: int | None = None
    gpu_memory_utilization: float = 0.9
    first_chunk: int = 2
    largest_chunk: int = 16
    cpu_threads: int = field(default_factory=lambda: max(1, usable_cores() // 2))
    max_line_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of(DTYPES, dtype=self.dtype)
        _one_of(LOAD_FORMATS, load_format=self.load_format)
        _one_of(QUANTIZATIONS, quantization=self.quantization)
        _at_least(1, max_num_seqs=self.max_num_seqs, rows=self.rows, codec_quantum=self.codec_quantum)
        _at_least(1, cpu_threads=self.cpu_threads, first_chunk=self.first_chunk, largest_chunk=self.largest_chunk)
        _at_least(0, max_queue=self.max_queue, max_line_s=self.max_line_s or 0)
        share = self.gpu_memory_utilization
        _require(0 < share <= 1, f"gpu_memory_utilization is {share}; it is a share, above 0 and at most 1")
        block = 16 if self.prefill_block is None else self.prefill_block
        _require(block >= 16 and block % 16 == 0, f"prefill_block is {block}; it must be a multiple of 16")
        _at_least(2, max_model_len=2 if self.max_model_len is None else self.max_model_len)


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """How many engine processes there are, and how they are watched. Times are in seconds.

    `codec_device` "same": an engine decodes frames itself. Else it has a codec process: on the GPU after its own ("next"; on a
    CPU beside it), on the CPU, or that of all engines on "cuda:N".
    `kind` "null" is one that answers at once without a model, to measure all the rest.
    `listen` empty is a private unix socket for each engine; "tcp://host:port" takes that port and those after it, for networks
    that are trusted: messages are neither secret nor safe from change there. An engine that is silent for `silence_s` gets
    nothing new, after `stuck_s` it is killed. Restarts wait `restart_s`, doubling up to `restart_max_s`, from the start again
    after `steady_s` of service. While no engine is up, `max_waiting` requests wait for up to `wait_s`.
    """

    engines: int = 1
    codec_device: str = "same"
    kind: str = "model"
    listen: str = ""
    heartbeat_s: float = 0.2
    silence_s: float = 1.0
    stuck_s: float = 5.0
    start_limit_s: float = 600.0
    restart_s: float = 0.5
    restart_max_s: float = 30.0
    steady_s: float = 30.0
    wait_s: float = 10.0
    max_waiting: int = 64
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        _at_least(1, engines=self.engines)
        known = re.fullmatch(r"same|next|cpu|cuda:[0-9]{1,3}", self.codec_device) is not None
        _require(known, f"codec_device {self.codec_device!r} is not one of same, next, cpu, cuda:N")
        _require(self.kind in ENGINES, f"kind {self.kind!r} of engine is not one of {', '.join(ENGINES)}")
        _at_least(0.01, heartbeat_s=self.heartbeat_s, start_limit_s=self.start_limit_s, restart_s=self.restart_s)
        _at_least(0, steady_s=self.steady_s, wait_s=self.wait_s, max_waiting=self.max_waiting, drain_s=self.drain_s)
        _at_least(self.restart_s, restart_max_s=self.restart_max_s)
        _at_least(2 * self.heartbeat_s, silence_s=self.silence_s)
        _at_least(self.silence_s, stuck_s=self.stuck_s)
        fit = not self.listen or re.fullmatch(r"tcp://[^:/]+:[0-9]{1,5}", self.listen) is not None
        _require(fit, f"the engines' address {self.listen!r} is not tcp://host:port")

    def address(self, index: int) -> str:
        """The address of one engine when `listen` is set."""
        host, port = self.listen.rsplit(":", 1)
        return f"{host}:{int(port) + index}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may cost before anything is computed for it, and what of references is kept.

    `reference_queue` clips may wait to be fetched, and as many to be decoded. Codes of references are kept up to
    `reference_cache_bytes` in memory and `reference_disk_bytes` in the cache folder; 0 keeps none there. A socket is closed
    if its first message does not come within `socket_first_s`, and when nothing has happened on it for `socket_idle_s`; one
    of Fish Audio's protocol, whose clients keep sockets for later, after `live_idle_s`.
    """

    max_body_bytes: int = 16 * MIB
    max_input_chars: int = 32768
    max_references: int = 4
    reference_bytes: int = 10 * MIB
    reference_min_s: float = 1.0
    reference_max_s: float = 30.0
    references_total_s: float = 60.0
    reference_queue: int = 128
    reference_cache_bytes: int = 512 * MIB
    reference_disk_bytes: int = 256 * MIB
    max_new_tokens: int = 2048
    batch_items: int = 32
    socket_first_s: float = 10.0
    socket_idle_s: float = 30.0
    live_idle_s: float = 600.0

    def __post_init__(self) -> None:
        _at_least(1024, max_body_bytes=self.max_body_bytes, reference_bytes=self.reference_bytes)
        _at_least(1, max_input_chars=self.max_input_chars, max_references=self.max_references)
        _at_least(1, max_new_tokens=self.max_new_tokens, reference_queue=self.reference_queue, batch_items=self.batch_items)
        _at_least(0.01, socket_first_s=self.socket_first_s, socket_idle_s=self.socket_idle_s, live_idle_s=self.live_idle_s)
        _at_least(0, reference_cache_bytes=self.reference_cache_bytes, reference_disk_bytes=self.reference_disk_bytes)
        least, most = self.reference_min_s, self.reference_max_s
        _require(0 < least <= most, f"reference seconds {least}..{most} are no range")


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """Clips that requests name by an address. With `domains` only these hosts are asked, and they may have addresses that are
    not public; without, any host that has only public ones. A clip must be there within `fetch_s`. `folder` has the files that
    requests may name by path; without it there are none."""

    domains: tuple[str, ...] = ()
    folder: Path | None = None
    fetch_s: float = 10.0

    def __post_init__(self) -> None:
        for domain in self.domains:
            fit = re.fullmatch(r"[A-Za-z0-9_.-]{1,253}|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*", domain) is not None
            _require(fit, f"domains: {domain!r} is not the name or address of a host, as in example.org")
        _at_least(0.01, fetch_s=self.fetch_s)


@dataclass(frozen=True, slots=True)
class VoicesConfig:
    """Voices that have names. The folder is made when the first one is stored; it is a path or the URL of an object store.

    `default_voice` is a name, "none" for the bare model, "seed:N" for a clip that the model speaks once with that seed, or
    "auto": the model's own preset, else such a clip, else (without trained weights) the bare model. `aliases` are pairs of
    another name and a voice's. `max_bytes` bounds the files of all clips together. `overwrite` is what uploads do that do not
    say whether they replace; `share_audio` gives the clips back to whoever asks.
    """

    folder: Path | str = field(default_factory=voices_folder)
    default_voice: str = "auto"
    aliases: tuple[tuple[str, str], ...] = ()
    max_voices: int = 1000
    max_bytes: int = 2048 * MIB
    overwrite: bool = False
    consent_required: bool = True
    share_audio: bool = False

    def __post_init__(self) -> None:
        _at_least(0, max_voices=self.max_voices, max_bytes=self.max_bytes)
        _require(bool(self.default_voice.strip()), "the default voice is empty; say none for the bare model")
        seeded = self.default_voice.startswith("seed:")
        _require(not seeded or self.default_seed is not None, f"the default voice {self.default_voice!r} is not like seed:7")

    @property
    def default_seed(self) -> int | None:
        """N of "seed:N"."""
        match = re.fullmatch(r"seed:([0-9]{1,18})", self.default_voice)
        return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which model is served: a folder or a hub id, and of that the branch, tag or commit. None is duetts-mini."""

    model: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Who may use the server. Without `keys` everybody who reaches the port; with them whoever sends one.

    `keys` are secrets: they are in no representation, log or error. `cors_origins` are the origins of web pages whose scripts
    may use the server, "*" for all. `public_catalog`: the lists of voices and models may be read without a key. `rate_limit` is
    how many requests a minute each key may make; without keys each client's address.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    public_catalog: bool = False
    rate_limit: int | None = None

    def __post_init__(self) -> None:
        _at_least(1, rate_limit=1 if self.rate_limit is None else self.rate_limit)
        for number, key in enumerate(self.keys, 1):
            fit = re.fullmatch(r"[!-+\--~]{1,512}", key) is not None
            _require(fit, f"API key {number} of {len(self.keys)} is not 1 to 512 visible ASCII characters without a comma")
        for origin in self.cors_origins:
            fit = origin in ("*", "null") or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#*]+", origin) is not None
            _require(fit, f"cors_origins: {origin!r} is not an origin such as https://example.org or http://localhost:3000")


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """With `certfile` the server speaks TLS. `ca_certs` are the authorities one of which must have signed a client's
    certificate. All are PEM files."""

    certfile: Path | None = None
    keyfile: Path | None = None
    ca_certs: Path | None = None

    def __post_init__(self) -> None:
        for name, path in {"keyfile": self.keyfile, "ca_certs": self.ca_certs}.items():
            _require(path is None or self.certfile is not None, f"{name} is of no use without a certificate, ssl_certfile")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is written down. Never the text of users. `requests`: a line for each request; `file` None is standard error."""

    level: str = "info"
    file: Path | None = None
    requests: bool = True

    def __post_init__(self) -> None:
        _one_of(LOG_LEVELS, level=self.level)


@dataclass(frozen=True, slots=True)
class RequestsConfig:
    """How requests are understood. `openai_aliases`: OpenAI's names of its speech models mean the native one. `dialect` decides
    on defaults (format, rate of raw PCM, OpenAI's voices): auto is by the request's model name. Fields that are unknown are
    listed in the answer (warn), passed over, or refused. Short `instructions` become a tag in the text, or have no effect, or
    are refused. `wav_stream_size` stands in headers of WAV streams. `early_headers`: a stream's status does not wait for its
    first audio."""

    openai_aliases: bool = True
    dialect: str = "auto"
    unknown_fields: str = "warn"
    instructions: str = "tag"
    max_instructions_chars: int = 4096
    wav_stream_size: str = "max"
    early_headers: bool = False

    def __post_init__(self) -> None:
        _one_of(DIALECTS, dialect=self.dialect)
        _one_of(UNKNOWN_FIELDS, unknown_fields=self.unknown_fields)
        _one_of(INSTRUCTIONS, instructions=self.instructions)
        _one_of(WAV_STREAM_SIZES, wav_stream_size=self.wav_stream_size)
        _at_least(0, max_instructions_chars=self.max_instructions_chars)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side. `served_model_names` are the ids that requests may name; the first is the native id.

    `uds` is the path of a unix socket, in the place of `host` and `port`; `workers` is the number of HTTP processes. With work
    open and no progress for `watchdog_s` seconds the server calls itself unhealthy.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    root_path: str = ""
    workers: int = 1
    watchdog_s: float = 60.0
    requests: RequestsConfig = field(default_factory=RequestsConfig)
    limits: Limits = field(default_factory=Limits)
    media: MediaConfig = field(default_factory=MediaConfig)
    voices: VoicesConfig = field(default_factory=VoicesConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    logs: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        _require(bool(self.served_model_names), "at least one served model name is needed")
        _require(all(self.served_model_names), "served_model_names has an empty name")
        _require(0 <= self.port <= 65535, f"port {self.port} is not in 0..65535")
        _require(not self.root_path or self.root_path.startswith("/"), f"root_path {self.root_path!r} does not begin with /")
        _at_least(1, watchdog_s=self.watchdog_s, workers=self.workers)
