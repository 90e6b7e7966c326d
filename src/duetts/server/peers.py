"""Several servers behind one address, as each of them sees the others; and their numbers in one text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Peers(Protocol):
    """The other servers: what only one of them knows is asked of it, for requests that have been let in."""

    @property
    def name(self) -> str:
        """This server's own: lower-case letters and figures. It stands in the ids of its speeches."""
        ...

    async def ask(self, owner: str, speech_id: str, cancel: bool) -> dict[str, Any] | None:
        """What the server of that name says of a speech, after it was cancelled or not; None if there is no such server, or it
        does not know the speech."""
        ...

    async def numbers(self, own: bytes, engines: bytes) -> bytes:
        """The numbers of all servers, of which those of this one and of its engines are given."""
        ...


def numbers_of_all(told: Mapping[str, bytes], label: str) -> bytes:
    """The numbers of several servers, by their names, in one text: lines get the name as a label, families stay together."""
    families: dict[str, list[str]] = {}
    for server, text in told.items():
        family, is_first = families.setdefault("", []), True
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_first = name not in families
                family = families.setdefault(name, [])
            if not line.startswith("#"):
                family.append(labelled(line, label, server))
            elif is_first:
                family.append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines).encode()


def labelled(line: str, label: str, value: str) -> str:
    """A line of Prometheus' text with one label more. Names of numbers have no brace."""
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f'{name}{{{label}="{value}",{rest}'
    name, _, number = line.partition(" ")
    return f'{name}{{{label}="{value}"}} {number}'
