"""Recordings in which speakers agree, kept on disk and nothing more. No HTTP; nothing looks into the recordings."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import time

from duetts.errors import CheckpointError, InvalidRequest, VoiceNotFound
from duetts.json_fields import Fields, parse_json
from duetts.types import Consent
from duetts.voices.bucket import Bucket, located
from duetts.voices.sharing import Threads
from duetts.voices.store import REMOVED, WRITING, place_file, storage, sync_folder

log = logging.getLogger(__name__)

CONSENT_ID = re.compile(r"cons_[0-9a-f]{24}")
RECORD, RECORDING = "consent.json", "recording"
MAX_CHARS = 256  # of a name or language


class ConsentStore:
    """Consents in a folder or at a URL, one folder each, under ids made here. Any number of processes; one event loop."""

    def __init__(self, place: Path | str, max_consents: int, max_bytes: int, max_waiting: int) -> None:
        found = located(place)
        self._files = _Folder(found) if isinstance(found, Path) else _Bucket(found)
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
        if len(self._files.ids()) >= self._max_consents:
            raise InvalidRequest(
                f"there are {self._max_consents} consents, and no more are allowed; remove some first", field="name",
                code="voice_limit",
            )  # fmt: skip
        self._files.add(consent.id, _record(consent), recording)
        return consent

    def _read_all(self) -> list[Consent]:
        found = []
        for consent_id in self._files.ids():
            try:
                found.append(self._read(consent_id))
            except VoiceNotFound:
                log.warning("the consent %s cannot be read and is left out", consent_id)
        return sorted(found, key=lambda consent: (-consent.created_at, consent.id))

    def _read(self, consent_id: str) -> Consent:
        if not CONSENT_ID.fullmatch(consent_id):
            raise _not_found(consent_id)
        try:
            fields = Fields(parse_json(self._files.read(consent_id), RECORD), "consent")
            return Consent(consent_id, fields.text("name", ""), fields.text("language", ""), fields.integer("created_at"))
        except (CheckpointError, OSError) as error:
            raise _not_found(consent_id) from error

    def _rename(self, consent_id: str, name: str) -> Consent:
        consent = replace(self._read(consent_id), name=name)
        self._files.write(consent_id, _record(consent))
        return consent

    def _remove(self, consent_id: str) -> None:
        try:
            self._read(consent_id)
        except VoiceNotFound:
            if CONSENT_ID.fullmatch(consent_id):  # the recording may still be there, of one that was removed in part
                self._files.remove(consent_id)
            raise
        self._files.remove(consent_id)


class _Folder:
    """Consents on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ids(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if CONSENT_ID.fullmatch(name)]
        except OSError:
            return []

    def read(self, consent_id: str) -> bytes:
        return (self._folder / consent_id / RECORD).read_bytes()

    def add(self, consent_id: str, record: bytes, recording: bytes) -> None:
        """All of a consent or nothing."""
        with storage():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(dir=self._folder, prefix=WRITING))
            try:
                place_file(aside / RECORDING, recording)
                place_file(aside / RECORD, record)
                os.rename(aside, self._folder / consent_id)
            except OSError:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            sync_folder(self._folder)

    def write(self, consent_id: str, record: bytes) -> None:
        with storage():
            place_file(self._folder / consent_id / RECORD, record)

    def remove(self, consent_id: str) -> None:
        aside = self._folder / f"{REMOVED}{secrets.token_hex(8)}"
        with storage(), suppress(FileNotFoundError):
            os.rename(self._folder / consent_id, aside)
        shutil.rmtree(aside, ignore_errors=True)


class _Bucket:
    """Consents in an object store: the record is put last and removed first."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def ids(self) -> list[str]:
        names = [item.name.partition("/") for item in self._bucket.items()]
        return [consent_id for consent_id, _, rest in names if rest == RECORD and CONSENT_ID.fullmatch(consent_id)]

    def read(self, consent_id: str) -> bytes:
        return self._bucket.read(f"{consent_id}/{RECORD}")

    def add(self, consent_id: str, record: bytes, recording: bytes) -> None:
        self._bucket.write(f"{consent_id}/{RECORDING}", recording)
        self._bucket.write(f"{consent_id}/{RECORD}", record)

    def write(self, consent_id: str, record: bytes) -> None:
        self._bucket.write(f"{consent_id}/{RECORD}", record)

    def remove(self, consent_id: str) -> None:
        self._bucket.remove([f"{consent_id}/{RECORD}", f"{consent_id}/{RECORDING}"])


def _record(consent: Consent) -> bytes:
    return json.dumps(asdict(consent), indent=1, ensure_ascii=False).encode("utf-8")


def _checked(field: str, text: str) -> str:
    text = text.strip()
    if not text or len(text) > MAX_CHARS or not text.isprintable():
        raise InvalidRequest(f"{field} must be 1 to {MAX_CHARS} characters that print", field=field)
    return text


def _not_found(consent_id: str) -> VoiceNotFound:
    return VoiceNotFound(f"there is no consent {consent_id[:64]!r}", field="id", code="consent_not_found")
