"""Configuration files as plain values: YAML, TOML or JSON, by the end of their names. Knows no setting."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from duetts.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Refuses a key that comes twice, of which YAML would keep the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _once([key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)


def _once(keys: list[str]) -> None:
    twice = next((key for key, count in Counter(keys).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is given twice")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _once([key for key, _ in pairs])
    return dict(pairs)


READERS: dict[str, Callable[[str], Any]] = {
    ".yaml": lambda text: yaml.load(text, _Loader),
    ".yml": lambda text: yaml.load(text, _Loader),
    ".toml": tomllib.loads,
    ".json": lambda text: json.loads(text, object_pairs_hook=_unique),
}


def load(path: Path) -> Mapping[str, Any]:
    """The content of a file. Raises `ConfigError` if it cannot be read or is no mapping."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path.name}: a configuration file must end with {', '.join(READERS)}")
    try:
        content = reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    except yaml.MarkedYAMLError as error:
        # Without its snippet, in which a key may stand.
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path.name}: not valid YAML{line}: {error.problem}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path.name}: not valid {path.suffix[1:].upper()}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name}: it must hold names and values")
    return content
