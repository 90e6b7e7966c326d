"""The words that rooms share: requests, chunks, outcomes and the `Speaker` seam. Holds no behaviour, no torch, no HTTP.

What a front door asks for is in `service.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from duetts.errors import DuettsError

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length", "aborted", "failed", "timeout"]
Granularity = Literal["none", "sentence", "clause", "length"]  # where text that arrives bit by bit is cut


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy, `top_k` 0 is no limit, `residual_temperature` None is `temperature`."""

    temperature: float = 0.8
    top_p: float = 0.9
    top_k: int = 30
    repetition_penalty: float = 1.0
    residual_temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """Where a clip is: an http or https address, or if `local` the path of a file. Not checked."""

    text: str
    local: bool = False


Source = bytes | Address  # of a clip: an encoded audio file of any container, or where one is


@dataclass(frozen=True, slots=True)
class Reference:
    """A voice to clone: a clip, or codes of one (int32 [codebooks, frames], not checked), and what is said in it."""

    audio: Source | Int32
    text: str
    origin: str = field(default="ref_audio", compare=False)  # the field of the request that it came in


VoiceOrigin = Literal["stored", "preset", "generated"]


@dataclass(frozen=True, slots=True)
class Voice:
    """A voice with a name, as far as the world may know it. `num_bytes` are those of its clip's file, `duration_s` its length.

    It was stored by a user, ships with the model (`preset`), or is a clip that the model spoke itself (`generated`).
    """

    name: str
    transcript: str
    created_at: int  # seconds since 1970
    duration_s: float
    num_bytes: int
    media_type: str
    origin: VoiceOrigin = "stored"
    consent: str = ""
    description: str = ""
    language: str = ""
    tags: str = ""


@dataclass(frozen=True, slots=True)
class VoiceDraft:
    """What somebody wants to store as a voice, not yet checked."""

    name: str
    audio: Source
    transcript: str | None
    consent: str = ""
    description: str = ""
    language: str = ""
    tags: str = ""


@dataclass(frozen=True, slots=True)
class Consent:
    """A recording in which a speaker agrees. `created_at` is seconds since 1970."""

    id: str
    name: str
    language: str
    created_at: int


