"""A folder of this machine with the face of a bucket, and how files are written there so that each is whole or not at all."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from duetts.errors import StorageFailure
from duetts.voices.bucket import Item

WRITING = ".writing-"

log = logging.getLogger(__name__)


class Folder:
    """Files one folder below this one, which is made when the first one comes. Any thread and any number of processes.

    Raises `FileNotFoundError` for a file that is not there, `StorageFailure` for what the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return (self._path / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """Puts a file in the place of any that has its name."""
        path = self._path / name
        with storage():
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)  # a voice is its speaker's own
            path.parent.mkdir(mode=0o700, exist_ok=True)
            place_file(path, content)

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, and folders in which there is nothing else. Those that are not there count as removed."""
        for name in names:
            path = self._path / name
            with storage():
                path.unlink(missing_ok=True)
            with suppress(OSError):  # it is not empty yet, as a rule
                path.parent.rmdir()

    def items(self) -> list[Item]:
        """The files that there are."""
        found = []
        with suppress(OSError):
            for path in self._path.glob("*/*"):
                with suppress(OSError):
                    found.append(Item(path.relative_to(self._path).as_posix(), "", path.stat().st_mtime))
        return found


@contextmanager
def storage() -> Iterator[None]:
    """Turns what the disk refuses into one error, whose message names no path."""
    try:
        yield
    except OSError as error:
        log.error("the voices folder cannot be written: %s", error)
        raise StorageFailure(f"voices cannot be stored on this server: {error.strerror}") from error


def place_file(path: Path, content: bytes) -> None:
    """Writes a file that is whole as soon as it has its name, after a crash too."""
    aside = path.with_name(f"{WRITING}{secrets.token_hex(8)}")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder last."""
    with suppress(OSError):  # where folders cannot be opened, renames are as durable as the system makes them
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
