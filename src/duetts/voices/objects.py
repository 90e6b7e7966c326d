"""Named voices in an object store that many machines share. The same layout as on disk, `store.py`; other promises.

The record `voice.json` is put last and removed first: a voice that can be seen is whole, and what a process that died has
left is rubbish that a later one sweeps. A new name has one winner where the store can promise it. Of two that replace a voice
at once the last one wins, without either being told. A replica looks again at a voice that it knows after `FRESH_S`, so a
voice that another one has removed or replaced is spoken with so much longer; a new one, and every list, is read at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from duetts.errors import CheckpointError, StorageFailure, VoiceExists
from duetts.types import Int32, Voice
from duetts.voices.bucket import Bucket, Item, located
from duetts.voices.code_folder import compose_codes, parse_codes
from duetts.voices.names import FOLDER_NAME, folder_name, name_key, name_problem
from duetts.voices.store import (
    ATTEMPTS,
    FORMAT,
    KEPT_CODES,
    RECORD,
    UNFINISHED_S,
    Facts,
    StoredVoice,
    VoiceStore,
    check_room,
    parse_record,
)

FRESH_S = 2.0  # a voice that was seen so lately is not looked at again
OUTAGE_S = 600.0  # and so long, if the store does not answer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObjectVoice:
    """A voice in a bucket. Objects of a revision that was replaced or removed meanwhile raise `FileNotFoundError`."""

    voice: Voice
    revision: str
    bucket: Bucket = field(repr=False, compare=False)
    folder: str

    def audio(self) -> bytes:
        """The clip's file as it was given."""
        return self.bucket.read(f"{self.folder}/audio-{self.revision}")

    def codes(self, codec_id: str) -> Int32 | None:
        """Codes int32 [codebooks, frames] that a codec made of the clip, if they are there and whole."""
        try:
            content = self.bucket.read(self._codes_name(codec_id))
        except (FileNotFoundError, StorageFailure):
            return None
        return parse_codes(f"{self.revision} {codec_id}", content)

    def keep_codes(self, codec_id: str, codes: Int32) -> None:
        """Keeps a codec's codes beside the clip. A store that does not take them stays as it is."""
        with suppress(StorageFailure):
            self.bucket.write(self._codes_name(codec_id), compose_codes(f"{self.revision} {codec_id}", codes))
            kept = [item for item in self.bucket.items(self.folder) if f"/codes-{self.revision}-" in item.name]
            kept.sort(key=lambda item: item.time or 0.0)
            self.bucket.remove(item.name for item in kept[:-KEPT_CODES])

    def _codes_name(self, codec_id: str) -> str:
        codec = hashlib.sha256(codec_id.encode()).hexdigest()[:16]
        return f"{self.folder}/codes-{self.revision}-{codec}.safetensors"


@dataclass(slots=True)
class _Seen:
    """A record when it was last read; `stamp` is what a list said of it, `voice` None if there is none or a damaged one."""

    at: float
    voice: ObjectVoice | None
    content: bytes = b""
    stamp: str = ""


