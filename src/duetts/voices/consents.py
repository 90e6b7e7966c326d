"""Recordings in which speakers agree, kept and nothing more. No HTTP; nothing looks into the recordings.

The record is put last and removed first: what can be seen is whole. A recording without one goes at once where that can be
done, else when somebody adds a consent an hour later.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import time

from duetts.errors import CheckpointError, InvalidRequest, StorageFailure, VoiceNotFound
from duetts.json_fields import Fields, parse_json
from duetts.types import Consent
from duetts.voices.bucket import Item, located
from duetts.voices.folder import Folder
from duetts.voices.sharing import Threads
from duetts.voices.store import UNFINISHED_S

log = logging.getLogger(__name__)

CONSENT_ID = re.compile(r"cons_[0-9a-f]{24}")
RECORD, RECORDING = "consent.json", "recording"
MAX_CHARS = 256  # of a name or language


class ConsentStore:
    """Consents in a folder or at a URL, one folder each, under ids made here. Any number of processes; one event loop."""

    def __init__(self, place: Path | str, max_consents: int, max_bytes: int, max_waiting: int) -> None:
        found = located(place)
        self._files = Folder(found) if isinstance(found, Path) else found
        self._max_consents = max_consents
        self._max_bytes = max_bytes
        self._threads = Threads("duetts-consents", 1, max_waiting)

    async def add(self, name: str, language: str, recording: bytes) -> Consent:
        """Keeps a recording, whole or not at all. Raises `InvalidRequest`, `StorageFailure`."""
        consent = Consent(f"cons_{secrets.token_hex(12)}", _checked("name", name), _checked("language", language), int(time()))
        if not recording:
            raise InvalidRequest("recording is empty: it has 0 bytes", field="recording")
        if len(recording) > self._max_bytes:
            raise InvalidRequest(
                f"recording has {len(recording)} bytes; at most {self._max_bytes} are allowed", field="recording",
                code="reference_too_large",
            )  # fmt: skip
        return await self._threads.run(self._write, consent, recording)

    async def all(self) -> list[Consent]:
        """Every consent, the latest first."""
        return await self._threads.run(self._read_all)

    async def get(self, consent_id: str) -> Consent:
        """One consent. Raises `VoiceNotFound`."""
        return await self._threads.run(self._read, consent_id)

    async def rename(self, consent_id: str, name: str) -> Consent:
        """Gives a consent another name. Raises `VoiceNotFound`, `StorageFailure`."""
        return await self._threads.run(self._rename, consent_id, _checked("name", name))

    async def remove(self, consent_id: str) -> None:
        """Removes a consent, and a recording without one. Raises `VoiceNotFound` if there was no consent, `StorageFailure`."""
        await self._threads.run(self._remove, consent_id)

    def close(self) -> None:
        """Reads and writes no more. Waits for nothing."""
        self._threads.close()

    def _write(self, consent: Consent, recording: bytes) -> Consent:
        ids, rest = self._look()
        if len(ids) >= self._max_consents:
            raise InvalidRequest(
                f"there are {self._max_consents} consents, and no more are allowed; remove some first", field="name",
                code="voice_limit",
            )  # fmt: skip
        try:
            self._files.write(f"{consent.id}/{RECORDING}", recording)
            self._files.write(f"{consent.id}/{RECORD}", _record(consent))
        except StorageFailure:
            with suppress(StorageFailure):
                self._files.remove(_names(consent.id))
            raise
        late = time() - UNFINISHED_S
        with suppress(StorageFailure):
            self._files.remove(item.name for item in rest if item.time is not None and item.time < late)
        return consent

    def _look(self) -> tuple[set[str], list[Item]]:
        """The ids of all consents, and what is of none."""
        items = {item: item.name.partition("/")[0] for item in self._files.items()}
        ids = {owner for item, owner in items.items() if item.name == f"{owner}/{RECORD}" and CONSENT_ID.fullmatch(owner)}
        return ids, [item for item, owner in items.items() if owner not in ids and CONSENT_ID.fullmatch(owner)]

    def _read_all(self) -> list[Consent]:
        found = []
        for consent_id in self._look()[0]:
            try:
                found.append(self._read(consent_id))
            except VoiceNotFound:
                log.warning("the consent %s cannot be read and is left out", consent_id)
        return sorted(found, key=lambda consent: (-consent.created_at, consent.id))

    def _read(self, consent_id: str) -> Consent:
        if not CONSENT_ID.fullmatch(consent_id):
            raise _not_found(consent_id)
        try:
            fields = Fields(parse_json(self._files.read(f"{consent_id}/{RECORD}"), RECORD), "consent")
            return Consent(consent_id, fields.text("name", ""), fields.text("language", ""), fields.integer("created_at"))
        except (CheckpointError, OSError) as error:
            raise _not_found(consent_id) from error

    def _rename(self, consent_id: str, name: str) -> Consent:
        consent = replace(self._read(consent_id), name=name)
        self._files.write(f"{consent_id}/{RECORD}", _record(consent))
        return consent

    def _remove(self, consent_id: str) -> None:
        try:
            self._read(consent_id)
        finally:  # the recording may still be there, of one that was removed in part
            if CONSENT_ID.fullmatch(consent_id):
                self._files.remove(_names(consent_id))


def _names(consent_id: str) -> list[str]:
    """What belongs to a consent, in the order in which it goes."""
    return [f"{consent_id}/{RECORD}", f"{consent_id}/{RECORDING}"]


def _record(consent: Consent) -> bytes:
    return json.dumps(asdict(consent), indent=1, ensure_ascii=False).encode("utf-8")


def _checked(field: str, text: str) -> str:
    text = text.strip()
    if not text or len(text) > MAX_CHARS or not text.isprintable():
        raise InvalidRequest(f"{field} must be 1 to {MAX_CHARS} characters that print", field=field)
    return text


def _not_found(consent_id: str) -> VoiceNotFound:
    return VoiceNotFound(f"there is no consent {consent_id[:64]!r}", field="id", code="consent_not_found")