@dataclass(frozen=True, slots=True)
class Said:
    """What a speech leaves for one that goes on from it: the last good piece's text and codes [codebooks, frames], empty if
    there is none; the seed of the next piece, the value of the last sample, and when, by the monotonic clock, its listener
    will have heard all of it. Whoever hands it on need not look inside."""

    text: str
    codes: Int32
    seed: int
    last_sample: int
    heard_at: float


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """What a front door asks of the synthesizer. Fields left None take the model's or the server's default.

    `voice` is a name: "" and "default" are the default voice, "none" is the bare model. References win over it. An unknown one
    is refused under the name `voice_field`, or is the default voice with `voice_or_default`.
    """

    text: str
    references: tuple[Reference, ...] = ()
    voice: str = ""
    voice_field: str = "voice"
    voice_or_default: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = None  # frames of the whole request
    max_piece_frames: int | None = None  # of each piece; not looked at beside `max_new_tokens`
    chunk_length: int | None = None  # UTF-8 bytes of a piece of a long text
    normalize: bool = False  # Markdown, emoji, addresses and figures are read as they are said
    language: str = ""  # a tag or an English name
    pronunciation: Mapping[str, str] = field(default_factory=dict)  # words, and how they are said
    instructions: str = ""  # how to speak, checked in any case
    tagged: bool = False  # whether the instructions stand in the text as a tag
    conditioned: bool = True  # each piece is spoken as what follows the one before
    continues: Said | None = None  # what this is the continuation of; its seed counts, and no place in the line is needed
    timeout_s: float | None = None
    streaming: bool = False  # somebody listens while it is made
    first_chunk: int = 0  # frames that are sent first; 0: as the engine sees fit
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Utterance:
    """What the engine is asked: ids and codes, no text.

    `prompt` is int32 [1 + codebooks, positions]: row 0 token ids, the others codes (0 at text positions).
    `seed` is any 64-bit integer. `max_frames` bounds the output. A `streaming` utterance has a listener whose playout must
    not run dry; others fill the slack. Utterances of one `voice_key` begin with the same `shared_positions` of prompt: they
    are best served by one engine, which then reads that part once. `max_repeats`: a speech that draws one semantic token so
    many times in a row is stuck and ends there (0: never).

    `continues`: the utterance goes on with a request that has begun, so it is taken although the line is full or the engine
    drains; a request has one utterance in an engine at a time, so their number has the bound of the requests. `lead_s`:
    seconds of audio that its listener has in hand when it is submitted, because earlier utterances made them.
    """

    request_id: str
    prompt: Int32
    sampling: Sampling
    seed: int
    max_frames: int
    timeout_s: float | None = None
    streaming: bool = False
    voice_key: str = ""
    shared_positions: int = 0
    max_repeats: int = 0
    continues: bool = False
    lead_s: float = 0.0
    first_chunk: int = 0  # frames of a streaming utterance's first chunk; 0: as the engine sees fit
    decode_only: bool = False  # nothing is drawn: the codes of the prompt are the frames, whatever its tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of whole frames: mono signed 16-bit little-endian PCM at the codec rate, and their codes [codebooks, frames]."""

    pcm: bytes
    codes: Int32

    @property
    def num_frames(self) -> int:
        return int(self.codes.shape[1])


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from submission: waiting, until the prompt was read, until the first chunk, until the end.

    `worst_underrun_s` is the longest that a player, started with the first chunk, would have waited for a later one.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_audio_s: float = 0.0
    total_s: float = 0.0
    worst_underrun_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Suspect:
    """A piece of a text, counted from 0, that was spoken in too few seconds for its text or was ended by its bound."""

    index: int
    why: Literal["too_short", "length"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces that a text was spoken in. `redone` had a second try, `suspect` are still not what they should be.

    `spoken` is less than `total` only if the request ended early: failed, cancelled, or at its own `max_new_tokens`.
    """

    total: int = 1
    spoken: int = 1
    redone: tuple[int, ...] = ()
    suspect: tuple[Suspect, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an utterance, or a whole request, ended. The last item of every stream; `error` is set unless the reason is stop
    or length. An engine leaves `pieces` and `said` as they are: the text side tells them of a request."""

    reason: FinishReason
    num_frames: int
    input_tokens: int
    timings: Timings = field(default_factory=Timings)
    error: DuettsError | None = None
    pieces: Pieces = Pieces()
    said: Said | None = field(default=None, compare=False)  # for whoever goes on from here


@dataclass(frozen=True, slots=True)
class SpeakerInfo:
    """What the text side must know about the model behind a speaker.

    `codec_id` names all that decides the codes of a reference; without one they are not kept on disk.
    """

    model_type: str
    sample_rate: int
    frame_length: int
    num_codebooks: int
    max_model_len: int
    weights: str = "trained"
    device: str = "cpu"
    dtype: str = "float32"
    codec_id: str = ""
    codec_device: str = ""  # where frames are decoded, if in a process of its own

    @property
    def repeats(self) -> bool:
        """Whether the same request and seed give the same bytes, whoever else is served."""
        return self.device == "cpu" and self.codec_device in ("", "cpu")


class Speaker(Protocol):
    """The seam between the text side and an engine, in this process or another."""

    info: SpeakerInfo

    def speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        """Chunks in order, then one `Outcome`. Closing the iterator aborts. Raises `Overloaded`, `NotReady`."""
        ...

    async def encode_reference(self, wave: Float32) -> Int32:
        """Mono float32 [samples] at the codec rate to codes int32 [codebooks, frames].

        A caller that is cancelled takes its clip out of the line; what has begun may still be finished and returned.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Gauges and counters of the engine, plain numbers and strings."""
        ...

    async def close(self) -> None:
        """Ends running utterances as aborted and frees the device."""
        ...


class Speech:
    """One spoken request: iterate for its chunks, then read `outcome`. `aclose` cancels what is still running."""

    def __init__(
        self,
        source: AsyncGenerator[Chunk | Outcome, None],
        *,
        request_id: str,
        seed: int,
        input_tokens: int,
        sample_rate: int,
        num_pieces: int = 1,
        input_audio_tokens: int = 0,
        voice: str = "",
        reference_hit: bool | None = None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._source = source
        self.request_id = request_id
        self.seed = seed
        self.input_tokens = input_tokens
        self.sample_rate = sample_rate
        self.num_pieces = num_pieces
        self.input_audio_tokens = input_audio_tokens  # of `input_tokens`, those that hold frames of a reference
        self.voice = voice  # its name; "none" is the bare model, "" a clip that came with the request
        self.reference_hit = reference_hit  # whether nothing had to be encoded; None without a reference
        self.warnings = warnings  # words for what is allowed but hardly meant
        self.outcome: Outcome | None = None

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk. Raises the outcome's error when the request did not end by itself."""
        if self.outcome is not None:
            raise StopAsyncIteration
        item = await anext(self._source)
        if isinstance(item, Chunk):
            return item
        self.outcome = item
        if item.error is not None:
            raise item.error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stops the engine's work for this request; harmless after its end."""
        await self._source.aclose()