class ObjectVoices:
    """The voices of a bucket, as `VoiceStore` has those of a folder. Its bounds are looked at before adding."""

    def __init__(
        self, bucket: Bucket, max_voices: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._bucket = bucket
        self._max_voices, self._max_bytes = max_voices, max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}  # by folder

    def find(self, name: str, known_elsewhere: bool = False) -> ObjectVoice | None:
        """The voice of a name in any spelling. That there is none is also remembered for `FRESH_S`, but only for a name that is
        `known_elsewhere`: a voice that was just added by another replica is found. Raises `StorageFailure`."""
        if name_problem(name):
            return None
        folder = folder_name(name)
        seen = self._seen.get(folder)
        if seen is not None and self._clock() - seen.at < FRESH_S and (seen.voice is not None or known_elsewhere):
            return seen.voice
        try:
            return self._read(folder)
        except StorageFailure:
            if seen is None or self._clock() - seen.at > OUTAGE_S:
                raise
            return seen.voice

    def forget(self, name: str) -> None:
        """Lets the next `find` look, because an object of the voice was not there any more."""
        self._seen.pop(folder_name(name), None)

    def holds(self, name: str) -> bool:
        """Whether the name is taken, be it by a damaged record."""
        try:
            self._bucket.read(f"{folder_name(name)}/{RECORD}")
        except FileNotFoundError:
            return False
        return True

    def all(self) -> list[ObjectVoice]:
        """All voices, by name. Records that have changed are read anew."""
        return self._listed(self._bucket.items())

    def add(
        self, voice: Voice, audio: bytes, codec_id: str = "", codes: Int32 | None = None, *, replace: bool, bounded: bool = True
    ) -> ObjectVoice:
        """Keeps a voice that has been checked, whole or not at all.

        Raises `VoiceExists` unless `replace`, `InvalidRequest` with the code voice_limit, `StorageFailure`.
        """
        folder = folder_name(voice.name)
        with self._lock:
            for _ in range(ATTEMPTS):
                items = self._bucket.items()
                known = {one.folder: one for one in self._listed(items)}
                taken = any(item.name == f"{folder}/{RECORD}" for item in items)
                if taken and not replace:
                    raise VoiceExists(f"the voice {voice.name!r} exists; send overwrite to replace it")
                if bounded:
                    sizes = [one.voice.num_bytes for one in known.values() if one.folder != folder]
                    check_room(len(sizes), voice.num_bytes + sum(sizes), self._max_voices, self._max_bytes)
                stored = ObjectVoice(voice, secrets.token_hex(8), self._bucket, folder)
                if self._place(stored, audio, codec_id, codes, replace=taken):
                    self._sweep(items, known, folder)
                    return stored
        raise StorageFailure("other processes keep changing this voice")

    def remove(self, name: str) -> bool:
        """Removes a voice, a damaged one too. False if there is none. Raises `StorageFailure`."""
        if name_problem(name):
            return False
        folder = folder_name(name)
        with self._lock:
            try:
                found = self._parse(folder, self._bucket.read(f"{folder}/{RECORD}"))
            except FileNotFoundError:
                self._seen[folder] = _Seen(self._clock(), None)
                return False
            items = self._bucket.items(folder)
            self._bucket.remove([f"{folder}/{RECORD}"])
            self._seen[folder] = _Seen(self._clock(), None)
            # Only what belongs to the revision that was seen: another process may be putting the next one there.
            self._bucket.remove(item.name for item in items if found is None or found.revision in item.name)
        return True

    # -- inside

    def _place(self, stored: ObjectVoice, audio: bytes, codec_id: str, codes: Int32 | None, replace: bool) -> bool:
        """The objects of a revision, the record last: with it the revision counts. False if another process was first."""
        record = {"format": FORMAT, "revision": stored.revision, **asdict(stored.voice)}
        content = json.dumps(record, indent=1, ensure_ascii=False).encode()
        name = f"{stored.folder}/{RECORD}"
        self._bucket.write(f"{stored.folder}/audio-{stored.revision}", audio)
        if codes is not None:
            stored.keep_codes(codec_id, codes)
        if replace:
            self._bucket.write(name, content)
        elif not self._bucket.create(name, content):
            self._bucket.remove(item.name for item in self._bucket.items(stored.folder) if stored.revision in item.name)
            return False
        self._seen[stored.folder] = _Seen(self._clock(), stored, content)
        return True

    def _read(self, folder: str) -> ObjectVoice | None:
        before = self._seen.get(folder)
        try:
            content = self._bucket.read(f"{folder}/{RECORD}")
        except FileNotFoundError:
            content = b""
        return self._take(folder, content, "", before)

    def _take(self, folder: str, content: bytes, stamp: str, before: _Seen | None) -> ObjectVoice | None:
        """The voice of a record, no bytes if there is none. What this process has added or removed since `before`, which was
        known when the record was read, is newer and stays."""
        if before is not None and before.content == content:
            voice, stamp = before.voice, stamp or before.stamp
        else:
            voice = self._parse(folder, content) if content else None
        if self._seen.get(folder) is before:
            self._seen[folder] = _Seen(self._clock(), voice, content, stamp)
        return voice

    def _parse(self, folder: str, content: bytes) -> ObjectVoice | None:
        try:
            facts: Facts = parse_record(content, folder)
        except CheckpointError as error:
            log.warning("a stored voice is left out: %s", error)
            return None
        if folder_name(facts.voice.name) != folder:
            log.warning("a stored voice is left out: the folder %s is not that of its name", folder)
            return None
        return ObjectVoice(facts.voice, facts.revision, self._bucket, folder)

    def _listed(self, items: Iterable[Item]) -> list[ObjectVoice]:
        """The voices of a list of all objects."""
        stamps = {
            item.name.partition("/")[0]: item.stamp
            for item in items
            if item.name.endswith(f"/{RECORD}") and FOLDER_NAME.fullmatch(item.name.partition("/")[0])
        }
        found: dict[str, ObjectVoice | None] = {}
        for folder, stamp in stamps.items():
            seen = self._seen.get(folder)
            if seen is not None and stamp and seen.stamp == stamp:
                seen.at, found[folder] = self._clock(), seen.voice
        missing = [f"{folder}/{RECORD}" for folder in stamps if folder not in found]
        before = dict(self._seen)
        for name, content in self._bucket.read_all(missing).items():
            folder = name.partition("/")[0]
            found[folder] = self._take(folder, content, stamps[folder], before.get(folder))
        for folder in self._seen.keys() - stamps.keys():
            self._seen.pop(folder, None)
        return sorted((voice for voice in found.values() if voice), key=lambda stored: name_key(stored.voice.name))

    def _sweep(self, items: list[Item], known: dict[str, ObjectVoice], replaced: str) -> None:
        """Removes the revision that was just replaced, and what is old and of none that counts: dead processes have left it.
        `items` and `known` are from before; what came since then may be somebody's next revision."""
        late = time.time() - UNFINISHED_S
        recorded = {item.name.partition("/")[0] for item in items if item.name.endswith(f"/{RECORD}")}
        rubbish = []
        for item in items:
            folder, _, rest = item.name.partition("/")
            if rest == RECORD or not FOLDER_NAME.fullmatch(folder) or (folder in recorded and folder not in known):
                continue  # a record, something else's, or of a damaged voice, which is left to people
            counts = folder in known and known[folder].revision in rest
            is_old = item.time is not None and item.time < late
            if (is_old and not counts) or (counts and folder == replaced):
                rubbish.append(item.name)
        with suppress(StorageFailure):
            self._bucket.remove(rubbish)


def open_store(place: Path | str, max_voices: int, max_bytes: int) -> VoiceStore | ObjectVoices:
    """The voices of a folder, or of a URL. Raises `ConfigError` for a URL that nothing here can reach."""
    found = located(place)
    if isinstance(found, Path):
        return VoiceStore(found, max_voices, max_bytes)
    return ObjectVoices(found, max_voices, max_bytes)


KeptVoice = StoredVoice | ObjectVoice
