"""Values of settings: read from flags, variables and a file, in this order of precedence, each with its source. Reads no file
and no environment itself, except files of keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from duetts.config import (
    EMBEDDED,
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
from duetts.errors import ConfigError
from duetts.settings.table import BY_NAME, MISSING_SECTIONS, OTHER_VARIABLES, SECTIONS, SETTINGS, Setting

DEFAULT = "default"
SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
NO_VALUE = "auto"  # of numbers that may be left to the server


@dataclass(frozen=True, slots=True)
class Value:
    """What a setting is, and who says so: a flag, a variable, a file's name or "default"."""

    setting: Setting
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a server, checked."""

    model: ModelChoice
    engine: EngineConfig
    processes: ProcessConfig
    server: ServerConfig


def resolve(
    flags: Mapping[str, tuple[str, list[str]]],
    environment: Mapping[str, str],
    *files: tuple[str, Mapping[str, Any]] | None,
) -> dict[str, Value]:
    """The value of every setting by its name, in the order of the table.

    `flags`: by name of the setting, the flag as it was written and its texts. `environment`: names without the prefix, in
    small letters. `files`: a name to be told, and the content, of each; later ones win. Raises `ConfigError` naming the source.
    """
    found = {name: value for file in files if file for name, value in read_file(*file)}
    found |= {
        setting.name: Value(setting, from_text(setting, environment[setting.name], setting.variable), setting.variable)
        for setting in SETTINGS
        if setting.name in environment
    }
    for name, (flag, texts) in flags.items():
        setting = BY_NAME[name]
        found[name] = Value(setting, from_texts(setting, texts, flag), flag)
    return {setting.name: found.get(setting.name, Value(setting, setting.default, DEFAULT)) for setting in SETTINGS}


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that nothing reads. Its value is not in it."""
    known = [*BY_NAME, *OTHER_VARIABLES]
    return [
        f"the variable DUETTS_{name.upper()} is unknown and has no effect{hint(name, known, 'DUETTS_{}', str.upper)}"
        for name in sorted(environment.keys() - set(known))
    ]


def hint(name: str, known: list[str], form: str = "{}", change: Callable[[str], str] = str) -> str:
    """Words that follow an unknown name: which one may have been meant. Empty if none is near."""
    near = get_close_matches(name, known, 1, 0.6)
    return f"; did you mean {form.format(change(near[0]))}?" if near else ""


# -- texts of flags and variables ----------------------------------------------------------------------------------------


def from_texts(setting: Setting, texts: list[str], source: str) -> Any:
    """The value of a flag that came once or several times. Only lists take several."""
    if setting.is_list:
        return tuple(item for text in texts for item in from_text(setting, text, source))
    return from_text(setting, texts[-1], source)


def from_text(setting: Setting, text: str, source: str) -> Any:
    """The value that a text means. Raises `ConfigError` naming source and what is expected."""
    if setting.words:
        return _choose(setting.words, text, source)
    if setting.is_list:
        items = [item.strip() for item in text.split(",") if item.strip()]
        return tuple(items) if setting.kind == tuple[str, ...] else tuple(_pair(item, source) for item in items)
    if setting.optional and text == NO_VALUE and setting.kind in (int, float):
        return None
    if setting.kind is bool:
        return _choose(SWITCH, text, source)
    if setting.kind is int:
        return _size(text, source) if setting.is_size else _whole(text, source)
    if setting.kind is float:
        return _number(text, source)
    if setting.kind is Path and not (setting.takes_url and "://" in text):
        return Path(text).expanduser()
    return text


def _choose(words: Mapping[str, Any], text: str, source: str) -> Any:
    if text.lower() not in words:
        raise ConfigError(f"{source} is {text!r}; it must be one of {', '.join(words)}")
    return words[text.lower()]


def _whole(text: str, source: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ConfigError(f"{source} is {text!r}, not a whole number")
    return int(text)


def _size(text: str, source: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15}) ?([KMG]?)(iB)?", text)
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{source} is {text!r}, not a number of bytes such as 1048576 or 16MiB")
    return int(match[1]) * UNITS[match[2]]


