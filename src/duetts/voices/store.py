"""Named voices on disk: a folder each, whole at any moment, shared by any number of processes. No models, no HTTP.

`voice.json` in a voice's folder tells which revision of the other files counts. A new voice is written aside and renamed into
its place; a new revision is complete before `voice.json` is replaced; a voice that is removed is renamed away first. So a
process that dies on the way leaves the old voice or the new one, and rubbish that the next one sweeps. Names are keys: no
path is ever made of one, only of its hash.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from duetts.errors import CheckpointError, InvalidRequest, StorageFailure, VoiceExists
from duetts.json_fields import Fields, parse_json
from duetts.types import Int32, Voice, VoiceOrigin
from duetts.voices.code_folder import compose_codes, parse_codes
from duetts.voices.folder import WRITING, place_file, storage, sync_folder
from duetts.voices.names import FOLDER_NAME, folder_name, name_key, name_problem

log = logging.getLogger(__name__)

ORIGINS: dict[str, VoiceOrigin] = {"stored": "stored", "preset": "preset", "generated": "generated"}
REVISION = re.compile(r"[0-9a-f]{16}")

RECORD = "voice.json"
FORMAT = 1  # of the record
REMOVED = ".removed-"
UNFINISHED_S = 3600.0  # after this, what was never completed belongs to a process that died
KEPT_CODES = 4  # codecs whose codes a voice keeps
ATTEMPTS = 8  # when other processes add and remove the same voice at the same moment


# -- one voice -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredVoice:
    """A voice in its folder. Files of a revision that was replaced or removed meanwhile raise `FileNotFoundError`."""

    voice: Voice
    revision: str
    folder: Path
    is_default: bool = False  # of those that ship with a model, the one to speak with if nobody says otherwise

    def audio(self) -> bytes:
        """The clip's file as it was given."""
        return (self.folder / f"audio-{self.revision}").read_bytes()

    def codes(self, codec_id: str) -> Int32 | None:
        """Codes int32 [codebooks, frames] that a codec made of the clip, if they are here and whole."""
        try:
            content = self._codes_path(codec_id).read_bytes()
        except OSError:
            return None
        return parse_codes(self._codes_key(codec_id), content)

    def keep_codes(self, codec_id: str, codes: Int32) -> None:
        """Keeps a codec's codes beside the clip. A folder that cannot be written stays as it is."""
        try:
            place_file(self._codes_path(codec_id), compose_codes(self._codes_key(codec_id), codes))
            kept = sorted(self.folder.glob(f"codes-{self.revision}-*"), key=lambda path: path.stat().st_mtime)
            for path in kept[:-KEPT_CODES]:
                path.unlink()
        except OSError as error:
            log.info("codes of the voice %s are not kept in its folder: %s", self.voice.name, error.strerror)

    def _codes_path(self, codec_id: str) -> Path:
        codec = hashlib.sha256(codec_id.encode()).hexdigest()[:16]
        return self.folder / f"codes-{self.revision}-{codec}.safetensors"

    def _codes_key(self, codec_id: str) -> str:
        return f"{self.revision} {codec_id}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a record says."""

    voice: Voice
    revision: str
    is_default: bool


def read_voice(folder: Path) -> StoredVoice:
    """The voice of a folder. Raises `CheckpointError` for what is none, `FileNotFoundError` without a record."""
    path = folder / RECORD
    path.stat()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"voice {folder.name}: its record cannot be read: {error.strerror}") from error
    facts = parse_record(content, folder.name)
    return StoredVoice(facts.voice, facts.revision, folder, facts.is_default)


