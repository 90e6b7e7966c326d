"""The voices that a server can speak with, by name: stored ones, those that ship with the model, and the default. No HTTP.

A name becomes codes and a transcript. Nothing is decoded or encoded for a voice whose codes are known.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import time
from typing import Any, Protocol

import numpy as np

from duetts.audio.encode import wav_file
from duetts.config import VoicesConfig
from duetts.errors import (
    ConfigError,
    InvalidRequest,
    NotReady,
    Overloaded,
    ProtectedVoice,
    RequestEnded,
    StorageFailure,
    VoiceExists,
    VoiceNotFound,
)
from duetts.types import Int32, SpeakerInfo, Voice, VoiceDraft
from duetts.voices.names import clean_name, name_key
from duetts.voices.objects import KeptVoice, open_store
from duetts.voices.reference import ReferenceCodes
from duetts.voices.sharing import SharedWork, Threads
from duetts.voices.store import ATTEMPTS, read_presets

log = logging.getLogger(__name__)

READING_THREADS = 4
MAX_WAITING = 4096  # looks at the disk, 0.1 ms each: more requests than engines take at once
MAX_KNOWN = 1024  # voices whose codes stay in memory, about 26 KB each
NAMES_SHOWN = 20
BARE = "none"
MAX_DETAIL_CHARS = 1024
CLIP_TRIES = 4  # seeds that are tried for a clip of the model's own
SEED_STEP = 1_000_003

# Containers by how their files begin: offset, bytes, media type.
SIGNATURES = (
    (0, b"RIFF", "audio/wav"), (0, b"ID3", "audio/mpeg"), (0, b"fLaC", "audio/flac"), (0, b"OggS", "audio/ogg"),
    (0, b"\x1a\x45\xdf\xa3", "audio/webm"), (4, b"ftyp", "audio/mp4"), (0, b"\xff\xf1", "audio/aac"),
    (0, b"\xff\xf9", "audio/aac"), (0, b"\xff", "audio/mpeg"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpokenVoice:
    """A voice ready to speak with: its clip's codes int32 [codebooks, frames] and transcript. A `hit` was not encoded now."""

    name: str
    transcript: str
    codes: Int32
    hit: bool


@dataclass(frozen=True, slots=True)
class SpokenClip:
    """What the model spoke by itself: PCM (s16le), its codes int32 [codebooks, frames] and the text."""

    pcm: bytes
    codes: Int32
    text: str


class Text(Protocol):
    """What the text side says about a transcript, and how it speaks a clip of its own."""

    def clean_transcript(self, text: str | None) -> str:
        """The transcript as it is used. Raises `InvalidRequest`."""
        ...

    def check_room(self, codes: Int32, transcript: str) -> None:
        """Raises `InvalidRequest` when no speech has room beside such a reference."""
        ...

    async def speak_clip(self, seed: int) -> SpokenClip | None:
        """A sentence in a voice of the model's own; None if it went wrong."""
        ...


