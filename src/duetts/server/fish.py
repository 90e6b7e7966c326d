"""POST /v1/tts, and for all of Fish Audio's doors: its names of a request's fields, and what they are called here. What they
mean is decided elsewhere, for everybody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ormsgpack
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from duetts.audio.formats import FORMATS
from duetts.config import ServerConfig
from duetts.errors import InvalidRequest, VoiceNotFound
from duetts.server.body import FORM, JSON, MSGPACK, read_body
from duetts.server.outcomes import Outcomes
from duetts.server.schemas import (
    FIELDS,
    SpeechOrder,
    WireField,
    check_type,
    field_schema,
    ignored_names,
    read_order,
    unknown_names,
)
from duetts.server.speech import answer
from duetts.service import SpeechService

# Fish Audio's name -> ours. All others of ours keep their name, or are Fish Audio's alone.
NAMES = {
    "text": "input", "format": "response_format", "prosody.speed": "speed", "prosody.volume": "volume",
    "prosody.normalize_loudness": "normalize_loudness",
}  # fmt: skip
SAME = (
    "references", "reference_id", "sample_rate", "chunk_length", "temperature", "top_p", "top_k", "repetition_penalty", "seed",
    "ref_audio", "ref_text", "timeout", "normalize",
)  # fmt: skip
OWN = {
    "mp3_bitrate": WireField(("integer",), "kbit/s or bit/s, for mp3."),
    "opus_bitrate": WireField(("integer",), "kbit/s or bit/s, for opus; -1000 is the default's."),
    "max_new_tokens": WireField(("integer",), "At most this many frames of audio for each piece of the text; 0 is no bound."),
    "prosody": WireField(("object",), "speed, volume in dB, normalize_loudness."),
    "condition_on_previous_chunks": WireField(("boolean",), "Speak each piece as what follows the one before. Default: true."),
    "streaming": WireField(("boolean",), "false: one complete body instead of a stream."),
    "latency": WireField(("string",), "normal, balanced or low: how soon the first audio comes."),
    "min_chunk_length": WireField(("integer",), "Accepted without effect.", hint=True),
    "early_stop_threshold": WireField(("number",), "Accepted without effect.", hint=True),
    "use_memory_cache": WireField(("string", "boolean"), "Accepted without effect.", hint=True),
    "features": WireField(("array",), "Accepted without effect.", hint=True),
}
LATENCIES = {"normal": 4, "balanced": 0, "low": 1}  # frames that are sent first; 0: as the server does by itself
FORMAT, CLIENTS_FORMAT = "wav", "mp3"  # of plain callers, and of Fish Audio's own clients
LOWEST_BPS = 1000  # bit rates are kbit/s below, bit/s from here on; "auto" is -1000


def is_text(name: str) -> bool:
    """Whether a form's field of this name is text as it stands."""
    known = OWN.get(name) or FIELDS.get(NAMES.get(name, name))
    return known is None or "string" in known.types


def read_fish_order(
    given: dict[str, Any], headers: Mapping[str, str], config: ServerConfig, sample_rate: int, request_id: str
) -> SpeechOrder:
    """What a request of Fish Audio's API asks for. `headers` choose the model and the format when the fields do not.

    Raises `InvalidRequest` with Fish Audio's names, `VoiceNotFound` for a voice that does not exist.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    for name, value in fields.items():
        if name in OWN:
            check_type(name, value, OWN[name].types)
    if fields.get("latency", "normal") not in LATENCIES:
        raise InvalidRequest(f"latency must be one of {', '.join(LATENCIES)}", field="latency")
    body, used = _own_fields(fields)
    body.setdefault("response_format", CLIENTS_FORMAT if is_clients(headers) else FORMAT)
    body["bitrate"] = _bitrate(body["response_format"], fields)
    body["stream_format"] = None if fields.get("streaming") is False else "audio"
    if headers.get("model") in config.served_model_names:
        body["model"] = headers["model"]
    with fish_names():
        order = read_order(body, config, sample_rate, request_id)
    idle = [name for name in _flat(fields) if name not in used]
    unknown = unknown_names([name for name in idle if name not in (*OWN, *NAMES, *SAME)], config)
    ignored = [name for name in idle if name in unknown or name in (*OWN, *NAMES, *SAME)]
    max_frames = fields.get("max_new_tokens") or None
    request = replace(
        order.request,
        max_piece_frames=max_frames,
        conditioned=fields.get("condition_on_previous_chunks", True),
        first_chunk=LATENCIES[fields.get("latency", "balanced")],
    )
    ignored += [name for name in order.ignored if name.startswith("references.")]
    return replace(order, request=request, ignored=ignored_names(ignored))


def is_clients(headers: Mapping[str, str]) -> bool:
    """Whether these are the headers of one of Fish Audio's clients."""
    return "model" in headers or "fish-audio" in headers.get("user-agent", "").lower()


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, those of `prosody` under its name and theirs."""
    inner = {f"prosody.{name}": value for name, value in fields.get("prosody", {}).items() if value is not None}
    return {name: value for name, value in fields.items() if name != "prosody"} | inner


def _own_fields(fields: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The fields under our names, and which of Fish Audio's have a meaning here."""
    flat = _flat(fields)
    body = {NAMES.get(name, name): value for name, value in flat.items() if name in NAMES or name in SAME}
    if not body.get("references"):  # their clients send an empty list
        body.pop("references", None)
    return body, {*NAMES, *SAME, *(name for name, field in OWN.items() if not field.hint)}


