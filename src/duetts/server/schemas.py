"""The wire shape of a speech request: its fields in one table, their types, and what they become. Knows no routes, no model.

This room checks presence, types and shapes. Ranges of numbers, text rules and lengths are the synthesizer's, so that they
hold for every door.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from duetts.audio.formats import ANY_RATES, FORMAT_NAMES, FORMATS
from duetts.audio.loudness import HIGHEST_VOLUME_DB, LOWEST_VOLUME_DB
from duetts.audio.output import Output, check_range, plan_output
from duetts.audio.tempo import HIGHEST_SPEED, LOWEST_SPEED
from duetts.config import ServerConfig
from duetts.errors import InvalidRequest, UnknownModel
from duetts.server.references import read_references, unread_keys
from duetts.types import SpeechRequest

MAX_IGNORED_NAMES = 16
MAX_TAG_CHARS = 80  # of instructions that become a tag
LARGEST_NUMBER = 2.0**64  # beyond every field's range; NaN and infinities are refused with it

# Clients that name OpenAI's models expect OpenAI's defaults.
OPENAI_MODELS = re.compile(r"tts-1(-hd)?|gpt-4o-mini-tts(-.+)?")
OPENAI_ALIASES = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")  # those that are listed
# Voices that OpenAI's clients name although nobody has stored them here.
OPENAI_VOICES = {
    "alloy", "ash", "ballad", "coral", "echo", "fable", "onyx", "nova", "sage", "shimmer", "verse", "marin", "cedar"
}  # fmt: skip
OPENAI_FORMAT, NATIVE_FORMAT = "mp3", "wav"
OPENAI_PCM_RATE = 24000  # Hz; frameworks take it for granted

# What JSON calls each type, and how its values are told. A boolean is no number; `file` is a part of a form.
TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: type(value) in (int, float),
    "integer": lambda value: type(value) is int,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "file": lambda value: isinstance(value, bytes),
}


@dataclass(frozen=True, slots=True)
class WireField:
    """A known field. `only` lists the values that a field may have whose feature is missing; `hint` fields have no effect."""

    types: tuple[str, ...]
    note: str
    only: tuple[Any, ...] | None = None
    hint: bool = False


def _other_models(*types: str, only: tuple[Any, ...] = ()) -> WireField:
    return WireField(types or tuple(TYPES), "A field of other models.", only=only)


FIELDS: dict[str, WireField] = {
    "input": WireField(("string",), "Text to speak. Required."),
    "model": WireField(("string",), "A served model id; see GET /v1/models. Default: the first of them."),
    "voice": WireField(
        ("string", "object"), 'A voice of GET /v1/audio/voices, as a string or {"id": ...}. Default: "default".'
    ),
    "speaker": WireField(("string", "object"), "Another name of voice."),
    "reference_id": WireField(("string",), "A stored voice; wins over voice."),
    "instructions": WireField(("string",), "How to speak: up to 80 characters become a tag in the text, more have no effect."),
    "response_format": WireField(
        ("string",), f"One of {', '.join(FORMAT_NAMES)}. Default: {NATIVE_FORMAT}; {OPENAI_FORMAT} for OpenAI's model names."
    ),
    "sample_rate": WireField(
        ("integer",),
        f"Hz, {ANY_RATES[0]}..{ANY_RATES[-1]}; which, depends on the format. Default: the model's own, or the "
        f"nearest above it that the format has; {OPENAI_PCM_RATE} for pcm under OpenAI's model names.",
    ),
    "bitrate": WireField(
        ("integer",),
        "kbit/s: "
        + "; ".join(f"{name} {', '.join(map(str, sorted(f.bitrates)))}" for name, f in FORMATS.items() if f.bitrates)
        + ".",
    ),
    "speed": WireField(("number",), f"{LOWEST_SPEED:g}..{HIGHEST_SPEED:g} times as fast, at the same pitch."),
    "volume": WireField(("number",), f"{LOWEST_VOLUME_DB:g}..{HIGHEST_VOLUME_DB:g} dB; peaks are limited."),
    "volume_multiplier": WireField(("number",), "0.1..10: volume by another way."),
    "normalize_loudness": WireField(("boolean",), "Bring the speech to -18 LUFS; looks 0.4 s ahead."),
    "stream": WireField(("boolean",), "true: as stream_format sse, if that is not given."),
    "stream_format": WireField(("string",), '"audio": a chunked body, sent while it is made. "sse": the same as events.'),
    "ref_audio": WireField(
        ("string", "array", "file"), "Clips to clone: http(s) or data address, base64, a form's file, or file:// if allowed."
    ),
    "ref_text": WireField(("string", "array"), "What is said in ref_audio, one transcript a clip."),
    "references": WireField(("array",), "Clips and transcripts: a list of {audio, text} or {vq_codes, text}."),
    "language": WireField(("string",), "A tag (en, pt-BR) or English name; only normalize looks at it."),
    "max_new_tokens": WireField(("integer",), "At most this many frames of audio, in all pieces of the text together."),
    "chunk_length": WireField(
        ("integer",), "100..1000: UTF-8 bytes of the pieces that a long text is spoken in. Default: 300."
    ),
    "temperature": WireField(("number",), "0..2; 0 is greedy."),
    "top_p": WireField(("number",), "Up to 1."),
    "top_k": WireField(("integer",), "0..1000; 0 is no limit."),
    "repetition_penalty": WireField(("number",), "0.8..2; 1 is off."),
    "seed": WireField(("integer",), "64 bits, signed. Same seed, same request: same audio."),
    "timeout": WireField(("number",), "Seconds until the request is given up."),
    "extra_params": WireField(("object",), "temperature, top_p, top_k and repetition_penalty by another way."),
    "initial_codec_chunk_frames": WireField(("integer",), "Frames that a stream sends first; 0 leaves it to the server."),
    "task_type": _other_models("string", only=("Base",)),
    "x_vector_only_mode": _other_models(),
    "speaker_embedding": _other_models(),
    "ref_audio_2": _other_models(),
    "ambient_sound": _other_models(),
    "duration_seconds": _other_models(),
    "non_streaming_mode": _other_models(),
    "token_count": _other_models(),
    "duration_tokens": _other_models(),
    "word_timestamps": WireField(("boolean",), "Not supported.", only=(False,)),
    "normalize": WireField(("boolean",), "Read Markdown, emoji, addresses and figures of English as they are said."),
    "pronunciation": WireField(("object",), "Words, and how they are to be said: {word: respelling}."),
}

Delivery = Literal["complete", "audio", "sse"]

EXTRA_PARAMS = ("temperature", "top_p", "top_k", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SpeechOrder:
    """What a body asks for: the request to the synthesizer, and how to answer. `ignored` fields had no effect."""

    request: SpeechRequest
    model: str
    output: Output
    delivery: Delivery
    ignored: tuple[str, ...]


def is_text(name: str) -> bool:
    """Whether a form's field of this name is text as it stands."""
    return name not in FIELDS or "string" in FIELDS[name].types


