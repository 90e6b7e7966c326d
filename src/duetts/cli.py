"""The `duetts` command. Everything heavy is imported inside the command that needs it, so that help answers at once."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from duetts.cli_voices import voices_app
from duetts.config import EngineConfig, Limits, ProcessConfig, ServerConfig, environment
from duetts.errors import ConfigError, DuettsError, ModelNotFound, NotEnoughMemory

app = typer.Typer(name="duetts", help="A speech server for dual-AR text-to-speech models.", add_completion=False,
                  no_args_is_help=True, pretty_exceptions_enable=False)  # fmt: skip

app.add_typer(voices_app, name="voices")

ModelArgument = Annotated[str | None, typer.Argument(help="Model folder or hub id. Without it: duetts-mini.")]
DeviceOption = Annotated[str, typer.Option(envvar="DUETTS_DEVICE", help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[str, typer.Option(envvar="DUETTS_DTYPE", help="auto, float32, bfloat16 or float16.")]
FormatOption = Annotated[
    str, typer.Option(envvar="DUETTS_LOAD_FORMAT", help="auto, or dummy for seeded random weights of the right shapes.")
]
SeqsOption = Annotated[int, typer.Option(envvar="DUETTS_MAX_NUM_SEQS", help="Requests that are spoken at the same time.")]
QueueOption = Annotated[int, typer.Option(envvar="DUETTS_MAX_QUEUE", help="Requests that may wait; beyond them 429.")]
LengthOption = Annotated[
    int | None, typer.Option(envvar="DUETTS_MAX_MODEL_LEN", help="Positions of prompt and audio together.")
]

EXIT_FAILURE, EXIT_MODEL, EXIT_MEMORY = 1, 3, 4


def fail(error: Exception) -> NoReturn:
    """Prints one line and leaves with the code that scripts can rely on."""
    print(f"duetts: {error}", file=sys.stderr)
    codes = {ModelNotFound: EXIT_MODEL, NotEnoughMemory: EXIT_MEMORY, ConfigError: 2}
    raise typer.Exit(next((code for kind, code in codes.items() if isinstance(error, kind)), EXIT_FAILURE))


@app.command()
def say(
    text: Annotated[str, typer.Argument(help="What to speak; - reads standard input.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="WAV file to write.")] = Path("speech.wav"),
    model: Annotated[str | None, typer.Option(envvar="DUETTS_MODEL", help="Folder or hub id. Without it: duetts-mini.")] = None,
    voice: Annotated[str, typer.Option(help="A stored voice or preset; none is the bare model.")] = "",
    ref_audio: Annotated[Path | None, typer.Option(help="Clip of the voice to clone; needs --ref-text.")] = None,
    ref_text: Annotated[str | None, typer.Option(help="What is said in the clip.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same audio.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="At most this many frames.")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    load_format: FormatOption = "auto",
) -> None:
    """Speak a text into a WAV file, without a server."""
    from duetts.tts import TTS

    try:
        with TTS(model, device=device, dtype=dtype, load_format=load_format, max_num_seqs=1) as tts:
            audio = tts.say(
                sys.stdin.read() if text == "-" else text, voice=voice, reference=ref_audio, reference_text=ref_text, seed=seed,
                temperature=temperature, max_new_tokens=max_new_tokens,
            )  # fmt: skip
            audio.save(output)
    except (DuettsError, OSError) as error:
        fail(error)
    timings = audio.outcome.timings
    rtf = timings.total_s / audio.duration_s
    print(
        f"{output}: {audio.duration_s:.2f} s at {audio.sample_rate} Hz, finish {audio.outcome.reason}, seed {audio.seed}, "
        f"first audio {1000 * timings.first_audio_s:.0f} ms, RTF {rtf:.2f}"
    )


@app.command()
def serve(
    model: ModelArgument = None,
    host: Annotated[str, typer.Option(envvar="DUETTS_HOST")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="DUETTS_PORT", help="0 takes a free one.")] = 8000,
    root_path: Annotated[str, typer.Option(envvar="DUETTS_ROOT_PATH", help="Path prefix behind a proxy.")] = "",
    served_model_name: Annotated[list[str] | None, typer.Option(help="Ids that requests may name; repeatable.")] = None,
    revision: Annotated[str | None, typer.Option(envvar="DUETTS_REVISION", help="Branch, tag or commit of a hub id.")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    load_format: FormatOption = "auto",
    max_input_chars: Annotated[int, typer.Option(envvar="DUETTS_MAX_INPUT_CHARS", help="Longest text.")] = 32768,
    max_body_bytes: Annotated[int, typer.Option(envvar="DUETTS_MAX_BODY_BYTES", help="Largest request body.")] = 16 << 20,
    max_num_seqs: SeqsOption = 8,
    max_queue: QueueOption = 32,
    max_model_len: LengthOption = None,
    engines: Annotated[
        int,
        typer.Option(
            "--engines",
            "--data-parallel-size",
            "--replicas",
            envvar="DUETTS_ENGINES",
            help="Engine processes: one for each GPU; on a CPU they share its threads.",
        ),
    ] = 1,
    drain_timeout: Annotated[
        float, typer.Option(envvar="DUETTS_DRAIN_TIMEOUT", help="Seconds for open requests after a signal to stop.")
    ] = 30.0,
    omni: Annotated[bool, typer.Option("--omni", hidden=True, help="Accepted for command lines of other servers.")] = False,
) -> None:
    """Serve a model over HTTP."""
    from duetts.serving import EMBEDDED, Plan
    from duetts.serving import serve as serve_plan

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log = logging.getLogger("duetts")
    warn_unknown_environment(log)
    if model is None:
        log.info("no model was named: serving duetts-mini")
    try:
        engine = EngineConfig(
            device=device, dtype=dtype, load_format=load_format, max_num_seqs=max_num_seqs,
            max_queue=max_queue, max_model_len=max_model_len,
        )  # fmt: skip
        name = model or EMBEDDED
        limits = Limits(max_input_chars=max_input_chars, max_body_bytes=max_body_bytes)
        names = tuple(served_model_name or [name])
        config = ServerConfig(names, host=host, port=port, root_path=root_path, limits=limits)
        plan = Plan(name, revision, engine, ProcessConfig(engines=engines, drain_s=drain_timeout), config)
        code = asyncio.run(serve_plan(plan))
    except DuettsError as error:
        fail(error)
    raise typer.Exit(code)


@app.command(hidden=True)
def find(model: ModelArgument = None, revision: str | None = None) -> None:
    """Fetch or make a model and print where it is, or why not, as JSON. `serve` starts this, to load no torch itself."""
    from duetts.serving import finding
    from duetts.tts import resolve_model

    try:
        print(finding(resolve_model(model, revision)))
    except DuettsError as error:
        print(finding(error))


@app.command()
def doctor(
    model: ModelArgument = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    max_num_seqs: SeqsOption = 8,
    max_model_len: LengthOption = None,
) -> None:
    """Say what is in a model folder, what this machine has, and what would not fit."""
    from duetts.doctor import examine
    from duetts.tts import resolve_model

    try:
        engine = EngineConfig(device=device, dtype=dtype, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        findings = list(examine(resolve_model(model), engine))
    except DuettsError as error:
        fail(error)
    for finding in findings:
        sign = {None: " ", True: "+", False: "!"}[finding.good]
        print(f"{sign} {finding.topic:<15} {finding.text}")
    if any(finding.good is False for finding in findings):
        raise typer.Exit(EXIT_FAILURE)


KNOWN_VARIABLES = {
    "device", "dtype", "load_format", "max_num_seqs", "max_queue", "max_model_len", "host", "port", "root_path", "model",
    "revision", "max_input_chars", "max_body_bytes", "cache_dir", "golden_dir", "engines", "drain_timeout",
}  # fmt: skip


def warn_unknown_environment(log: logging.Logger) -> None:
    """A mistyped variable should not pass in silence."""
    for name in sorted(environment().keys() - KNOWN_VARIABLES):
        log.warning("the environment variable DUETTS_%s is unknown and has no effect", name.upper())


def main() -> None:
    """Entry point of the command."""
    app()
