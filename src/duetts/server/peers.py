"""Other servers behind the same address, if there are any: what only one of them knows is asked of it. No Ray, no HTTP."""

from __future__ import annotations

import re
from typing import Any, Protocol

OWNER = re.compile(r"[a-z-]+-([a-z0-9]+)-[0-9a-f]{32}(?:-[0-9]+)*")


class Peers(Protocol):
    """They are asked for requests that have been let in, so that keys and limits hold here as well."""

    @property
    def name(self) -> str:
        """This server's own: lower-case letters and figures. It stands in the ids of its speeches."""
        ...

    async def ask(self, owner: str, speech_id: str, cancel: bool) -> dict[str, Any] | None:
        """What the server of that name says of a speech, after it was cancelled or not; None if there is no such server, or it
        does not know the speech."""
        ...

    async def numbers(self, own: bytes) -> bytes:
        """The numbers of all servers, of which those of this one are given."""
        ...


def owner_of(speech_id: str) -> str:
    """The name of the server that has given this id; empty if none of several has."""
    found = OWNER.fullmatch(speech_id)
    return found[1] if found else ""
