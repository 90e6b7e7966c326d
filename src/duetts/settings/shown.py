"""Settings as people and programs read them: with their sources, and as the tables of docs/configuration.md."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from duetts.settings.arguments import shown_default
from duetts.settings.table import FOREIGN, SECTIONS, SETTINGS, Setting
from duetts.settings.values import Value


def as_text(values: Iterable[Value]) -> str:
    """A configuration file in YAML with the source of each value beside it. Secrets are comments."""
    rows = [(value.setting.section, _line(value), value.source) for value in values]
    width = max(len(line) for _, line, _ in rows)
    parts = []
    for section, members in groupby(rows, key=lambda row: row[0]):
        lines = "\n".join(f"  {line:<{width}}  # {source}" for _, line, source in members)
        parts.append(f"{section}:\n{lines}\n")
    return "\n".join(parts)


def as_json(values: Iterable[Value]) -> str:
    """A list of every setting with section, value and source. A secret's value is how many there are."""
    rows = [
        {"name": value.setting.name, "section": value.setting.section, "value": _plain(value), "source": value.source,
         "secret": value.setting.secret}
        for value in values
    ]  # fmt: skip
    return json.dumps({"settings": rows}, indent=2)


def _line(value: Value) -> str:
    if value.setting.secret:
        return f"# {value.setting.name}: {len(value.value)} given, not shown" if value.value else f"{value.setting.name}: []"
    return f"{value.setting.name}: {json.dumps(_plain(value), ensure_ascii=False)}"


def _plain(value: Value) -> Any:
    found = value.value
    if value.setting.secret:
        return len(found)
    for word, meant in value.setting.words.items():
        if found == meant:
            return word
    if value.setting.is_list and value.setting.kind != tuple[str, ...]:
        return dict(found)
    return str(found) if isinstance(found, Path) else found


def as_markdown() -> str:
    """The tables of docs/configuration.md."""
    parts = []
    for section in SECTIONS:
        rows = [setting for setting in SETTINGS if setting.section == section]
        lines = [f"| `{setting.flag}` | {shown_default(setting)} | {_note(setting)} |" for setting in rows]
        parts.append("\n".join([f"### `{section}`", "", "| flag | default | meaning |", "|---|---|---|", *lines]))
    no_effect = [f"| `{flag}` | {foreign.note} |" for flag, foreign in FOREIGN.items() if foreign.note and foreign.only is None]
    parts.append("\n".join(["### Accepted without effect", "", "| flag | because |", "|---|---|", *no_effect]))
    refused = [
        f"| `{flag}` | {_only(foreign.only)} | {foreign.note} |"
        for flag, foreign in FOREIGN.items()
        if foreign.only is not None
    ]
    parts.append("\n".join(["### Refused", "", "| flag | but for | because |", "|---|---|---|", *refused]))
    return "\n\n".join(parts) + "\n"


def _only(values: tuple[str, ...] | None) -> str:
    return ", ".join(f"`{value}`" for value in values or ())


def _note(setting: Setting) -> str:
    aliases = f" Also {', '.join(f'`{flag}`' for flag in setting.flags)}." if setting.flags else ""
    return setting.note + aliases