def _bitrate(response_format: Any, fields: dict[str, Any]) -> int | None:
    """kbit/s for the format, if a field has them; their clients always send those of both formats."""
    value: int | None = fields.get(f"{response_format}_bitrate") if response_format in ("mp3", "opus") else None
    if value is None or value < 0:
        return None
    return value // 1000 if value >= LOWEST_BPS else value


def fish_schema() -> dict[str, Any]:
    """The JSON schema of a body, for OpenAPI."""
    shared = {name: FIELDS[NAMES.get(name, name)] for name in (*NAMES, *SAME) if "." not in name}
    properties = {name: field_schema(field) for name, field in (shared | OWN).items()}
    return {"type": "object", "required": ["text"], "properties": properties}


def wants_json(request: Request) -> bool:
    """Whether an answer is to be JSON: msgpack is what Fish Audio's servers give to whoever does not say."""
    return "application/json" in request.headers.get("accept", "") or request.query_params.get("format") == "json"


def fish_answer(request: Request, content: dict[str, Any]) -> Response:
    """An answer as it is asked for."""
    return JSONResponse(content) if wants_json(request) else Response(ormsgpack.packb(content), media_type=MSGPACK)


@contextmanager
def fish_names(names: Mapping[str, str] = NAMES | {"mp3_bitrate or opus_bitrate": "bitrate"}) -> Iterator[None]:
    """Errors raised inside speak of Fish Audio's `names`, and of an unknown voice as of something that is not found."""
    try:
        yield
    except InvalidRequest as error:
        if error.code == "unknown_voice":
            raise VoiceNotFound(str(error), field="reference_id") from None
        theirs = {ours: name for name, ours in names.items()}
        field = error.field or ""
        if field in theirs:
            message = str(error)
            error.message = theirs[field] + message.removeprefix(field) if message.startswith(field) else message
            error.args, error.field = (error.message,), theirs[field]
        raise


def fish_router(service: SpeechService, config: ServerConfig, outcomes: Outcomes) -> APIRouter:
    """The route of Fish Audio's speech."""
    router = APIRouter()
    schema = {"schema": fish_schema()}
    body = {"required": True, "content": dict.fromkeys((MSGPACK, JSON, FORM), schema)}
    types: dict[str, Any] = {chosen.content_type.split(";")[0]: {} for chosen in FORMATS.values()}
    audio: dict[int | str, dict[str, Any]] = {200: {"content": types, "description": "Speech."}}

    @router.post("/v1/tts", response_class=Response, responses=audio, openapi_extra={"requestBody": body})
    async def speak(request: Request) -> Response:
        """Speak a text, as a stream. The header `model` chooses a served model; another one is no error."""
        fields = await read_body(request, config.limits.max_body_bytes, is_text)
        order = read_fish_order(fields, request.headers, config, service.info.sample_rate, request.state.speech_id)
        with fish_names():
            return await answer(service, order, request.receive, outcomes, config.requests.early_headers)

    return router