def parse_record(content: bytes, name: str) -> Facts:
    """What a voice's record says. `name` is its folder's, for errors. Raises `CheckpointError` for what is none."""
    fields = Fields(parse_json(content, f"voice {name}"), f"voice {name}")
    if fields.integer("format") != FORMAT:
        raise CheckpointError(f"voice {name}: its format is not {FORMAT}")
    revision, origin = fields.text("revision", ""), fields.text("origin", "stored")
    is_default = fields.flag("default", False)
    voice = Voice(
        name=fields.text("name", ""),
        transcript=fields.text("transcript", ""),
        created_at=fields.integer("created_at", minimum=0),
        duration_s=fields.number("duration_s"),
        num_bytes=fields.integer("num_bytes"),
        media_type=fields.text("media_type", "application/octet-stream"),
        consent=fields.text("consent", ""),
        description=fields.text("description", ""),
        language=fields.text("language", ""),
        tags=fields.text("tags", ""),
    )
    fields.finish()
    if name_problem(voice.name) or not voice.transcript or not REVISION.fullmatch(revision):
        raise CheckpointError(f"voice {name}: name, transcript or revision cannot be right")
    if origin not in ORIGINS:
        raise CheckpointError(f"voice {name}: its origin {origin!r} is unknown")
    return Facts(replace(voice, origin=ORIGINS[origin]), revision, is_default)


