"""Every error that duetts raises on purpose. This room knows nothing of HTTP: `server/errors.py` maps it to statuses.

DuettsError
├── ConfigError               a setting, option or environment variable that cannot be right
│   └── FastPathMissing       what was required to be fast is not there, or is wrong
├── CheckpointError           a model folder that is incomplete, damaged or of the wrong shape
│   ├── ModelNotFound         no such folder, and no such model in the hub cache or on the hub
│   └── UnsupportedModel      a `model_type` that duetts does not know
├── NotEnoughMemory           the model and its caches do not fit the device
├── NotAllowed                whoever asks may not
│   ├── UnknownKey            no key, or none that is known here
│   └── ForeignOrigin         a page of an origin that is not let in
├── InvalidRequest            the caller can fix it; names the field and a machine-readable code
│   ├── UnknownModel          the request names a model that is not served
│   ├── UnknownSpeech         no speech of this id is known
│   ├── ForbiddenReference    a reference address that the operator does not allow
│   ├── UnreachableReference  a reference address whose host does not give a clip
│   ├── VoiceNotFound         no voice, or no consent, is stored under this name
│   ├── VoiceExists           the name is taken, and nobody said to replace
│   └── ProtectedVoice        a voice that cannot be removed, or whose clip is not given away
├── RequestEnded              the request did not produce all of its audio
│   ├── Aborted               ended from outside: the speaker was closed
│   │   ├── CallerLeft        the caller went away
│   │   └── Cancelled         somebody ended it by its id, or by a message
│   ├── DeadlineExceeded      the request's own time limit passed
│   ├── EmptyGeneration       the model ended before the first frame
│   └── EngineFailure         a step failed; the request is lost, the server goes on
├── StorageFailure            the disk did not take or give what is stored
│   └── StoreUnreachable      an object store did not answer; it may do so later
├── Overloaded                the queue is full; carries a retry time
│   └── RateLimited           whoever asks has asked too often
├── NotReady                  loading or dead; carries a retry time if one is known
│   ├── EngineDead            no engine is up
│   └── Draining              the server is stopping
└── WireError                 a message between a server and an engine process that cannot be read
"""

from __future__ import annotations


class DuettsError(Exception):
    """Parent of every error raised on purpose."""


class ConfigError(DuettsError):
    """A setting, command line option, environment variable or configuration file that cannot be right."""


class FastPathMissing(ConfigError):
    """A kernel that was required cannot be used here, or does not compute what it should."""


class CheckpointError(DuettsError):
    """A model folder that is incomplete, damaged or does not fit its own configuration."""


class ModelNotFound(CheckpointError):
    """No folder and no hub model of this name can be read."""


class UnsupportedModel(CheckpointError):
    """The configuration names a `model_type` that duetts does not know."""


class NotEnoughMemory(DuettsError):
    """Model and caches do not fit the device."""


class NotAllowed(DuettsError):
    """Whoever asks may not use the server. Messages never repeat what was sent."""


class UnknownKey(NotAllowed):
    """The server wants a key, and there was none or another one."""


class ForeignOrigin(NotAllowed):
    """A script of a web page from an origin that is not let in."""


class InvalidRequest(DuettsError):
    """A request that the caller can correct.

    `field` is the name of the offending request field (None: the body as a whole), `code` a stable machine-readable word.
    """

    def __init__(self, message: str, *, field: str | None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="model", code="model_not_found")


class UnknownSpeech(InvalidRequest):
    """The request is about a speech that is not known, or no longer."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field=None, code="request_not_found")


class ForbiddenReference(InvalidRequest):
    """A reference address that the operator has not allowed."""


class UnreachableReference(InvalidRequest):
    """The host of a reference cannot be connected to, is too slow, or answers with something else than a file."""

    def __init__(self, message: str, *, field: str | None) -> None:
        super().__init__(message, field=field, code="reference_fetch_failed")


class VoiceNotFound(InvalidRequest):
    """Nothing is stored under this name. `code` says what kind of thing was looked for."""

    def __init__(self, message: str, *, field: str | None = "name", code: str = "voice_not_found") -> None:
        super().__init__(message, field=field, code=code)


class VoiceExists(InvalidRequest):
    """The name is taken, and nobody said to replace. Trying again does not help."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="name", code="voice_exists")


class ProtectedVoice(InvalidRequest):
    """A voice that ships with the model or is the default cannot be removed; a clip that is not shared is not given away."""

    def __init__(self, message: str, *, code: str = "voice_protected") -> None:
        super().__init__(message, field="name", code=code)


class StorageFailure(DuettsError):
    """What is stored cannot be written or read: a full or read-only disk, or damaged files. Messages name no path."""


class StoreUnreachable(StorageFailure):
    """An object store does not answer, or not with what was asked for. Trying again later may help."""


class RequestEnded(DuettsError):
    """The request did not produce all of its audio."""


class Aborted(RequestEnded):
    """The request was ended from outside: the speaker is being closed, or one of the reasons below."""


class CallerLeft(Aborted):
    """The caller went away."""


class Cancelled(Aborted):
    """Somebody ended the request, by its id or by a message."""


class DeadlineExceeded(RequestEnded):
    """The request's own time limit passed."""


class EmptyGeneration(RequestEnded):
    """The model ended before it made a single frame."""


class EngineFailure(RequestEnded):
    """A step of the engine failed; this request is lost, others are not."""


class Overloaded(DuettsError):
    """The waiting line is full. `retry_after_s` is the engine's estimate of when a place will be free."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """Whoever asks has used up the requests of this minute. Others are served."""


class NotReady(DuettsError):
    """Loading, draining or dead: no request is taken now. `retry_after_s` says when to try again, if that can be told."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(NotReady):
    """No engine is up: all have ended, and are started anew if that helps."""


class Draining(NotReady):
    """The server is stopping and takes nothing new."""


class WireError(DuettsError):
    """A message between a server and an engine process that is damaged, too large, or of another version or life."""
