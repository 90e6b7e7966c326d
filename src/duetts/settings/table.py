"""The one table of a server's settings. From it come the options of `duetts serve`, the `DUETTS_*` variables, the keys of a
configuration file and docs/configuration.md. It names fields of `config.py`; defaults and limits stand only there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from duetts.config import (
    AccessConfig,
    EngineConfig,
    Limits,
    LogConfig,
    MediaConfig,
    ModelChoice,
    ProcessConfig,
    RequestsConfig,
    ServerConfig,
    TlsConfig,
    VoicesConfig,
)

# The headings of a configuration file, and what their settings fill.
SECTIONS: dict[str, type] = {
    "model": ModelChoice,
    "server": ServerConfig,
    "requests": RequestsConfig,
    "access": AccessConfig,
    "tls": TlsConfig,
    "engine": EngineConfig,
    "processes": ProcessConfig,
    "limits": Limits,
    "media": MediaConfig,
    "voices": VoicesConfig,
    "logs": LogConfig,
}
# Fields that are not settings: the sections inside `ServerConfig`.
NESTED = {f"server.{section}" for section in ("requests", "limits", "media", "voices", "access", "tls", "logs")}


@dataclass(frozen=True)
class Setting:
    """One setting. Its flag is `--name` with dashes, its variable `DUETTS_NAME`, its key in a file `name`, alone or under its
    section.

    `target` is section and field. `flags` are names that other servers have for it. `words` stand for values. `standard`
    tells of a default that depends on the machine. `quiet` ones are not in `--help`; a `secret` is never shown.
    """

    name: str
    target: str
    note: str
    flags: tuple[str, ...] = ()
    words: Mapping[str, Any] = field(default_factory=dict)
    standard: str = ""
    quiet: bool = False
    secret: bool = False

    @property
    def section(self) -> str:
        return self.target.partition(".")[0]

    @property
    def attribute(self) -> str:
        """The field of the section's dataclass; empty if there is none."""
        return self.target.partition(".")[2]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "DUETTS_" + self.name.upper()

    @cached_property
    def optional(self) -> bool:
        """Whether None is a value."""
        return type(None) in get_args(self._annotation)

    @cached_property
    def kind(self) -> Any:
        """str, int, float, bool, Path, or a tuple of strings or of pairs; without None."""
        if get_origin(self._annotation) in (Union, types.UnionType):
            return next(kind for kind in get_args(self._annotation) if kind is not type(None))
        return self._annotation

    @cached_property
    def takes_url(self) -> bool:
        """Whether the URL of a store may stand in the place of a path."""
        return {Path, str} <= set(get_args(self._annotation))

    @property
    def is_switch(self) -> bool:
        return self.kind is bool and not self.words

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def is_size(self) -> bool:
        """Whether it counts bytes, so that units may be written."""
        return self.name.endswith("_bytes")

    @cached_property
    def default(self) -> Any:
        """What holds if nobody says anything."""
        chosen = next((one for one in fields(SECTIONS[self.section]) if one.name == self.attribute), None)
        if chosen is None or (chosen.default is MISSING and chosen.default_factory is MISSING):
            return None
        if chosen.default_factory is not MISSING:
            make: Callable[[], Any] = chosen.default_factory
            return make()
        return chosen.default

    @cached_property
    def _annotation(self) -> Any:
        return get_type_hints(SECTIONS[self.section])[self.attribute] if self.attribute else Path | None


def _listed(section: str, *rows: Setting) -> tuple[Setting, ...]:
    assert all(row.section == section for row in rows), f"a row of {section} is in the wrong place"
    return rows


