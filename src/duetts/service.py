"""What a front door needs of the text side: the synthesizer fulfils it, or a fake of it in tests. No behaviour, no HTTP."""

from __future__ import annotations

from typing import Any, Protocol

from duetts.types import Consent, Granularity, Int32, Source, SpeakerInfo, Speech, SpeechRequest, Voice, VoiceDraft


class Arriving(Protocol):
    """Text that comes bit by bit, and what of it can be spoken already."""

    @property
    def waiting(self) -> int:
        """Characters that were not given back."""
        ...

    def add(self, text: str) -> list[str]:
        """The pieces that are now known. Raises `InvalidRequest` for what is no text."""
        ...

    def flush(self) -> list[str]:
        """All that waits and can be spoken. The turn goes on."""
        ...

    def end(self) -> list[str]:
        """All that waits; what comes next has nothing to do with it."""
        ...


class Voices(Protocol):
    """Voices by name, in any spelling of it. They outlive the process and are shared by those that use the same folder."""

    @property
    def default_name(self) -> str:
        """The voice that speaks when nobody names one; "none" is the bare model."""
        ...

    async def all(self) -> list[Voice]:
        """Every voice that can be named, by name."""
        ...

    async def get(self, name: str) -> Voice:
        """One voice by name. Raises `VoiceNotFound`."""
        ...

    async def audio(self, name: str) -> bytes:
        """The file of a voice's clip. Raises `VoiceNotFound`, `ProtectedVoice` where clips are not shared."""
        ...

    async def add(self, draft: VoiceDraft, *, replace: bool) -> Voice:
        """Checks and encodes a voice, then keeps it.

        Raises `InvalidRequest` for what is wrong with it, `VoiceExists` unless `replace`; what was there is then untouched.
        """
        ...

    async def change(
        self, name: str, *, new_name: str | None = None, description: str | None = None, tags: str | None = None
    ) -> Voice:
        """Changes what is known of a stored voice, not its clip.

        Raises `VoiceNotFound`, `ProtectedVoice`, `VoiceExists` for a name that is taken, `InvalidRequest` for what is wrong.
        """
        ...

    async def remove(self, name: str) -> Voice:
        """Removes a voice and returns what it was. Raises `VoiceNotFound`, `ProtectedVoice`."""
        ...


class Consents(Protocol):
    """Recordings of consent, kept and nothing more."""

    async def add(self, name: str, language: str, recording: bytes) -> Consent:
        """Keeps a recording. Raises `InvalidRequest` when there are too many."""
        ...

    async def all(self) -> list[Consent]:
        """Every consent, the latest first."""
        ...

    async def get(self, consent_id: str) -> Consent:
        """One consent. Raises `VoiceNotFound`."""
        ...

    async def rename(self, consent_id: str, name: str) -> Consent:
        """Gives a consent another name. Raises `VoiceNotFound`."""
        ...

    async def remove(self, consent_id: str) -> None:
        """Removes a consent. Raises `VoiceNotFound`."""
        ...


class SpeechService(Protocol):
    """What a front door needs: the synthesizer, or a fake of it in tests."""

    @property
    def voices(self) -> Voices:
        """The voices that requests may name."""
        ...

    @property
    def consents(self) -> Consents:
        """The consents of speakers."""
        ...

    @property
    def info(self) -> SpeakerInfo:
        """Facts of the model that is served."""
        ...

    def arriving(self, granularity: Granularity, most: int) -> Arriving:
        """Text that will come bit by bit, cut into pieces of at most so many UTF-8 bytes ("length": characters)."""
        ...

    async def start(self, request: SpeechRequest) -> Speech:
        """Checks the request completely and encodes its references; it is queued when the speech is first iterated.

        Raises `InvalidRequest` for what the caller can fix, `Overloaded` or `NotReady` when there is no room.
        """
        ...

    async def codes_of(self, audio: Source, field: str) -> Int32:
        """Codes int32 [codebooks, frames] of a clip. Raises `InvalidRequest` naming the field."""
        ...

    async def sound_of(self, codes: Int32, field: str, request_id: str) -> bytes:
        """Mono signed 16-bit PCM at the codec rate of codes [codebooks, frames]. Raises `InvalidRequest` naming the field."""
        ...

    def stats(self) -> dict[str, Any]:
        """Gauges and counters of the engine."""
        ...