class VoiceLibrary:
    """Voices by name. Used from one event loop; the disk is read and written in threads."""

    def __init__(self, config: VoicesConfig, presets: Path, info: SpeakerInfo, references: ReferenceCodes, text: Text) -> None:
        self._config = config
        self._info = info
        self._references = references
        self._text = text
        self._store = open_store(config.folder, config.max_voices, config.max_bytes)
        self._presets = {name_key(preset.voice.name): preset for preset in read_presets(presets)}
        self._aliases = {name_key(alias): name for alias, name in config.aliases}
        self._threads = Threads("duetts-voices", READING_THREADS, MAX_WAITING)
        self._known: OrderedDict[str, SpokenVoice] = OrderedDict()  # by revision, least lately used first
        self._openings: SharedWork[SpokenVoice] = SharedWork()
        self._makings: SharedWork[SpokenVoice | None] = SharedWork()
        self._default = self._plan_default()
        self._held: SpokenVoice | None = None  # the default voice, which goes on if it is removed elsewhere
        self._mute = False  # the model could not speak a clip of its own
        self.hits = 0
        self.misses = 0

    # -- the default voice

    @property
    def default_name(self) -> str:
        """The voice that speaks when nobody names one; "none" is the bare model."""
        return BARE if self._mute else self._default

    def _plan_default(self) -> str:
        """The name of the default voice, as far as the configuration decides it."""
        chosen = self._config.default_voice
        if self._seed is not None:
            codec = hashlib.sha256(self._info.codec_id.encode()).hexdigest()[:8]
            return f"seed-{self._seed}-{codec}"
        if chosen == "auto":
            flagged = [preset for preset in self._presets.values() if preset.is_default]
            first = next(iter(flagged or self._presets.values()), None)
            return first.voice.name if first else BARE
        return BARE if name_key(chosen) == BARE else chosen

    @property
    def _seed(self) -> int | None:
        """The seed of the clip that the model speaks itself, if the default voice is one."""
        if self._config.default_voice == "auto" and not self._presets and self._info.weights == "trained":
            return 0
        return self._config.default_seed

    async def prepare(self) -> None:
        """Makes the default voice ready, so that no request waits for it. Raises `ConfigError` if it does not exist.

        An engine that cannot speak a clip now, or a store that does not answer, may do so later: the first request without a
        voice then waits for it.
        """
        try:
            voice = await self._default_voice()
        except (RequestEnded, Overloaded, NotReady, StorageFailure) as error:
            log.warning("the default voice is not ready yet: %s", error)
            return
        log.info("default voice: %s", voice.name if voice else "none, the bare model")

    async def _default_voice(self) -> SpokenVoice | None:
        """None is the bare model."""
        if self.default_name == BARE:
            return None
        try:
            self._held = await self._open(self._default) or self._held
        except StorageFailure:
            if self._held is None:
                raise
        if self._held is None and self._seed is not None:
            return await self._makings.run("clip", lambda: self._make_clip(self._seed or 0))
        if self._held is None:
            raise ConfigError(f"the default voice {self._default!r} is not stored; add it, or choose another or none")
        return self._held

    async def _make_clip(self, seed: int) -> SpokenVoice | None:
        """Lets the model speak a clip and stores it like any voice. If another process was first, its clip counts."""
        for index in range(CLIP_TRIES):
            clip = await self._text.speak_clip(seed + index * SEED_STEP)
            if clip is not None:
                break
        else:
            log.warning("the model did not speak a usable clip for the default voice: the bare model speaks instead")
            self._mute = True
            return None
        audio = wav_file(clip.pcm, self._info.sample_rate)
        duration_s = len(clip.pcm) / 2 / self._info.sample_rate
        voice = Voice(self._default, clip.text, int(time()), duration_s, len(audio), "audio/wav", "generated")
        self._held = SpokenVoice(voice.name, voice.transcript, clip.codes, hit=True)
        try:
            await self._threads.run(
                self._store.add, voice, audio, self._info.codec_id, clip.codes, replace=False, bounded=False
            )  # fmt: skip
        except VoiceExists:
            self._held = await self._open(self._default) or self._held
        except StorageFailure as error:
            log.warning("the default voice is kept in memory only, and is made again at the next start: %s", error)
        return self._held

    # -- speaking

    async def choose(self, name: str, field: str, or_default: bool) -> SpokenVoice | None:
        """The voice that a request names, None for the bare model. Raises `InvalidRequest` with the code unknown_voice."""
        key = name_key(name)
        if key in ("", "default"):
            return await self._default_voice()
        if key == BARE:
            return None
        voice = await self._open(name)
        if voice is None and key in self._aliases:
            voice = await self._open(self._aliases[key])
        if voice is not None:
            return voice
        if or_default:
            return await self._default_voice()
        raise await self._unknown(name, field)

    async def _unknown(self, name: str, field: str) -> InvalidRequest:
        names = ["default", *(voice.name for voice in await self.all())]
        listed = ", ".join(names[:NAMES_SHOWN]) + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")
        return InvalidRequest(
            f"{field} {name[:64]!r} is unknown; these exist: {listed}. POST /v1/audio/voices registers another, or send a clip "
            "as ref_audio, with ref_text",
            field=field, code="unknown_voice",
        )  # fmt: skip

    async def _open(self, name: str) -> SpokenVoice | None:
        """A voice by name, ready to speak; None if there is none."""
        for _ in range(ATTEMPTS):
            stored = await self._threads.run(self._find, name)
            if stored is None:
                return None
            known = self._known.get(stored.revision)
            if known is not None:
                self._known.move_to_end(stored.revision)
                self.hits += 1
                return known
            try:
                return await self._openings.run(stored.revision, partial(self._load, stored))
            except FileNotFoundError:  # replaced or removed meanwhile
                self._store.forget(name)
        raise StorageFailure("this voice is damaged: its clip is missing")

    async def _load(self, stored: KeptVoice) -> SpokenVoice:
        """Codes from the voice's folder, or from its clip when this codec has not met it."""
        codec_id = self._info.codec_id
        codes = await self._threads.run(stored.codes, codec_id) if codec_id else None
        if codes is not None and codes.shape[0] != self._info.num_codebooks:
            codes = None
        hit = codes is not None
        if codes is None:
            audio = await self._threads.run(stored.audio)
            found = await self._references.codes(await self._references.decode(audio, "voice"))
            codes, hit = found.codes, found.hit
            if codec_id and stored.voice.origin != "preset":  # a model's folder is not ours to write to
                self._threads.start(stored.keep_codes, codec_id, codes)
        self.hits += hit
        self.misses += not hit
        codes = np.ascontiguousarray(codes)
        codes.setflags(write=False)  # it is shared from now on
        spoken = SpokenVoice(stored.voice.name, stored.voice.transcript, codes, hit)
        self._known[stored.revision] = replace(spoken, hit=True)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return spoken

    def _all(self) -> list[KeptVoice]:
        return [*self._store.all()]

    def _find(self, name: str) -> KeptVoice | None:
        preset = self._presets.get(name_key(name))
        try:
            return self._store.find(name, known_elsewhere=preset is not None) or preset
        except StorageFailure:
            if preset is None:
                raise
            return preset

    # -- keeping

    async def all(self) -> list[Voice]:
        """Every voice that can be named, by name. A stored one hides a preset of its name."""
        stored = {name_key(found.voice.name): found for found in await self._threads.run(self._all)}
        return [found.voice for _, found in sorted((self._presets | stored).items())]

    async def get(self, name: str) -> Voice:
        """One voice by name. Raises `VoiceNotFound`."""
        return (await self._one(name)).voice

    async def audio(self, name: str) -> bytes:
        """The file of a voice's clip. Raises `VoiceNotFound`, `ProtectedVoice` where clips are not shared."""
        for _ in range(ATTEMPTS):
            stored = await self._one(name)
            if not self._config.share_audio:
                raise ProtectedVoice("this server does not give clips of voices away", code="voice_audio_forbidden")
            try:
                return await self._threads.run(stored.audio)
            except FileNotFoundError:
                self._store.forget(name)
        raise StorageFailure("this voice is damaged: its clip is missing")

    async def _one(self, name: str) -> KeptVoice:
        stored = await self._threads.run(self._find, name)
        if stored is None:
            raise VoiceNotFound(f"there is no voice {name[:64]!r}")
        return stored

    async def add(self, draft: VoiceDraft, *, replace: bool) -> Voice:
        """Checks and encodes a voice, then keeps it. What was there is untouched until everything is right."""
        name = clean_name(draft.name)
        if name_key(name) in self._presets:
            raise InvalidRequest(f"name {name!r} belongs to a voice that ships with the model", field="name")
        for field, text in {"consent": draft.consent, "speaker_description": draft.description, "language": draft.language,
                            "tags": draft.tags}.items():  # fmt: skip
            check_detail(field, text)
        transcript = self._text.clean_transcript(draft.transcript)
        if not replace and await self._threads.run(self._store.holds, name):
            raise VoiceExists(f"the voice {name!r} exists; send overwrite to replace it")
        audio = await self._references.file(draft.audio, "audio_sample")
        clip = await self._references.decode(audio, "audio_sample")
        codes = (await self._references.codes(clip)).codes
        self._text.check_room(codes, transcript)
        voice = Voice(
            name, transcript, int(time()), clip.num_samples / self._info.sample_rate, len(audio),
            media_type(audio), "stored", draft.consent, draft.description, draft.language, draft.tags,
        )  # fmt: skip
        await self._threads.run(self._store.add, voice, audio, self._info.codec_id, codes, replace=replace)
        return voice

    async def change(
        self, name: str, *, new_name: str | None = None, description: str | None = None, tags: str | None = None
    ) -> Voice:
        """Changes what is known of a stored voice, not its clip. A new name is there before the old one goes."""
        stored = await self._own(name)
        shown = stored.voice.name if new_name is None else clean_name(new_name)
        if name_key(shown) in self._presets:
            raise InvalidRequest(f"name {shown!r} belongs to a voice that ships with the model", field="name")
        details = {"description": description, "tags": tags}
        given: dict[str, Any] = {field: text for field, text in details.items() if text is not None}
        for field, text in given.items():
            check_detail(field, text)
        changed = replace(stored.voice, name=shown, **given)
        moves = name_key(shown) != name_key(stored.voice.name)
        codec_id = self._info.codec_id
        try:
            audio = await self._threads.run(stored.audio)
        except FileNotFoundError:
            self._store.forget(name)
            raise VoiceExists(f"somebody else is changing the voice {name[:64]!r}") from None
        codes = await self._threads.run(stored.codes, codec_id) if codec_id else None
        await self._threads.run(self._store.add, changed, audio, codec_id, codes, replace=not moves, bounded=False)
        if moves:
            await self._threads.run(self._store.remove, name)
        return changed

    async def remove(self, name: str) -> Voice:
        """Removes a stored voice. Those who speak with it keep what they have."""
        stored = await self._own(name)
        if not await self._threads.run(self._store.remove, name):
            raise VoiceNotFound(f"there is no voice {name[:64]!r}")
        return stored.voice

    async def _own(self, name: str) -> KeptVoice:
        """A stored voice that may be changed. Raises `VoiceNotFound`, `ProtectedVoice`."""
        key = name_key(name)
        if key == "default" or (key == name_key(self.default_name) and key != BARE):
            raise ProtectedVoice("this is the default voice of the server")
        stored = await self._threads.run(self._store.find, name)
        if stored is None and key in self._presets:
            raise ProtectedVoice("this voice ships with the model")
        if stored is None:
            raise VoiceNotFound(f"there is no voice {name[:64]!r}")
        return stored

    def close(self) -> None:
        """Reads and writes no more. Waits for nothing."""
        self._threads.close()


def media_type(audio: bytes) -> str:
    """What kind of file a clip is, from how it begins."""
    return next((kind for at, sign, kind in SIGNATURES if audio[at:].startswith(sign)), "application/octet-stream")


def check_detail(field: str, text: str) -> None:
    """Refuses what should not be kept beside a voice."""
    if len(text) > MAX_DETAIL_CHARS:
        raise InvalidRequest(
            f"{field} has {len(text)} characters; at most {MAX_DETAIL_CHARS} are allowed", field=field, code="input_too_long"
        )
    if "\x00" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequest(f"{field} holds a NUL character or an unpaired surrogate", field=field)