def read_presets(folder: Path) -> list[StoredVoice]:
    """The voices that ship with a model, in its folder `voices`, by name. Raises `CheckpointError` when one is damaged."""
    if not folder.is_dir():
        return []
    try:
        voices = [read_voice(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    except FileNotFoundError as error:
        raise CheckpointError(f"a voice of the model has no {RECORD}") from error
    return [replace(stored, voice=replace(stored.voice, origin="preset")) for stored in voices]


# -- all voices ----------------------------------------------------------------------------------------------------------


class VoiceStore:
    """The voices of a folder, which is made when the first one comes. Any thread and any number of processes.

    Every look reads the disk, so that what another process did counts at once. `max_voices` and `max_bytes` (of the clips'
    files) bound it; each process looks before it adds, so n of them at once may exceed it by n - 1 voices.
    """

    def __init__(self, folder: Path, max_voices: int, max_bytes: int) -> None:
        self._folder = folder
        self._max_voices = max_voices
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._read: dict[str, tuple[tuple[int, ...], StoredVoice | None]] = {}  # by folder name: stamp of the record, voice
        self._sweep()

    def find(self, name: str, known_elsewhere: bool = False) -> StoredVoice | None:
        """The voice of a name in any spelling. Looking costs so little here that it is always done."""
        return None if name_problem(name) else self._look(folder_name(name))

    def forget(self, name: str) -> None:
        """Nothing: the next `find` looks anyway."""

    def holds(self, name: str) -> bool:
        """Whether the name is taken, be it by a damaged folder."""
        return (self._folder / folder_name(name)).is_dir()

    def all(self) -> list[StoredVoice]:
        """All voices, by name."""
        found = {name: self._look(name) for name in self._folder_names()}
        for name in self._read.keys() - found.keys():
            self._read.pop(name, None)
        return sorted((stored for stored in found.values() if stored), key=lambda stored: name_key(stored.voice.name))

    def add(
        self, voice: Voice, audio: bytes, codec_id: str = "", codes: Int32 | None = None, *, replace: bool, bounded: bool = True
    ) -> StoredVoice:
        """Keeps a voice that has been checked, whole or not at all.

        Raises `VoiceExists` unless `replace`, `InvalidRequest` with the code voice_limit, `StorageFailure`.
        """
        with self._lock, storage():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a voice is its speaker's own
            self._sweep()
            final = self._folder / folder_name(voice.name)
            for _ in range(ATTEMPTS):
                taken = final.is_dir()
                if taken and not replace:
                    raise VoiceExists(f"the voice {voice.name!r} exists; send overwrite to replace it")
                if bounded:
                    self._check_room(final.name, voice.num_bytes)
                stored = StoredVoice(voice, secrets.token_hex(8), final)
                place = self._renew if taken else self._create
                if place(stored, audio, codec_id, codes):
                    return stored
        raise StorageFailure("other processes keep changing this voice")

    def remove(self, name: str) -> bool:
        """Removes a voice, a damaged one too. False if there is none. Raises `StorageFailure`."""
        if name_problem(name):
            return False
        aside = self._folder / f"{REMOVED}{secrets.token_hex(8)}"
        with self._lock, storage():
            try:
                os.rename(self._folder / folder_name(name), aside)
            except FileNotFoundError:
                return False
            sync_folder(self._folder)
        shutil.rmtree(aside, ignore_errors=True)
        return True

    def _create(self, stored: StoredVoice, audio: bytes, codec_id: str, codes: Int32 | None) -> bool:
        """False if another process was first."""
        aside = Path(tempfile.mkdtemp(dir=self._folder, prefix=WRITING))
        try:
            _write_files(replace(stored, folder=aside), audio, codec_id, codes)
            os.rename(aside, stored.folder)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return False
            raise
        sync_folder(self._folder)
        return True

    def _renew(self, stored: StoredVoice, audio: bytes, codec_id: str, codes: Int32 | None) -> bool:
        """False if another process has removed the voice meanwhile."""
        before = self._look(stored.folder.name)
        try:
            _write_files(stored, audio, codec_id, codes)
        except OSError as error:
            _remove_files(stored.folder, lambda path: stored.revision in path.name)
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                return False
            raise
        if not (stored.folder / f"audio-{stored.revision}").exists():
            return False  # the folder was removed and made anew between the two files
        old = before.revision if before else "none"
        late = time.time() - UNFINISHED_S
        _remove_files(
            stored.folder,
            lambda path: old in path.name or (stored.revision not in path.name and path.stat().st_mtime < late),
        )
        return True

    def _check_room(self, name: str, num_bytes: int) -> None:
        others = self._folder_names() - {name}
        total = num_bytes + sum(stored.voice.num_bytes for stored in map(self._look, others) if stored)
        check_room(len(others), total, self._max_voices, self._max_bytes)

    def _folder_names(self) -> set[str]:
        try:
            with os.scandir(self._folder) as entries:
                return {entry.name for entry in entries if FOLDER_NAME.fullmatch(entry.name) and entry.is_dir()}
        except OSError:
            return set()

    def _look(self, name: str) -> StoredVoice | None:
        """The voice of a folder name, read anew if its record is another file than last time."""
        folder = self._folder / name
        try:
            status = (folder / RECORD).stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._read.get(name)
            if known is None or known[0] != stamp:
                known = self._read[name] = stamp, _read_or_none(folder)
        except OSError:
            return None
        return known[1]

    def _sweep(self) -> None:
        """Removes what processes left that died while they wrote or removed."""
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                unfinished = entry.name.startswith(WRITING) and time.time() - entry.stat().st_mtime > UNFINISHED_S
                if unfinished or entry.name.startswith(REMOVED):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _read_or_none(folder: Path) -> StoredVoice | None:
    try:
        stored = read_voice(folder)
    except CheckpointError as error:
        log.warning("a stored voice is left out: %s", error)
        return None
    if folder_name(stored.voice.name) != folder.name:
        log.warning("a stored voice is left out: the folder %s is not that of its name", folder.name)
        return None
    return stored


def check_room(others: int, total_bytes: int, max_voices: int, max_bytes: int) -> None:
    """Raises `InvalidRequest` with the code voice_limit when one more voice is too many, or all have too many bytes."""
    if others >= max_voices:
        raise _full(f"there are {others} stored voices, and at most {max_voices} are allowed")
    if total_bytes > max_bytes:
        raise _full(f"the stored voices would have {total_bytes} bytes, and at most {max_bytes} are allowed")


def _full(message: str) -> InvalidRequest:
    return InvalidRequest(f"{message}; remove some first", field="name", code="voice_limit")


# -- files ---------------------------------------------------------------------------------------------------------------


def _write_files(stored: StoredVoice, audio: bytes, codec_id: str, codes: Int32 | None) -> None:
    """The files of a revision, the record last: with it the revision counts."""
    record = {"format": FORMAT, "revision": stored.revision, **asdict(stored.voice)}
    place_file(stored.folder / f"audio-{stored.revision}", audio)
    if codes is not None:
        stored.keep_codes(codec_id, codes)
    place_file(stored.folder / RECORD, json.dumps(record, indent=1, ensure_ascii=False).encode())


def _remove_files(folder: Path, unwanted: Callable[[Path], bool]) -> None:
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                if path.name != RECORD and unwanted(path):
                    path.unlink()
