"""The messages between a server and an engine process, and between that and its codec process: forms, version, checks. Knows
no sockets, no torch, no requests' lives.

A message is a list of parts: a msgpack header, then arrays as raw little-endian bytes (PCM, codes, prompts, samples). Every
header carries the version, the incarnation (a secret of one life of one engine process), a place in the line of all messages
that way, so that a loss shows at the next heartbeat, and a kind:

    to the engine     beat                             the client lives
                      speak(id, utterance) + prompt    int32 [1 + codebooks, positions]
                      encode(id) + samples             float32 [samples]
                      decode(id, slots, fresh, keep) + codes  int32 [streams, codebooks, frames], to a codec process
                      cancel(id)
    from the engine   state(state, info, stats, error, others)  its heartbeat: loading, ready, ending, failed; ended is its
                                                       last word
                      chunk(id, number, frames) + pcm, codes
                      end(id, number, outcome)         number is the count of chunks before it
                      codes(id) + codes
                      sounds(id, finite, seconds) + pcm of each stream whose samples are finite
                      refused(id, error)               raised instead of a result; id None: a message that was not understood
"""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import ormsgpack

from duetts.engine.parts import DecodeCall, Decoded
from duetts.errors import DuettsError, EngineFailure, WireError
from duetts.types import Chunk, Float32, Int32, Outcome, SpeakerInfo, Utterance

VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20  # of one part: a reference of 60 s has 11 MB
PACKING = ormsgpack.OPT_SERIALIZE_NUMPY | ormsgpack.OPT_NON_STR_KEYS
CODE_BYTES = 4  # an int32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Message:
    """One message: what its header says, its arrays, and its place among those of its sender, None outside that line."""

    kind: str
    values: dict[str, Any]
    parts: tuple[bytes, ...] = ()
    place: int | None = None

    def take(self, name: str, kind: type[T]) -> T:
        """A value of the header. Raises `WireError` when it is missing or of another type."""
        value = self.values.get(name)
        if not _fits(value, kind):
            raise WireError(f"{self.kind}: {name} is {value!r:.40}, which is no {kind.__name__}")
        return typing.cast(T, value)

    def array(self, index: int, dtype: str, rows: int) -> Any:
        """A part as an array [rows, any]. Raises `WireError` when it is missing or does not divide so."""
        if index >= len(self.parts):
            raise WireError(f"{self.kind}: part {index} is missing")
        part, item = self.parts[index], np.dtype(dtype).itemsize
        if len(part) % (item * rows):
            raise WireError(f"{self.kind}: {len(part)} bytes are not {rows} rows of {dtype}")
        return np.frombuffer(part, dtype).reshape(rows, -1).copy()  # of one's own, so that it may be written to


@dataclass(frozen=True, slots=True)
class Others:
    """What an engine does for other clients than the one that is told: open calls, and the frames that they are owed."""

    calls: int
    owed: float


