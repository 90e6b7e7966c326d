"""`duetts bench`: a load generator for any server that speaks OpenAI's speech API, and K, the model's parts alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from duetts.errors import ConfigError, DuettsError

EXIT_FAILURE = EXIT_REJECTED = 1
EXIT_USAGE = 2
SERVER = "http://127.0.0.1:8000"
PART_STREAMS = (1, 8, 32, 64, 128, 256)
PART_SECONDS = 1.0  # of each measurement of K, at most

LoadsOption = Annotated[
    str, typer.Option(help="Instead of the workloads' own: 1,8,64; requests a second for P, or 25%,50% of --peak.")
]
UrlOption = Annotated[list[str] | None, typer.Option(help=f"The server; several for a crowd of servers. Default: {SERVER}.")]


def numbers(text: str, name: str, share: Callable[[float], float] = lambda value: 0.0) -> tuple[float, ...]:
    """Numbers between commas; `share` makes one of a part of one. Raises `ConfigError`."""
    try:
        found = tuple(
            share(float(one.strip().removesuffix("%")) / 100) if one.strip().endswith("%") else float(one)
            for one in text.split(",")
            if one.strip()
        )
    except ValueError:
        raise ConfigError(f"--{name} is {text!r}, not like 1,8,64") from None
    if any(not 0 < one < 1e6 for one in found):
        raise ConfigError(f"--{name} is {text!r}; the numbers must be above 0, and parts of --peak need it")
    return found


def earlier(path: Path) -> dict[str, Any]:
    """What is in a file of an earlier run, if it is there. Raises `ConfigError`."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("kind") != "duetts bench":
        raise ConfigError(f"{path} is no file of duetts bench")
    return found


def bench(
    workloads: Annotated[list[str], typer.Argument(help="L1 L2 T C1 C2 P S G B against a server, or K alone.")],
    url: UrlOption = None,
    processes: Annotated[int, typer.Option(help="Client processes, a multiple of the servers.")] = 1,
    event: Annotated[str, typer.Option(help="SECONDS:COMMAND to run in the middle of each run.")] = "",
    model: Annotated[str, typer.Option(help="Id that requests name; of K, a folder or hub id.")] = "",
    dialect: Annotated[str, typer.Option(help="How to ask: duetts, vllm-omni, sglang-omni or openai.")] = "duetts",
    audio: Annotated[str, typer.Option(help="pcm or wav.")] = "pcm",
    field: Annotated[list[str] | None, typer.Option(help="NAME=JSON to add to each body; null leaves NAME out.")] = None,
    api_key: Annotated[str, typer.Option(envvar="DUETTS_BENCH_KEY", help="Key that requests send.")] = "",
    loads: LoadsOption = "",
    seconds: Annotated[float, typer.Option(help="Length of a run.")] = 60.0,
    least: Annotated[int, typer.Option(help="Answers that each client gets at least.")] = 3,
    most: Annotated[int | None, typer.Option(help="Answers that each client gets at most.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each load.")] = 3,
    frames: Annotated[int, typer.Option(help="Frames of each answer instead of the workloads' own.")] = 0,
    streams_only: Annotated[bool, typer.Option("--streams-only", help="Without the complete answers of T, C1 and C2.")] = False,
    peak: Annotated[float, typer.Option(help="T's best throughput in audio-s/s, for P.")] = 0.0,
    most_clients: Annotated[int, typer.Option(help="Where the search of S ends.")] = 1024,
    short: Annotated[bool, typer.Option("--short", help="Marks a short form; warms up with short answers.")] = False,
    sample_rate: Annotated[int, typer.Option(help="Hz of the server's samples.")] = 44100,
    frame_length: Annotated[int, typer.Option(help="Samples of a frame.")] = 2048,
    timeout: Annotated[float, typer.Option(help="Seconds after which an answer has failed.")] = 300.0,
    first: Annotated[int | None, typer.Option(help="Number of the first request. Default: by the clock, never used.")] = None,
    note: Annotated[str, typer.Option(help="What the file should say of the conditions.")] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file, written as it goes.")] = None,
    append: Annotated[bool, typer.Option("--append", help="Keep what the file has, but for the same loads.")] = False,
    plot: Annotated[Path | None, typer.Option(help="SVG file; needs matplotlib.")] = None,
    device: Annotated[str, typer.Option(help="Of K.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of K.")] = "auto",
    load_format: Annotated[str, typer.Option(help="Of K: auto or dummy.")] = "auto",
    parts: Annotated[str, typer.Option(help="Of K: ar, codec, prefill.")] = "ar,codec,prefill",
    contexts: Annotated[str, typer.Option(help="Of K: positions of each stream.")] = "500,2000",
    chunks: Annotated[str, typer.Option(help="Of K: frames of a chunk.")] = "1,4,16",
) -> None:
    """Measure a server, or with K the language model and the codec by themselves. docs/benchmarks.md has the definitions."""
    with errors_told():
        if workloads == ["K"]:
            _parts(model, device, dtype, load_format, parts, (loads, contexts, chunks), seconds,
                   {"command": sys.argv[1:], "short": short, "note": note}, output)  # fmt: skip
            return
        from duetts.bench import client, crew, load, meanwhile, metrics, program, report
        from duetts.bench import workloads as known

        urls, pcm = [one.rstrip("/") for one in url or [SERVER]], metrics.Pcm(sample_rate, frame_length)
        targets = client.targets(urls, api_key, audio == "wav", pcm, timeout)
        asker = known.Asker(dialect, model, audio, fields(field or []))
        measure = load.Measure(seconds, least, most, repeats, frames, short, most_clients)
        number = int(time.time()) << 16 if first is None else first
        rates = numbers(loads, "loads", lambda share: program.rate_of(share, peak, pcm))
        chosen, beside = program.choose(workloads), meanwhile.meanwhile(urls, api_key, event)
        conditions = report.conditions(sys.argv[1:], note, urls, api_key) | {"first": number}
        with crew.hired(crew.Plan(targets, asker, measure, number, processes)) as clients:
            told = report.Report(clients, conditions, earlier(output) if append and output else {})
            work = program.Program(clients, told, typer.echo, output=output, loads=rates, peak=peak, whole=not streams_only,
                                   meanwhile=beside)  # fmt: skip
            program.run_in_loop(work.run(chosen))
        _end(told.content(), told.rejected, plot)


