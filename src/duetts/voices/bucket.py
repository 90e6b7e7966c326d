"""A folder of an object store, reached by fsspec: whole objects by name, and what goes wrong told as one error. No voices.

An object is written whole or not at all, and read as it was last written. Nothing here is renamed, and no two objects change
together: what that allows is said where it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

from fsspec.core import url_to_fs

from duetts.errors import ConfigError, DuettsError, StorageFailure, StoreUnreachable

LOST = ("PreconditionFailed", "ConditionalRequestConflict")  # S3's words for what is there already, or just being made
TIMES = ("LastModified", "mtime", "last_modified", "updated", "created", "timeCreated")  # as drivers call it

LIMIT_S = 5.0  # that a store may take to answer
RECORD_S = 0.01  # and so much more for each of many objects
BYTES_PER_S = 1e6  # and for what is sent
REST_S = 5.0  # that one which did not answer in time is left alone

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Item:
    """An object: its name below the folder, a word that changes with its content, and seconds since 1970, if they are told."""

    name: str
    stamp: str
    time: float | None


class Bucket:
    """The folder of a URL such as s3://bucket/voices. Any thread and any number of processes. Methods wait for the network,
    up to `LIMIT_S`; where they waited in vain, none asks for `REST_S`.

    Raises `FileNotFoundError` for an object that is not there, `StorageFailure` for what the store does not allow, and
    `StoreUnreachable` for all else that a driver raises.
    """

    def __init__(self, url: str) -> None:
        """Connects nowhere. Raises `ConfigError` if there is no driver for such a URL."""
        scheme = url.partition("://")[0]
        if "::" in url:
            raise ConfigError("voices_dir: chained URLs are not taken; what they cache would hide what others have changed")
        try:
            files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"voices_dir: {scheme}:// cannot be used here: {error}") from None
        self._files: Any = files
        self._root = str(root).rstrip("/")
        self._told = _Told()

    def read(self, name: str) -> bytes:
        """The content of an object."""
        with self._told:
            return bytes(self._files.cat_file(self._path(name), **self._within()))

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """The contents of those of some objects that are there, at the same time where the driver can."""
        paths = {self._path(name): name for name in names}
        if not paths:
            return {}
        with self._told:
            found = self._files.cat(list(paths), on_error="return", **self._within(len(paths) * RECORD_S))
        for answer in found.values():
            if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
                with self._told:
                    raise answer
        ends = {path.lstrip("/"): name for path, name in paths.items()}
        return {ends[path.lstrip("/")]: bytes(answer) for path, answer in found.items() if not isinstance(answer, Exception)}

    def write(self, name: str, content: bytes) -> None:
        """Puts an object in the place of any that has its name."""
        with self._told:
            self._pipe(name, content, "overwrite")

    def create(self, name: str, content: bytes) -> bool:
        """Puts an object where there is none; false if there is one. Of two that do this at once one gets true, as far as the
        store can promise it: S3 and Google's can, others look first. An object of the same content counts as put here."""
        try:
            with self._told:
                self._pipe(name, content, "create")
        except FileExistsError:  # also after a driver tried again, because the answer to the first try was lost
            with suppress(FileNotFoundError):
                return self.read(name) == content
            return False
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects. Those that are not there count as removed."""
        for name in names:
            try:
                with self._told:
                    self._files.rm_file(self._path(name), **self._within())
            except FileNotFoundError:
                continue

    def items(self, below: str = "") -> list[Item]:
        """The objects below a name, in any depth."""
        with self._told:
            found = self._files.find(self._path(below) if below else self._root, detail=True, **self._within())
        start = len(self._root.lstrip("/")) + 1
        return [
            Item(str(path).lstrip("/")[start:], _stamp(facts), _time(facts))
            for path, facts in found.items()
            if facts.get("type", "file") == "file"
        ]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _within(self, more_s: float = 0.0) -> dict[str, float]:
        """The time limit of an operation, for drivers that take one: those that wait for a network in a loop of fsspec's."""
        return {"timeout": LIMIT_S + more_s} if self._files.async_impl else {}

    def _pipe(self, name: str, content: bytes, mode: str) -> None:
        path, limit = self._path(name), self._within(len(content) / BYTES_PER_S)
        try:
            self._files.pipe_file(path, content, mode=mode, **limit)
        except FileNotFoundError:  # object stores have no folders, but what a driver takes for one may be a file system
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, content, mode=mode, **limit)


def located(place: Path | str) -> Path | Bucket:
    """The folder of a path or a file:// URL, or the bucket of any other. Raises `ConfigError` if nothing here can reach it."""
    if isinstance(place, Path):
        return place
    if place.startswith("file://"):
        return Path(unquote(urlsplit(place).path))
    return Bucket(place) if "://" in place else Path(place).expanduser()


class _Told:
    """Turns what drivers raise, each the errors of a library of its own, into one error that shows nothing of the store.

    A store that hangs is not waited for by everybody: it is left alone for a while, and then asked by one first.
    """

    def __init__(self) -> None:
        self._rests_until: float | None = None

    def __enter__(self) -> None:
        if self._rests_until is None:
            return
        now = monotonic()
        if now < self._rests_until:
            raise StoreUnreachable("the store of voices has not answered lately; try again later")
        self._rests_until = now + LIMIT_S

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._rests_until = monotonic() + REST_S if isinstance(error, TimeoutError) else None
        if isinstance(error, Exception) and not isinstance(error, FileNotFoundError | FileExistsError | DuettsError):
            if any(word in f"{error} {error.__cause__}" for word in LOST):
                raise FileExistsError from error
            log.error("the store of voices: %s: %s", type(error).__name__, error)
            if isinstance(error, PermissionError):
                raise StorageFailure("the store of voices does not allow it") from error
            raise StoreUnreachable("the store of voices cannot be reached; try again later") from error


def _stamp(facts: dict[str, Any]) -> str:
    told = [facts.get(name) for name in ("ETag", "etag", "generation", "md5Hash", *TIMES, "size", "ino")]
    return " ".join(str(one) for one in told if one is not None)


def _time(facts: dict[str, Any]) -> float | None:
    """When an object was written."""
    for name in TIMES:
        told = facts.get(name)
        if isinstance(told, str):
            try:
                told = datetime.fromisoformat(told)
            except ValueError:
                continue
        if isinstance(told, datetime):
            return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
        if isinstance(told, int | float):
            return float(told)
    return None