def read_order(body: dict[str, Any], config: ServerConfig, sample_rate: int, request_id: str) -> SpeechOrder:
    """Checks a body's fields. Null is the same as absent. Raises `InvalidRequest` naming the field."""
    given = {name: value for name, value in body.items() if value is not None}
    _check_types({name: value for name, value in given.items() if name in FIELDS})
    given.update(_read_extra_params(given))
    _refuse_missing_features(given, config)
    unknown = unknown_names([name for name in (*given, *unread_keys(given)) if name not in FIELDS], config)
    openai = is_openai(given.get("model", ""), config)
    output = read_output(given, sample_rate, openai, config.requests.wav_stream_size)
    delivery = _read_delivery(given)
    model = check_model(given.get("model", config.served_model_names[0]), config)
    voice_field, voice = _read_voice(given)
    references = read_references(given, config.limits.reference_bytes)
    request = SpeechRequest(
        text=_read_input(given),
        references=references,
        voice=voice,
        voice_field=voice_field,
        normalize=given.get("normalize", False),
        language=given.get("language", ""),
        pronunciation=_read_words(given),
        instructions=given.get("instructions", ""),
        tagged=_is_tag(given, config),
        voice_or_default=openai and voice.strip().lower() in OPENAI_VOICES,
        temperature=given.get("temperature"),
        top_p=given.get("top_p"),
        top_k=given.get("top_k"),
        repetition_penalty=given.get("repetition_penalty"),
        seed=given.get("seed"),
        max_new_tokens=given.get("max_new_tokens"),
        chunk_length=given.get("chunk_length"),
        timeout_s=given.get("timeout"),
        streaming=delivery != "complete",
        first_chunk=given.get("initial_codec_chunk_frames", 0),
        request_id=request_id,
    )
    return SpeechOrder(
        request, model, output, delivery, _ignored(given, unknown, "" if references else voice_field, request.tagged)
    )