def pack(incarnation: str, message: Message, place: int | None) -> list[bytes]:
    """The parts of a message as they travel. Raises `WireError` for a part too large to be received, or a value that has no
    form, such as a text with half a surrogate pair."""
    header = {**message.values, "v": VERSION, "of": incarnation, "place": place, "kind": message.kind}
    try:
        parts = [ormsgpack.packb(header, option=PACKING), *message.parts]
    except ormsgpack.MsgpackEncodeError as error:
        raise WireError(f"{message.kind}: {error}") from error
    largest = max(map(len, parts))
    if largest > MAX_MESSAGE_BYTES:
        raise WireError(f"{message.kind}: a part has {largest} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return parts


def unpack(incarnation: str, parts: list[bytes]) -> Message:
    """Reads what has arrived. Raises `WireError` for anything but a message of this version and incarnation."""
    try:
        header = ormsgpack.unpackb(parts[0] if parts else b"", option=ormsgpack.OPT_NON_STR_KEYS)
    except ormsgpack.MsgpackDecodeError as error:
        raise WireError("the header is not msgpack") from error
    if not isinstance(header, dict):
        raise WireError("the header is no map")
    if header.get("v") != VERSION:
        raise WireError(f"the message has version {header.get('v')!r:.20}; version {VERSION} is spoken here")
    if header.get("of") != incarnation:
        raise WireError("the message is for another life of this engine")
    kind, place = header.get("kind"), header.get("place")
    if not isinstance(kind, str) or not isinstance(place, int | None):
        raise WireError("the header names no kind or no place")
    return Message(kind, header, tuple(parts[1:]), place)


# -- what travels --------------------------------------------------------------------------------------------------------


def speak(number: int, utterance: Utterance) -> Message:
    """An utterance under its number."""
    values = {field.name: to_plain(getattr(utterance, field.name)) for field in fields(utterance) if field.name != "prompt"}
    prompt = np.ascontiguousarray(utterance.prompt, "<i4")
    return Message("speak", {"id": number, "utterance": values}, (prompt.tobytes(),))


def read_utterance(message: Message, info: SpeakerInfo, vocabulary: tuple[int, int]) -> Utterance:
    """The utterance of a `speak`, fit for an engine of `info`; `vocabulary` are the numbers of token ids and of codes.

    Raises `WireError` for whatever would reach the model out of range.
    """
    prompt: Int32 = message.array(0, "<i4", 1 + info.num_codebooks)
    utterance = build(Utterance, {**message.take("utterance", dict), "prompt": prompt})
    positions, frames = prompt.shape[1], utterance.max_frames
    if positions < 1 or frames < 1 or positions + frames > info.max_model_len:
        raise WireError(f"{positions} positions and {frames} frames do not fit {info.max_model_len} positions")
    for rows, size in zip((prompt[:1], prompt[1:]), vocabulary, strict=True):
        if rows.min() < 0 or rows.max() >= size:
            raise WireError(f"the prompt holds {rows.min()}..{rows.max()}; allowed are 0..{size - 1}")
    return utterance


def chunk(number: int, index: int, item: Chunk) -> Message:
    """The chunk of this index, from 0, of the utterance of this number."""
    codes = np.ascontiguousarray(item.codes, "<i4")
    return Message("chunk", {"id": number, "number": index, "frames": item.num_frames}, (item.pcm, codes.tobytes()))


def read_chunk(message: Message, info: SpeakerInfo) -> Chunk:
    """The chunk of a `chunk`. Raises `WireError` when the sizes of its parts are not those of its frames."""
    codes: Int32 = message.array(1, "<i4", info.num_codebooks)
    frames = message.take("frames", int)
    pcm = message.parts[0]
    if codes.shape[1] != frames or len(pcm) != 2 * frames * info.frame_length or frames < 1:
        raise WireError(f"chunk: {len(pcm)} bytes and codes {codes.shape} are not {frames} frames")
    return Chunk(pcm, codes)


def end(number: int, chunks: int, outcome: Outcome) -> Message:
    """The outcome of the utterance of this number, after so many chunks."""
    return Message("end", {"id": number, "number": chunks, "outcome": to_plain(outcome)})


def read_end(message: Message) -> Outcome:
    """The outcome of an `end`."""
    return build(Outcome, message.take("outcome", dict))


def encode(number: int, wave: Float32) -> Message:
    """A reference to be encoded: mono samples at the codec rate."""
    return Message("encode", {"id": number}, (np.ascontiguousarray(wave, "<f4").tobytes(),))


def read_wave(message: Message) -> Float32:
    """The samples of an `encode`, at least one and all finite."""
    wave: Float32 = message.array(0, "<f4", 1)[0]
    if not len(wave) or not np.isfinite(wave).all():
        raise WireError("encode: the samples are none or not finite")
    return wave


def codes(number: int, found: Int32) -> Message:
    """The codes [codebooks, frames] of an `encode`."""
    return Message("codes", {"id": number}, (np.ascontiguousarray(found, "<i4").tobytes(),))


def decode(number: int, call: DecodeCall) -> Message:
    """A call of the codec's decoder."""
    values = {"id": number, "slots": call.slots, "fresh": call.fresh, "keep": call.keep}
    return Message("decode", values, (np.ascontiguousarray(call.codes, "<i4").tobytes(),))


def read_decode(message: Message, info: SpeakerInfo, slots: int, vocabulary: tuple[int, int]) -> DecodeCall:
    """The call of a `decode`; `vocabulary` are the numbers of codes of the first codebook and of the others. Raises `WireError`
    for slots that are not there or come twice, and for codes out of range."""
    chosen, fresh = message.take("slots", list), message.take("fresh", list)
    fit = all(_fits(slot, int) and 0 <= slot < slots for slot in chosen)
    if not chosen or not fit or len(set(chosen)) != len(chosen):
        raise WireError(f"decode: the slots {chosen!r:.80} are not different ones of 0..{slots - 1}")
    if not all(slot in chosen for slot in fresh):
        raise WireError("decode: a stream begins that has no codes")
    rows: Int32 = message.array(0, "<i4", len(chosen) * info.num_codebooks)
    if not rows.shape[1]:
        raise WireError("decode: there is no frame")
    codes = rows.reshape(len(chosen), info.num_codebooks, -1)
    for part, size in zip((codes[:, :1], codes[:, 1:]), vocabulary, strict=True):
        if part.min(initial=0) < 0 or part.max(initial=0) >= size:
            raise WireError(f"decode: the codes hold {part.min()}..{part.max()}; allowed are 0..{size - 1}")
    return DecodeCall(chosen, fresh, codes, message.take("keep", bool))


def sounds(number: int, found: Decoded) -> Message:
    """What a call of the decoder has made."""
    values = {"id": number, "finite": [sound is not None for sound in found.sounds], "seconds": found.seconds}
    return Message("sounds", values, tuple(sound for sound in found.sounds if sound is not None))


def read_sounds(message: Message, call: DecodeCall, frame_length: int) -> Decoded:
    """What `call` has made. Raises `WireError` when it is not PCM of so many streams and frames."""
    finite, parts = message.take("finite", list), message.parts
    size = 2 * frame_length * call.codes.shape[2]
    seconds = message.values.get("seconds")
    if len(finite) != len(call.slots) or sum(map(bool, finite)) != len(parts) or not _fits(seconds, float | None):
        raise WireError(f"sounds: {len(parts)} sounds and {finite!r:.80} for {len(call.slots)} streams")
    if any(len(part) != size for part in parts):
        raise WireError(f"sounds: {[len(part) for part in parts]!r:.80} bytes are not {call.codes.shape[2]} frames")
    following = iter(parts)
    return Decoded([next(following) if each else None for each in finite], seconds)


def refused(number: int | None, error: BaseException) -> Message:
    """An error instead of a result."""
    return Message("refused", {"id": number, "error": error_to_plain(error)})


# -- dataclasses and errors as plain values ------------------------------------------------------------------------------


def to_plain(value: Any) -> Any:
    """Dataclasses as maps and errors in their form, also inside each other."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    return error_to_plain(value) if isinstance(value, BaseException) else value


def build(kind: type[T], values: dict[Any, Any]) -> T:
    """A dataclass from a map. Raises `WireError` for unknown or missing keys, and for values of other types."""
    shape: Any = kind
    hints = _hints(shape)
    unknown = [key for key in values if key not in hints]
    missing = [name for name in _required(shape) if name not in values]
    if unknown or missing:
        raise WireError(f"{kind.__name__}: unknown {unknown!r:.80}, missing {missing}")
    return kind(**{name: _read(f"{kind.__name__}.{name}", value, hints[name]) for name, value in values.items()})


def _read(where: str, value: Any, hint: Any) -> Any:
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if isinstance(kind, type)]
    if isinstance(value, dict):
        for kind in kinds:
            if is_dataclass(kind):
                return build(kind, value)
            if issubclass(kind, DuettsError):
                return error_from_plain(value)
    if isinstance(value, list) and typing.get_origin(hint) is tuple:  # msgpack knows one kind of list
        return tuple(_read(where, item, typing.get_args(hint)[0]) for item in value)
    if not _fits(value, hint):
        raise WireError(f"{where} is {value!r:.40}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, of one of a union or one of the literals. Whole numbers are numbers, flags are not."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, kind) for kind in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if hint is Any:
        return True
    kind = origin or hint
    if not isinstance(kind, type):  # numpy's name for arrays is an alias in Python 3.12 and later
        kind = typing.get_origin(kind.__value__)
    if isinstance(value, bool) and kind in (int, float):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name in {f.name for f in fields(kind)}}


@cache
def _required(kind: Any) -> list[str]:
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


def error_to_plain(error: BaseException) -> dict[str, Any]:
    """Class name, text and plain attributes. What was not raised on purpose is an `EngineFailure` without its text, which
    may repeat what a user wrote."""
    if not isinstance(error, DuettsError):
        error = EngineFailure(f"the engine failed: {type(error).__name__}")
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | None)}
    return {"class": type(error).__name__, "text": str(error), "attributes": attributes}


def error_from_plain(values: dict[Any, Any]) -> DuettsError:
    """The same typed error; of a class that is unknown here, an `EngineFailure`. Raises `WireError` for no error at all."""
    message = Message("error", values)
    name, text, attributes = message.take("class", str), message.take("text", str), message.take("attributes", dict)
    kind = _error_classes().get(name)
    if kind is None:
        return EngineFailure(f"{name}: {text}")
    error = kind.__new__(kind, text)  # attributes are set below, whatever arguments the class takes
    error.args = (text,)
    vars(error).update(attributes)
    return error


def _error_classes() -> dict[str, type[DuettsError]]:
    found: list[type[DuettsError]] = [DuettsError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return {kind.__name__: kind for kind in found}