SETTINGS: tuple[Setting, ...] = (
    *_listed(
        "model",
        Setting(
            "model", "model.model", "Folder or hub id of the model; without one duetts-mini.",
            ("--model-path", "--llama-checkpoint-path"), standard="duetts-mini",
        ),
        Setting("revision", "model.revision", "Branch, tag or commit of a hub id."),
    ),
    *_listed(
        "server",
        Setting("host", "server.host", "Address to listen on."),
        Setting("port", "server.port", "Port to listen on; 0 takes a free one."),
        Setting("uds", "server.uds", "Unix socket to listen on, in the place of host and port."),
        Setting(
            "workers", "server.workers", "HTTP processes: one carries about 1,500 seconds of audio a second.",
            ("--api-server-count",),
        ),
        Setting("root_path", "server.root_path", "Path prefix that a proxy puts before all paths."),
        Setting(
            "served_model_name", "server.served_model_names", "Ids that requests may name; the first is the native one.",
            standard="the model",
        ),
        Setting(
            "watchdog", "server.watchdog_s", "Seconds without progress, while work is open, until /health says unhealthy.",
            ("--watchdog-seconds",),
        ),
    ),
    *_listed(
        "requests",
        Setting("openai_aliases", "requests.openai_aliases", "Whether OpenAI's model names mean the native model."),
        Setting(
            "dialect", "requests.dialect",
            "Whose defaults hold for format, rate of raw PCM and OpenAI's voices: auto (by the model's name), native, openai.",
        ),
        Setting(
            "unknown_fields", "requests.unknown_fields",
            "Unknown fields of a request: warn (list them in its answer), ignore or reject.",
        ),
        Setting(
            "instructions", "requests.instructions",
            "Instructions of a request: tag (up to 80 characters become a tag in the text), ignore or reject.",
        ),
        Setting("max_instructions_chars", "requests.max_instructions_chars", "Characters of a request's instructions.",
                ("--tts-max-instructions-length",)),
        Setting(
            "wav_stream_size", "requests.wav_stream_size",
            "Sizes in the header of a streamed WAV: max (4 GiB - 1), or for players that need it 2g (2 GiB - 1) or zero.",
        ),
        Setting(
            "early_headers", "requests.early_headers",
            "Whether the status of a stream is sent before its first audio; what fails until then no longer has a status.",
        ),
    ),
    *_listed(
        "access",
        Setting(
            "api_key", "access.keys", "Key that requests must send; several are possible. A flag can be seen by other users of "
            "the machine: a variable or api_key_file cannot.", secret=True,
        ),
        Setting("api_key_file", "access.", "File with keys, one a line; lines that begin with # are comments."),
        Setting(
            "cors_origin", "access.cors_origins", "Origin of web pages that may use the server, for example "
            "https://example.org; * for all.", ("--cors-origins", "--allowed-origins"),
        ),
        Setting("public_catalog", "access.public_catalog", "Whether the lists of voices and models need no key."),
        Setting(
            "rate_limit", "access.rate_limit",
            "Requests a minute for each key; without keys for each client's address. Items of a batch and utterances count.",
        ),
    ),
    *_listed(
        "tls",
        Setting("ssl_certfile", "tls.certfile", "Certificate chain (PEM); with it the server speaks TLS."),
        Setting("ssl_keyfile", "tls.keyfile", "Private key (PEM), if it is not in ssl_certfile."),
        Setting("ssl_ca_certs", "tls.ca_certs", "Authorities (PEM) that must have signed a client's certificate."),
    ),
    *_listed(
        "engine",
        Setting("device", "engine.device", "auto, cpu, cuda or cuda:N."),
        Setting("dtype", "engine.dtype", "auto, float32, bfloat16 or float16."),
        Setting("quantization", "engine.quantization", "none, or the decoders' matrices in 8 bits: fp8 or int8."),
        Setting("load_format", "engine.load_format", "auto, or dummy for seeded random weights of the right shapes."),
        Setting("max_num_seqs", "engine.max_num_seqs", "Requests that are spoken at the same time.", ("--max-concurrent",)),
        Setting("max_queue", "engine.max_queue", "Requests that may wait; beyond them 429."),
        Setting("max_wait", "engine.max_line_s", "Seconds that a listener may have to wait for a turn; beyond them 429."),
        Setting(
            "max_model_len", "engine.max_model_len", "Positions of prompt and audio together.",
            ("--context-length",), standard="the model's own, at most 8192",
        ),
        Setting(
            "kv_positions", "engine.kv_positions", "Positions that the KV cache has for all requests together.",
            standard="room for max_num_seqs of ordinary length", quiet=True,
        ),
        Setting("gpu_memory_utilization", "engine.gpu_memory_utilization", "Share of a GPU's memory that may be used."),
        Setting("prefill_block", "engine.prefill_block", "Prompt positions that are read between two frames.",
                standard="128 on a CPU, 512 on a GPU", quiet=True),
        Setting("first_chunk", "engine.first_chunk", "Frames of a listener's first chunk.", quiet=True),
        Setting("largest_chunk", "engine.largest_chunk", "Frames of a chunk at most.", quiet=True),
        Setting("rows", "engine.rows", "Sequences that a CPU always computes together.", quiet=True),
        Setting("codec_quantum", "engine.codec_quantum", "Frames that a CPU decodes in one call.", quiet=True),
        Setting("cpu_threads", "engine.cpu_threads", "Threads of each of the two parts on a CPU.",
                standard="half of the CPUs"),
        Setting("seed", "engine.seed", "Seed of dummy weights.", quiet=True),
    ),
    *_listed(
        "processes",
        Setting(
            "engines", "processes.engines", "Engine processes: one for each GPU; on a CPU they share its threads.",
            ("--replicas", "--data-parallel-size"),
        ),
        Setting(
            "codec_device", "processes.codec_device", "same (an engine decodes its frames itself), or a codec process for each "
            "engine: next (on the GPU after the engine's; on a CPU beside it), cpu, cuda:N.",
        ),
        Setting("engine_kind", "processes.kind", "model, or null: one without a model that answers at once, to measure the "
                "rest.", ("--engine",), quiet=True),
        Setting("engine_listen", "processes.listen", "tcp://host:port for engines that are reached over a trusted network.",
                quiet=True),
        Setting("init_timeout", "processes.start_limit_s", "Seconds that an engine may take to start.",
                ("--stage-init-timeout",)),
        Setting("drain_timeout", "processes.drain_s", "Seconds for open requests after a signal to stop."),
        Setting("heartbeat", "processes.heartbeat_s", "Seconds between an engine's signs of life.", quiet=True),
        Setting("silence", "processes.silence_s", "Seconds of silence after which an engine gets nothing new.", quiet=True),
        Setting("stuck", "processes.stuck_s", "Seconds of silence after which an engine is started anew.", quiet=True),
        Setting("restart", "processes.restart_s", "Seconds before the first restart; they double.", quiet=True),
        Setting("restart_max", "processes.restart_max_s", "Seconds before a restart at most.", quiet=True),
        Setting("steady", "processes.steady_s", "Seconds of service after which restarts are quick again.", quiet=True),
        Setting("engine_wait", "processes.wait_s", "Seconds that requests wait while no engine is up.", quiet=True),
        Setting("max_waiting", "processes.max_waiting", "Requests that may wait while no engine is up.", quiet=True),
    ),
    *_listed(
        "limits",
        Setting("max_input_chars", "limits.max_input_chars", "Characters of a text.", ("--max-text-length",)),
        Setting("max_body_bytes", "limits.max_body_bytes", "Bytes of a request's body."),
        Setting("max_new_tokens", "limits.max_new_tokens", "Frames of a piece of text, at 21.5 a second."),
        Setting("batch_items", "limits.batch_items", "Items of a batch.", ("--batch-max-items", "--tts-batch-max-items")),
        Setting("max_references", "limits.max_references", "Clips of a request."),
        Setting("reference_bytes", "limits.reference_bytes", "Bytes of a clip's file."),
        Setting("ref_min_seconds", "limits.reference_min_s", "Seconds of a clip at least."),
        Setting("ref_max_seconds", "limits.reference_max_s", "Seconds of a clip at most."),
        Setting("ref_total_seconds", "limits.references_total_s", "Seconds of a request's clips together."),
        Setting("reference_queue", "limits.reference_queue", "Clips that may wait to be fetched or decoded.", quiet=True),
        Setting("reference_cache_bytes", "limits.reference_cache_bytes", "Bytes of encoded clips in memory; 0 keeps none."),
        Setting("reference_disk_bytes", "limits.reference_disk_bytes", "Bytes of encoded clips on disk; 0 keeps none."),
        Setting("socket_first", "limits.socket_first_s", "Seconds until the first message of a socket.", quiet=True),
        Setting("socket_idle", "limits.socket_idle_s", "Seconds until an idle socket is closed."),
        Setting("live_idle", "limits.live_idle_s", "The same for Fish Audio's sockets, which clients keep for later."),
    ),
    *_listed(
        "media",
        Setting(
            "allowed_media_domains", "media.domains", "Hosts that clips are fetched from, and no others; they may be inside "
            "your network. none: nobody. Without any: every host whose addresses are public.", ("--allowed-media-domain",),
        ),
        Setting("allowed_local_media_path", "media.folder", "Folder of files that requests may name by file:// or path."),
        Setting("fetch_timeout", "media.fetch_s", "Seconds in which a clip must be fetched."),
    ),
    *_listed(
        "voices",
        Setting("voices_dir", "voices.folder", "Folder of stored voices, or a URL that fsspec can reach (s3://, gs://).",
                ("--custom-voice-dir",),
                standard="duetts/voices in the user's data folder"),
        Setting("default_voice", "voices.default_voice", "A voice's name, seed:N, none (the bare model) or auto."),
        Setting("voice_alias", "voices.aliases", "Another name of a voice, for example alloy=anna."),
        Setting("max_voices", "voices.max_voices", "Voices that may be stored."),
        Setting("max_voice_bytes", "voices.max_bytes", "Bytes of all stored clips together."),
        Setting("voice_overwrite", "voices.overwrite", "Whether uploads replace a voice unless they say otherwise."),
        Setting("voice_consent", "voices.consent_required", "Whether an upload must name the speaker's consent: required or "
                "optional.", words={"required": True, "optional": False}),
        Setting("share_voice_audio", "voices.share_audio", "Whether clips of stored voices may be downloaded."),
    ),
    *_listed(
        "logs",
        Setting("log_level", "logs.level", "debug, info, warning or error.", ("--uvicorn-log-level",)),
        Setting("log_file", "logs.file", "File that the log is written to.", standard="standard error"),
        Setting("log_requests", "logs.requests", "Whether each request has a line. User text is never logged."),
    ),
)  # fmt: skip
BY_NAME = {setting.name: setting for setting in SETTINGS}
# Sections that people look for, and why there are none.
MISSING_SECTIONS = {
    "codec": "its device is codec_device of processes, and its type the one that is right there; chunks are first_chunk and "
    "largest_chunk of engine",
    "placement": "replicas are engines of processes, one on each GPU, and codec_device there says where the codec is; a model "
    "is not spread over GPUs",
    "overrides": "what follows from the machine is in profiles; several files may share one base",
    "sampling": "the model's own defaults hold, and requests say what they want else",
}
# Variables that are no settings of a server, and what reads them.
OTHER_VARIABLES = {
    "config": "The configuration file, as --config.",
    "profile": "The profile, as --profile.",
    "cache_dir": "Folder of what can be made again: duetts-mini, codes of clips.",
    "fish_kvcache_attn": "Attention of a frame by duetts' own kernel on a GPU: auto, on, off or required.",
    "golden_dir": "Recorded arrays that tests compare with.",
}