def _check_types(given: dict[str, Any]) -> None:
    for name, value in given.items():
        check_type(name, value, FIELDS[name].types)


def check_type(name: str, value: Any, types: tuple[str, ...]) -> None:
    """Raises `InvalidRequest` for a value of none of the types, and for a number beyond all ranges."""
    takes_numbers = "number" in types or "integer" in types
    if takes_numbers and isinstance(value, int | float) and not abs(value) < LARGEST_NUMBER:  # false for NaN too
        raise InvalidRequest(f"{name} is out of range", field=name, code="out_of_range")
    if not any(TYPES[kind](value) for kind in types):
        found = next((kind for kind in TYPES if TYPES[kind](value)), "null")
        raise InvalidRequest(f"{name} must be of type {' or '.join(types)}; it is {found}", field=name, code="invalid_type")


def _read_extra_params(given: dict[str, Any]) -> dict[str, Any]:
    """The fields that `extra_params` gives."""
    extra = {name: value for name, value in given.get("extra_params", {}).items() if value is not None}
    for name, value in extra.items():
        if name not in EXTRA_PARAMS:
            raise InvalidRequest(
                f"extra_params may hold {', '.join(EXTRA_PARAMS)}; not {name[:64]}", field=f"extra_params.{name[:64]}",
                code="unsupported_field",
            )  # fmt: skip
        if name in given:
            raise InvalidRequest(f"{name} is given twice, once in extra_params", field=name)
        check_type(name, value, FIELDS[name].types)
    return extra


def _refuse_missing_features(given: dict[str, Any], config: ServerConfig) -> None:
    for name, value in given.items():
        only = FIELDS[name].only if name in FIELDS else None
        if only is not None and value not in only:
            raise InvalidRequest(f"{name} is not supported by this model or server", field=name, code="unsupported_field")
    length, most = len(given.get("instructions", "")), config.requests.max_instructions_chars
    if length > most:
        raise InvalidRequest(
            f"instructions has {length} characters; at most {most} are allowed",
            field="instructions", code="input_too_long",
        )  # fmt: skip


def _read_words(given: dict[str, Any]) -> dict[str, str]:
    """The pronunciation."""
    words: dict[str, str] = given.get("pronunciation", {})
    for said in words.values():
        check_type("pronunciation", said, ("string",))
    return words


def _is_tag(given: dict[str, Any], config: ServerConfig) -> bool:
    """Whether the instructions become a tag."""
    length = len(given.get("instructions", "").strip())
    if length and config.requests.instructions == "reject":
        raise InvalidRequest("instructions are not supported on this server", field="instructions", code="unsupported_field")
    return 0 < length <= MAX_TAG_CHARS and config.requests.instructions == "tag"


def _read_input(given: dict[str, Any]) -> str:
    if "input" not in given:
        raise InvalidRequest("input, the text to speak, is missing", field="input", code="missing_field")
    return str(given["input"])


def check_model(model: str, config: ServerConfig) -> str:
    """The served id that is meant; OpenAI's names mean the native one. Raises `UnknownModel` with the list of those served."""
    if model in config.served_model_names:
        return model
    if config.requests.openai_aliases and OPENAI_MODELS.fullmatch(model):
        return config.served_model_names[0]
    raise UnknownModel(f"model {model[:64]!r} is not served here; these are: {', '.join(config.served_model_names)}")


def is_openai(model: str, config: ServerConfig) -> bool:
    """Whether OpenAI's defaults hold: by the model's name, unless the operator has decided."""
    by_name = OPENAI_MODELS.fullmatch(model) is not None
    return {"auto": by_name, "openai": True, "native": False}[config.requests.dialect]


def _read_voice(given: dict[str, Any]) -> tuple[str, str]:
    """The field that decides on the voice, and the name in it; "" is the default voice."""
    if "voice" in given and "speaker" in given:
        raise InvalidRequest("speaker is another name of voice; send one of them", field="speaker")
    field = "speaker" if "speaker" in given else "voice"
    voice = _voice_name(given, field)
    stored = given.get("reference_id", "")
    if not stored:
        return field, voice
    if _is_default(stored) or stored.strip().lower() == "none":
        raise InvalidRequest(
            "reference_id names a stored voice; the default one is used without it", field="reference_id", code="unknown_voice"
        )
    return "reference_id", stored


