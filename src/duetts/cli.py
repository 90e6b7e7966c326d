"""The `duetts` command. Everything heavy is imported inside the command that needs it, so that help answers at once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from duetts.cli_bench import bench
from duetts.cli_voices import voices_app
from duetts.config import EMBEDDED, EngineConfig, LogConfig, ProcessConfig, environment, ray_address
from duetts.errors import ConfigError, DuettsError, FastPathMissing, ModelNotFound, NotEnoughMemory
from duetts.logs import start_log
from duetts.settings.arguments import Given, rewrite, takes_settings
from duetts.settings.values import Value, build

# Without markup: the library for it takes longer to load than all the rest.
app = typer.Typer(name="duetts", help="A speech server for dual-AR text-to-speech models.", add_completion=False,
                  no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)  # fmt: skip

app.add_typer(voices_app, name="voices")
app.command()(bench)

ModelArgument = Annotated[str | None, typer.Argument(help="Model folder or hub id. Without it: duetts-mini.")]
CodecOption = Annotated[str, typer.Option(envvar="DUETTS_CODEC_DEVICE", help="same, next, cpu or cuda:N.")]
DeviceOption = Annotated[str, typer.Option(envvar="DUETTS_DEVICE", help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[str, typer.Option(envvar="DUETTS_DTYPE", help="auto, float32, bfloat16 or float16.")]
FormatOption = Annotated[
    str, typer.Option(envvar="DUETTS_LOAD_FORMAT", help="auto, or dummy for seeded random weights of the right shapes.")
]
SeqsOption = Annotated[int, typer.Option(envvar="DUETTS_MAX_NUM_SEQS", help="Requests that are spoken at the same time.")]
LengthOption = Annotated[
    int | None, typer.Option(envvar="DUETTS_MAX_MODEL_LEN", help="Positions of prompt and audio together.")
]

EXIT_FAILURE, EXIT_MODEL, EXIT_MEMORY, EXIT_FAST_PATH = 1, 3, 4, 5


def fail(error: Exception) -> NoReturn:
    """Prints one line and leaves with the code that scripts can rely on."""
    print(f"duetts: {error}", file=sys.stderr)
    codes = {ModelNotFound: EXIT_MODEL, NotEnoughMemory: EXIT_MEMORY, FastPathMissing: EXIT_FAST_PATH, ConfigError: 2}
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


class SettingsCommand(TyperCommand):
    """A command whose line may be written as for other servers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The line in the one form that the options are declared in. Help is given here: parsing the rest of the line
        first would take half as long again."""
        if "--help" in args:
            typer.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, rewrite(args))


def read_settings(line: Mapping[str, Any]) -> tuple[dict[str, Value], list[str]]:
    """The settings of a line, the environment, the file that one of them names and a profile; and what should be told of them.

    Raises `ConfigError`.
    """
    from duetts.deploy.profiles import settle

    given = Given(line)
    values, told = settle(given.flags, environment(), given.config, given.profile)
    return values, [*given.notes, *told]


@app.command(cls=SettingsCommand)
@takes_settings
def serve(
    line: dict[str, Any],
    ray: Annotated[bool, typer.Option("--ray", help="Serve by Ray Serve, on one machine or many (duetts[ray]).")] = False,
    min_replicas: Annotated[str | None, typer.Option(help="With --ray: replicas at least.")] = None,
    max_replicas: Annotated[str | None, typer.Option(help="With --ray: replicas at most.")] = None,
    gpus_per_replica: Annotated[str | None, typer.Option(help="With --ray: GPUs of each; else one for an engine.")] = None,
) -> None:
    """Serve a model over HTTP. Each setting is also a variable DUETTS_NAME and a key of the file; flags come first, then
    variables, then the file. In brackets: the default. docs/configuration.md has more, `duetts config --show` what holds."""
    fleet = {"min_replicas": min_replicas, "max_replicas": max_replicas, "gpus_per_replica": gpus_per_replica}
    try:
        if ray:
            code = serve_by_ray(line, fleet)
            raise typer.Exit(code)
        if any(fleet.values()):
            raise ConfigError("--min-replicas, --max-replicas and --gpus-per-replica are for --ray")
        values, notes = read_settings(line)
        settings = build(values)
        start_log(settings.server.logs)
        log = logging.getLogger("duetts")
        for note in notes:
            log.warning("%s", note)
        from duetts.serving import Plan
        from duetts.workers.keeper import run

        if settings.model.model is None:
            log.info("no model was named: serving %s", EMBEDDED)
        name = settings.model.model or EMBEDDED
        code = run(Plan(name, settings.model.revision, settings.engine, settings.processes, settings.server))
    except DuettsError as error:
        fail(error)
    raise typer.Exit(code)


def serve_by_ray(line: Mapping[str, Any], fleet: Mapping[str, str | None]) -> int:
    """The same settings, by Ray Serve. Replicas may be elsewhere: what this machine's variables say goes with them."""
    start_log(LogConfig())
    address = ray_address()
    try:
        from duetts.cluster.application import run
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ray needs Ray: pip install 'duetts[ray]' ({error.name} is missing)") from None
    from duetts.cluster.fleet import arguments_of

    given = Given(line)
    for note in given.notes:
        logging.getLogger("duetts").warning("%s", note)
    chosen = {name: value for name, value in fleet.items() if value is not None}
    return run({**arguments_of(given, environment()), **chosen}, address)