@contextmanager
def errors_told() -> Iterator[None]:
    """Ends the command with a line and a code for what a person can mend."""
    try:
        yield
    except (DuettsError, OSError) as error:
        typer.echo(f"duetts: {error}", err=True)
        raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE) from None


def fields(texts: list[str]) -> dict[str, Any]:
    """The fields of NAME=JSON. Raises `ConfigError`."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"--field {text}: it is not like NAME=JSON")
    return found


def _end(content: dict[str, Any], rejected: bool, plot: Path | None) -> None:
    if plot is not None:
        _plot(content, plot)
    if rejected:
        typer.echo("duetts: answers had another length than was asked for, so these loads have no figures", err=True)
        raise typer.Exit(EXIT_REJECTED)


def _plot(content: dict[str, Any], path: Path) -> None:
    try:
        from duetts.bench.plot import draw
    except ImportError:
        typer.echo("no plot: matplotlib is not installed", err=True)
        return
    draw({"duetts": content}, path)


def _parts(model: str, device: str, dtype: str, load_format: str, parts: str, lists: tuple[str, str, str],
           seconds: float, told: dict[str, Any], output: Path | None) -> None:  # fmt: skip
    from duetts.parts_bench import Plan, measure
    from duetts.tts import resolve_model

    names = ("loads", "contexts", "chunks")
    streams, contexts, chunks = (
        tuple(round(one) for one in numbers(text, name)) for text, name in zip(lists, names, strict=True)
    )  # fmt: skip
    plan = Plan(
        resolve_model(model or None), device, dtype, load_format, tuple(parts.split(",")), streams or PART_STREAMS,
        contexts, chunks, min(seconds, PART_SECONDS),
    )  # fmt: skip
    measure(plan, told, typer.echo, output)
