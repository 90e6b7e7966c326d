"""JSON objects read key by key, strictly: the right types, no unknown keys, errors that name file, key and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from duetts.errors import CheckpointError


class Fields:
    """A JSON object that is read key by key: right types, no unknown keys, and errors that name file, key and value."""

    def __init__(self, values: Mapping[str, Any], where: str, ignored: tuple[str, ...] = ()) -> None:
        self._values = dict(values)
        self._where = where
        self._known: set[str] = set(ignored)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def _take(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        self._known.add(key)
        value = self._values.get(key, default)
        if value is _REQUIRED:
            raise CheckpointError(f"{self._where}: the key {key!r} is missing")
        wrong = isinstance(value, bool) and kind is not bool
        if value is not None and (wrong or not isinstance(value, kind)):
            raise CheckpointError(f"{self._where}: {key!r} is {value!r}, which is not {_kind_name(kind)}")
        return default if value is None and default is not _REQUIRED else value

    def integer(self, key: str, default: Any = ..., minimum: int = 1) -> int:
        value: int = self._take(key, int, _REQUIRED if default is ... else default)
        if value is None or value < minimum:
            raise CheckpointError(f"{self._where}: {key!r} is {value}, below {minimum}")
        return value

    def number(self, key: str, default: Any = ...) -> float:
        value = self._take(key, (int, float), _REQUIRED if default is ... else default)
        if value is None or not value > 0:
            raise CheckpointError(f"{self._where}: {key!r} is {value}, which is not above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._take(key, bool, default))

    def text(self, key: str, default: str) -> str:
        return str(self._take(key, str, default))

    def integers(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = self._take(key, (list, tuple), default)
        if not value or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value):
            raise CheckpointError(f"{self._where}: {key!r} is {value!r}, which is not a list of whole numbers")
        return tuple(value)

    def section(self, key: str, ignored: tuple[str, ...] = ()) -> Fields:
        return Fields(self._take(key, dict, {}), f"{self._where}, {key}", ignored)

    def finish(self) -> None:
        """Refuses keys that nobody asked for, with the closest known one."""
        for key in self._values:
            if key not in self._known:
                close = get_close_matches(key, self._known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise CheckpointError(f"{self._where}: unknown key {key!r}{hint}")


_REQUIRED = object()


def _kind_name(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return " or ".join(dict.fromkeys(names.get(k, k.__name__) for k in kinds))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `CheckpointError` naming the file when it is no such thing."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error}") from error
    return parse_json(content, path.name)


def parse_json(content: bytes, name: str) -> dict[str, Any]:
    """A JSON object from a file's content. Raises `CheckpointError` naming the file when it is no such thing."""
    try:
        values = json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{name}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{name}: holds no JSON object")
    return values