@app.command(cls=SettingsCommand)
@takes_settings
def config(
    line: dict[str, Any],
    show: Annotated[bool, typer.Option("--show", help="Print every setting (this is also done without it).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    from_vllm_omni: Annotated[Path | None, typer.Option(help="Make a file of one of vLLM-Omni's deploy files instead.")] = None,
    tables: Annotated[bool, typer.Option("--tables", hidden=True, help="The tables of docs/configuration.md.")] = False,
) -> None:
    """Show the settings that `duetts serve` would have with the same flags, and where each one is from. What is printed is a
    configuration file. Keys are not shown."""
    from duetts.settings import shown

    if tables:
        print(shown.as_markdown(), end="")
        return
    try:
        if from_vllm_omni is not None:
            from duetts.deploy.peer import as_file, convert

            print(as_file(from_vllm_omni.name, *convert(from_vllm_omni)), end="")
            return
        values, notes = read_settings(line)
        build(values)
    except DuettsError as error:
        fail(error)
    print(shown.as_json(values.values()) if as_json else shown.as_text(values.values()), end="\n" if as_json else "")
    for note in notes:
        print(f"duetts: {note}", file=sys.stderr)


@app.command()
def recipe(
    model: Annotated[str | None, typer.Argument(help="fishaudio/s2-pro, a folder of its kind, or duetts-mini.")] = None,
    hardware: Annotated[str | None, typer.Option(help="h200, rtx_4090, cpu ...; auto is this machine's.")] = None,
    gpus: Annotated[str | None, typer.Option(help="How many of the machine's GPUs.")] = None,
    variant: Annotated[str | None, typer.Option(help="default, bf16, int8 or fp8 weights.")] = None,
    task: Annotated[str | None, typer.Option(help="t2a: text to audio.")] = None,
    goal: Annotated[str | None, typer.Option(help="balanced, latency or throughput.")] = None,
    docker: Annotated[bool, typer.Option("--docker", help="The command in a container.")] = False,
    form: Annotated[str, typer.Option("--format", help="text, json, argv or md.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="As --format json.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse what has no recipe, in the place of a warning.")] = False,
) -> None:
    """Print how to install and serve a model on given hardware: commands, why each flag, and estimates of what to expect."""
    from duetts.recipe.making import Request, make
    from duetts.recipe.shown import FORMS

    form = "json" if as_json else form
    if form not in FORMS:
        fail(ConfigError(f"--format {form!r} is not one of {', '.join(FORMS)}"))
    try:
        made = make(Request(model, hardware, gpus, variant, task, goal), strict)
    except ConfigError as error:
        fail(error)
    print(FORMS[form](made, docker), end="")
    for warning in made["warnings"]:
        print(f"note: {warning}", file=sys.stderr)


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
    codec_device: CodecOption = "same",
) -> None:
    """Say what is in a model folder, what this machine has, and what would not fit."""
    from duetts.doctor import examine
    from duetts.tts import resolve_model

    try:
        engine = EngineConfig(device=device, dtype=dtype, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        findings = list(examine(resolve_model(model), engine, ProcessConfig(codec_device=codec_device)))
    except DuettsError as error:
        fail(error)
    for finding in findings:
        sign = {None: " ", True: "+", False: "!"}[finding.good]
        print(f"{sign} {finding.topic:<15} {finding.text}")
    if any(finding.good is False for finding in findings):
        raise typer.Exit(EXIT_FAILURE)


def main() -> None:
    """Entry point of the command."""
    app()