@dataclass(frozen=True)
class Foreign:
    """A flag of another server that is no setting here. It `sets` settings; or, with a `note` that says why, has no effect.
    A value other than `only` is refused: what it asks for would be missing. `takes_value` as the other server has it."""

    note: str = ""
    takes_value: bool = False
    sets: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] | None = None


FOREIGN: dict[str, Foreign] = {
    "--omni": Foreign(),
    "--half": Foreign(sets={"dtype": "float16"}),
    "--disable-uvicorn-access-log": Foreign(sets={"log_requests": "off"}),
    "--disable-log-requests": Foreign(sets={"log_requests": "off"}),
    "--trust-remote-code": Foreign("code from a model's folder is never run"),
    "--async-chunk": Foreign("audio is always handed over while it is made"),
    "--no-async-chunk": Foreign("audio is always handed over while it is made"),
    "--enable-chunked-prefill": Foreign("prompts are always read in blocks"),
    "--enable-prefix-caching": Foreign("beginnings of prompts are always shared"),
    "--enforce-eager": Foreign("nothing is compiled"),
    "--compile": Foreign("nothing is compiled"),
    "--log-stats": Foreign("/metrics has them"),
    "--disable-log-stats": Foreign("/metrics has them"),
    "--max-log-len": Foreign("no text is logged", takes_value=True),
    "--skip-server-warmup": Foreign("a server is ready when it has spoken"),
    "--omni-lb-policy": Foreign("work goes to the engine that has the least of it", takes_value=True),
    "--lb": Foreign("work goes to the engine that has the least of it", takes_value=True),
    "--mem-fraction-static": Foreign("memory follows from max_num_seqs and max_model_len", takes_value=True),
    "--tensor-parallel-size": Foreign("a model is not spread over GPUs; --engines starts one on each", True, only=("1",)),
    "--pipeline-parallel-size": Foreign("a model is not spread over GPUs", True, only=("1",)),
    "--decoder-checkpoint-path": Foreign("the codec is looked for in the model's folder", True, only=()),
    "--download-dir": Foreign("HF_HOME says where models of the hub are kept", True, only=()),
    "--forced-aligner": Foreign("there are no word timestamps yet", True, only=()),
    "--enable-sleep-mode": Foreign("an engine cannot sleep yet", only=()),
    "--listen": Foreign("", True),  # host:port, taken apart where the line is read
    "--stage-overrides": Foreign("", True),  # JSON, also taken apart there
}