def _number(text: str, source: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{source} is {text!r}, not a number")
    return value


def _pair(item: str, source: str) -> tuple[str, str]:
    name, equals, meant = (part.strip() for part in item.partition("="))
    if not (name and equals and meant):
        raise ConfigError(f"{source}: {item!r} is not like NAME=VALUE")
    return name, meant


# -- a file --------------------------------------------------------------------------------------------------------------


def read_file(name: str, content: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    """Names and values of a file's keys, which may stand under their sections. Raises `ConfigError` for unknown ones."""
    known: set[str] = set()
    for section, key, value in _entries(name, content):
        setting = _known(name, section, key)
        if setting.name in known:
            raise ConfigError(f"{name}: {setting.name} is given twice")
        known.add(setting.name)
        yield setting.name, Value(setting, from_plain(setting, value, f"{name}: {setting.name}"), name)


def _entries(name: str, content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Section (or an empty word), key and value. "model" is a section if it holds keys."""
    for key, value in content.items():
        if key in MISSING_SECTIONS:
            raise ConfigError(f"{name}: {key} is no section here: {MISSING_SECTIONS[key]}")
        if key in SECTIONS and isinstance(value, Mapping):
            yield from ((key, str(inner), item) for inner, item in value.items())
        elif key in SECTIONS and key not in BY_NAME:
            raise ConfigError(f"{name}: {key} is a section; it must hold settings")
        else:
            yield "", str(key), value


def _known(name: str, section: str, key: str) -> Setting:
    setting = BY_NAME.get(key.replace("-", "_"))
    if setting is None:
        raise ConfigError(f"{name}: {key} is unknown{hint(key, [*BY_NAME, *([] if section else SECTIONS)])}")
    if section and setting.section != section:
        raise ConfigError(f"{name}: {key} belongs to {setting.section}, not to {section}")
    return setting


def from_plain(setting: Setting, value: Any, source: str) -> Any:
    """The value of a file's key, which has a type of its own. Raises `ConfigError` naming source and what is expected."""
    if value is None:
        if not setting.optional:
            raise ConfigError(f"{source} has no value; leave the key out for the default")
        return None
    if setting.is_list:
        return _list_from_plain(setting, value, source)
    fits: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,), Path: (str,)}
    wanted = (str,) if setting.words else fits[setting.kind]
    if isinstance(value, str) and (setting.words or setting.is_size or str in wanted):
        return from_text(setting, value, source)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted) or value != value:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "text"}
        shown = "" if setting.secret else f" is {value!r};"
        raise ConfigError(f"{source}{shown} must be {'text' if setting.words else names[setting.kind]}")
    number: Any = value
    return float(number) if setting.kind is float else value


def _list_from_plain(setting: Setting, value: Any, source: str) -> Any:
    items = [value] if isinstance(value, str) else value
    if setting.kind != tuple[str, ...] and isinstance(items, Mapping):
        items = [f"{name}={meant}" for name, meant in items.items()]
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{source} must be a list of texts")
    return tuple(items) if setting.kind == tuple[str, ...] else tuple(_pair(item, source) for item in items)


# -- the whole -----------------------------------------------------------------------------------------------------------


def build(values: Mapping[str, Value]) -> Settings:
    """The configuration that the values make. Raises `ConfigError` naming setting and source."""
    model = _section(ModelChoice, "model", values)
    name = model.model or EMBEDDED
    names = values["served_model_name"].value or (name,)
    access = _section(AccessConfig, "access", values, keys=_keys(values))
    plain: dict[str, type] = {
        "requests": RequestsConfig, "limits": Limits, "media": MediaConfig, "voices": VoicesConfig, "tls": TlsConfig,
        "logs": LogConfig,
    }  # fmt: skip
    parts = {name: _section(made, name, values) for name, made in plain.items()}
    server = _section(ServerConfig, "server", values, served_model_names=names, access=access, **parts)
    engine, processes = _section(EngineConfig, "engine", values), _section(ProcessConfig, "processes", values)
    return Settings(model, engine, processes, server)


def _section(made: Callable[..., Any], section: str, values: Mapping[str, Value], **others: Any) -> Any:
    """The dataclass of a section. What it says of its fields is told in the words of whoever set them."""
    mine = [value for value in values.values() if value.setting.section == section and value.setting.attribute]
    try:
        return made(**{value.setting.attribute: value.value for value in mine} | others)
    except ConfigError as error:
        message = str(error)
        for value in mine:
            named = re.search(rf"\b{value.setting.attribute}\b", message)
            if named and value.source != DEFAULT:
                said = value.source if value.source.startswith(("-", "DUETTS_")) else f"{value.source}: {value.setting.name}"
                message = message[: named.start()] + said + message[named.end() :]
        raise ConfigError(message) from None


def _keys(values: Mapping[str, Value]) -> tuple[str, ...]:
    """The keys that were given and those of the file."""
    given, file = values["api_key"], values["api_key_file"]
    if given.source != DEFAULT and not given.value:
        raise ConfigError(f"{given.source} has no key")
    return (*given.value, *(read_keys(file.value, file.source) if file.value else ()))


def read_keys(path: Path, source: str) -> tuple[str, ...]:
    """The keys of a file, one a line. Raises `ConfigError` if it cannot be read or has none: the server would be open."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{source}: the file of keys cannot be read: {reason}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"{source}: the file of keys has no key in it")
    return keys
