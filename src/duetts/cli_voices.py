"""`duetts voices add|list|rm`: the folder of stored voices, without a server or a model. Running servers see changes at once.

At a URL they may speak with a voice that was replaced or removed for 2 s more.
A voice that is added here has no codes yet: the first server that speaks with it makes and keeps them.
"""

from __future__ import annotations

from pathlib import Path
from time import time
from typing import Annotated, Any, NoReturn

import typer

from duetts.config import Limits, VoicesConfig, voices_folder
from duetts.errors import ConfigError, DuettsError, InvalidRequest, VoiceExists, VoiceNotFound

voices_app = typer.Typer(help="Keep voices that speech can name. Works without a server.", no_args_is_help=True)

RATE = 44100  # Hz, at which a clip is looked at; each server decodes it for its own codec

NameArgument = Annotated[str, typer.Argument(help="1 to 64 characters; cases do not count.")]
FolderOption = Annotated[
    str | None,
    typer.Option("--voices-dir", envvar="DUETTS_VOICES_DIR", help="Folder or URL of the voices. Default: the server's."),
]


@voices_app.command()
def add(
    name: NameArgument,
    audio: Annotated[Path, typer.Option(help="Clip of the voice, 1 to 30 seconds.")],
    text: Annotated[str, typer.Option(help="What is said in the clip.")],
    replace: Annotated[bool, typer.Option("--replace", help="Replace a voice of this name.")] = False,
    consent: Annotated[str, typer.Option(help="Where the speaker's consent is. Kept and shown.")] = "",
    voices_dir: FolderOption = None,
) -> None:
    """Store a voice."""
    from duetts.audio.decode import decode_audio
    from duetts.text.rules import clean_text
    from duetts.types import Voice
    from duetts.voices.library import check_detail, media_type
    from duetts.voices.names import clean_name

    limits = Limits()
    try:
        shown, transcript = clean_name(name), clean_text(text, field="text", max_chars=limits.max_input_chars)
        check_detail("consent", consent)
        content = _read(audio, limits.reference_bytes)
        wave = decode_audio(content, rate=RATE, min_s=limits.reference_min_s, max_s=limits.reference_max_s, field=audio.name)
        kind, duration_s = media_type(content), len(wave) / RATE
        voice = Voice(shown, transcript, int(time()), duration_s, len(content), kind, consent=consent)
        _store(voices_dir).add(voice, content, replace=replace)
    except (DuettsError, OSError) as error:
        _fail(error)
    typer.echo(f"{shown}: {duration_s:.1f} s, stored in {voices_dir or voices_folder()}")


@voices_app.command("list")
def list_voices(voices_dir: FolderOption = None) -> None:
    """Show the stored voices."""
    try:
        found = _store(voices_dir).all()
    except DuettsError as error:
        _fail(error)
    for stored in found:
        voice = stored.voice
        text = voice.transcript if len(voice.transcript) <= 60 else voice.transcript[:57] + "..."
        typer.echo(f"{voice.name:<24} {voice.duration_s:5.1f} s  {voice.origin:<9}  {text}")


@voices_app.command("rm")
def remove(name: NameArgument, voices_dir: FolderOption = None) -> None:
    """Remove a stored voice. What speaks with it at this moment goes on."""
    try:
        if not _store(voices_dir).remove(name):
            raise VoiceNotFound(f"there is no voice {name[:64]!r} in {voices_dir or voices_folder()}")
    except DuettsError as error:
        _fail(error)
    typer.echo(f"{name}: removed")


def _store(folder: str | None) -> Any:
    from duetts.voices.objects import open_store

    config = VoicesConfig(folder or voices_folder())
    return open_store(config.folder, config.max_voices, config.max_bytes)


def _read(path: Path, max_bytes: int) -> bytes:
    """A file of bounded size."""
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InvalidRequest(f"{path.name} has more than {max_bytes} bytes", field="audio", code="reference_too_large")
    return content


def _fail(error: Exception) -> NoReturn:
    """One line, and the code that scripts can rely on."""
    hint = " (here: --replace)" if isinstance(error, VoiceExists) else ""
    typer.echo(f"duetts: {error}{hint}", err=True)
    raise typer.Exit(2 if isinstance(error, ConfigError) else 1)