def _voice_name(given: dict[str, Any], field: str) -> str:
    voice = given.get(field, "")
    if isinstance(voice, dict):
        voice = voice.get("id")
        check_type(f"{field}.id", voice, ("string",))
    return str(voice)


def _is_default(voice: str) -> bool:
    return voice.strip().lower() in ("", "default")


def read_output(given: dict[str, Any], native_rate: int, openai: bool, stream_size: str = "max") -> Output:
    """The output that fields of the right types ask for, of speech at `native_rate` Hz. `openai`: by OpenAI's defaults."""
    response_format = given.get("response_format", OPENAI_FORMAT if openai else NATIVE_FORMAT)
    return plan_output(
        native_rate,
        response_format=response_format,
        sample_rate=given.get("sample_rate", OPENAI_PCM_RATE if openai and response_format == "pcm" else None),
        bitrate=given.get("bitrate"),
        speed=given.get("speed", 1.0),
        volume=_read_volume(given),
        normalize_loudness=given.get("normalize_loudness", False),
        stream_size=stream_size,
    )


def _read_volume(given: dict[str, Any]) -> float:
    """dB, from either of the fields."""
    if "volume_multiplier" not in given:
        return float(given.get("volume", 0.0))
    if "volume" in given:
        raise InvalidRequest("volume_multiplier is volume by another way; send one of them", field="volume_multiplier")
    factor = given["volume_multiplier"]
    check_range("volume_multiplier", factor, 10 ** (LOWEST_VOLUME_DB / 20), 10 ** (HIGHEST_VOLUME_DB / 20))
    return 20 * math.log10(factor)


def _read_delivery(given: dict[str, Any]) -> Delivery:
    stream_format = given.get("stream_format")
    if stream_format not in (None, "audio", "sse"):
        raise InvalidRequest(f"stream_format {stream_format[:64]!r} is not one of audio, sse", field="stream_format")
    if stream_format is None:
        return "sse" if given.get("stream") else "complete"
    return "audio" if stream_format == "audio" else "sse"


def _ignored(given: dict[str, Any], unknown: list[str], voice_field: str, tagged: bool) -> tuple[str, ...]:
    """Fields that had no effect; `voice_field` is the one that decided on the voice, if any did. `tagged` instructions have."""
    voices = [name for name in ("voice", "speaker", "reference_id") if name in given and name != voice_field]
    idle = {name for name in voices if not _is_default(_voice_name(given, name))}
    hints = {name for name in given if name in FIELDS and FIELDS[name].hint}
    if given.get("instructions", "").strip() and not tagged:
        hints.add("instructions")
    if given.get("language", "") and not given.get("normalize"):
        hints.add("language")
    inner = [name for name in unknown if name not in given]
    return ignored_names([*(name for name in given if name in idle or name in hints or name in unknown), *inner])


def unknown_names(names: list[str], config: ServerConfig) -> list[str]:
    """Of names that mean nothing here those that the answer lists. Raises `InvalidRequest` if the operator wants none."""
    if names and config.requests.unknown_fields == "reject":
        raise InvalidRequest(f"{names[0][:64]} is unknown here", field=names[0][:64], code="unsupported_field")
    return names if config.requests.unknown_fields == "warn" else []


def ignored_names(names: list[str]) -> tuple[str, ...]:
    """Names of fields as they may stand in a header."""
    shown = [quote(name[:64], safe="", errors="replace") for name in names[:MAX_IGNORED_NAMES]]
    return (*shown, "...") if len(names) > MAX_IGNORED_NAMES else tuple(shown)


def speech_schema() -> dict[str, Any]:
    """The JSON schema of a body, for OpenAPI."""
    properties = {name: field_schema(field) for name, field in FIELDS.items() if field.only is None}
    return {"type": "object", "required": ["input"], "properties": properties}


def field_schema(field: WireField) -> dict[str, Any]:
    """The JSON schema of one field."""
    types = [{"type": kind} if kind != "file" else {"type": "string", "format": "binary"} for kind in field.types]
    return {"description": field.note, "anyOf": [*types, {"type": "null"}]}
