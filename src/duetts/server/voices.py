"""Stored voices and consents over HTTP: upload, list in the one shape that every known client reads, get, remove. No disk."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from duetts.config import ServerConfig
from duetts.errors import InvalidRequest, ProtectedVoice, VoiceNotFound
from duetts.server.body import FORM, JSON, MSGPACK, read_body
from duetts.server.references import read_clip
from duetts.server.schemas import ignored_names, unknown_names
from duetts.service import SpeechService, Voices
from duetts.types import Address, Consent, Source, Voice, VoiceDraft

TRUE, FALSE = {"true", "1", "on", "yes"}, {"false", "0", "off", "no", ""}
PATH = "/v1/audio/voices"
CONSENTS_PATH = "/v1/audio/voice_consents"


@dataclass(frozen=True, slots=True)
class Part:
    """A field of an upload and the other names that clients have for it."""

    note: str
    aliases: tuple[str, ...] = ()
    kind: Literal["text", "file", "flag"] = "text"


VOICE_PARTS = {
    "audio_sample": Part("A clip of the voice: a form's file, data address or base64.", ("ref_audio", "audio", "file"), "file"),
    "name": Part("1 to 64 characters; letters of all scripts, no slashes. Cases do not count.", ("id", "voice_name")),
    "ref_text": Part("What is said in the clip.", ("text", "transcript")),
    "consent": Part("Where the speaker's consent is: the id of a consent recording, or words of your own."),
    "speaker_description": Part("Kept and given back."),
    "language": Part("Kept and given back."),
    "tags": Part("Kept and given back."),
    "overwrite": Part("Whether a voice of this name may be replaced.", ("replace",), "flag"),
}
CONSENT_PARTS = {
    "name": Part("A label."),
    "language": Part("What is spoken, for example en-US."),
    "recording": Part("The recording: a form's file, data address or base64.", ("audio", "file"), "file"),
}


def voices_router(service: SpeechService, config: ServerConfig) -> APIRouter:
    """The routes of voices."""
    router = APIRouter()

    @router.get(PATH)
    async def list_voices(legacy: str = "", names_only: str = "") -> dict[str, Any]:
        """All voices that can be named, in the shapes of several clients at once. `legacy`: `voices` holds plain names."""
        voices = await service.voices.all()
        shown = _named(voices)
        plain = any(_flag({name: value}, name, False) for name, value in {"legacy": legacy, "names_only": names_only}.items())
        return {
            "object": "list",
            "data": [voice_object(voice) for voice in voices],
            "voices": [entry["name"] for entry in shown] if plain else shown,
            "uploaded_voices": [_upload_object(voice) for voice in voices if voice.origin == "stored"],
            "default_voice": service.voices.default_name,
        }

    @router.post(PATH, status_code=201, openapi_extra=request_body(VOICE_PARTS, ("audio_sample", "name", "ref_text")))
    async def add_voice(request: Request) -> Response:
        """Store a voice. It is decoded and encoded before anything is replaced, and speaks at once in every server process."""
        body = await read_parts(request, config, VOICE_PARTS)
        draft = read_draft(body, config)
        overwrite = _flag(body, "overwrite", config.voices.overwrite)
        ignored = ignored_names(unknown_names([name for name in body if name not in VOICE_PARTS], config))
        voice = await service.voices.add(draft, replace=overwrite)
        answer = {**voice_object(voice), "success": True, "voice": _upload_object(voice)}
        return JSONResponse(answer, 201, {"X-Ignored-Fields": ", ".join(ignored)} if ignored else None)

    @router.get(PATH + "/{name:path}/audio", response_class=Response)
    async def voice_audio(name: str) -> Response:
        """The clip of a voice as it was uploaded, if this server gives clips away."""
        voice, audio = await service.voices.get(name), await service.voices.audio(name)
        headers = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        return Response(audio, 200, headers, media_type=voice.media_type)

    @router.get(PATH + "/{name:path}")
    async def one_voice(name: str) -> dict[str, Any]:
        """One voice; "default" tells which voice that is."""
        if name.strip().lower() == "default":
            return {"id": "default", "object": "audio.voice", "name": "default", "resolved": service.voices.default_name}
        voice = await service.voices.get(name)
        return {**_upload_object(voice), **voice_object(voice)}

    @router.delete(PATH + "/{name:path}")
    async def remove_voice(name: str) -> dict[str, Any]:
        """Remove a stored voice. Requests that already speak with it go on."""
        if name.strip().lower() == "default":
            raise ProtectedVoice("this is the default voice of the server")
        voice = await service.voices.remove(name)
        return {"id": voice.name, "object": "audio.voice.deleted", "name": voice.name, "deleted": True, "success": True}

    return router


def consents_router(service: SpeechService, config: ServerConfig) -> APIRouter:
    """The routes of consents, which are kept and nothing more."""
    router = APIRouter()

    @router.post(CONSENTS_PATH, openapi_extra=request_body(CONSENT_PARTS, tuple(CONSENT_PARTS)))
    async def add_consent(request: Request) -> dict[str, Any]:
        """Keep a recording of consent."""
        body = await read_parts(request, config, CONSENT_PARTS)
        name, language = (required_text(body, field) for field in ("name", "language"))
        recording = _file(body, "recording", config)
        if isinstance(recording, Address):
            raise InvalidRequest("recording must be sent itself, not as an address", field="recording")
        return _consent_object(await service.consents.add(name, language, recording))

    @router.get(CONSENTS_PATH)
    async def list_consents(after: str = "", limit: str = "20") -> dict[str, Any]:
        """Consents, the latest first: up to `limit` (1 to 100) of those that follow `after`."""
        count = int(limit) if re.fullmatch("[0-9]{1,3}", limit) else 0
        if not 1 <= count <= 100:
            raise InvalidRequest("limit must be a number between 1 and 100", field="limit", code="out_of_range")
        consents = await service.consents.all()
        ids = [consent.id for consent in consents]
        if after and after not in ids:
            raise VoiceNotFound(f"there is no consent {after[:64]!r}", field="after", code="consent_not_found")
        begin = ids.index(after) + 1 if after else 0
        page = [_consent_object(consent) for consent in consents[begin : begin + count]]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return {"object": "list", "data": page, **ends, "has_more": begin + count < len(consents)}

    @router.get(CONSENTS_PATH + "/{consent_id}")
    async def one_consent(consent_id: str) -> dict[str, Any]:
        """One consent."""
        return _consent_object(await service.consents.get(consent_id))

    @router.post(CONSENTS_PATH + "/{consent_id}", openapi_extra=request_body({"name": CONSENT_PARTS["name"]}, ("name",)))
    async def rename_consent(consent_id: str, request: Request) -> dict[str, Any]:
        """Give a consent another name."""
        name = required_text(await read_parts(request, config, CONSENT_PARTS), "name")
        return _consent_object(await service.consents.rename(consent_id, name))

    @router.delete(CONSENTS_PATH + "/{consent_id}")
    async def remove_consent(consent_id: str) -> dict[str, Any]:
        """Remove a consent and its recording."""
        await service.consents.remove(consent_id)
        return {"id": consent_id, "object": "audio.voice_consent", "deleted": True}

    return router


# -- answers -------------------------------------------------------------------------------------------------------------


async def voice_names(voices: Voices) -> list[dict[str, str]]:
    """The names that requests may use, as clients put them into pickers."""
    return _named(await voices.all())


def _named(voices: list[Voice]) -> list[dict[str, str]]:
    return [{"id": name, "name": name} for name in ("default", *(voice.name for voice in voices))]


def voice_object(voice: Voice) -> dict[str, Any]:
    """A voice as OpenAI's API has it. Its name is its id."""
    return {
        "id": voice.name,
        "object": "audio.voice",
        "name": voice.name,
        "type": "audio_sample",
        "created_at": voice.created_at,
        "origin": voice.origin,
    }


def _upload_object(voice: Voice) -> dict[str, Any]:
    """A voice as other servers of this API have it; what was not given is left out."""
    given = {"consent": voice.consent, "speaker_description": voice.description, "language": voice.language, "tags": voice.tags}
    return {
        "name": voice.name,
        "created_at": voice.created_at,
        "file_size": voice.num_bytes,
        "mime_type": voice.media_type,
        "duration": round(voice.duration_s, 3),
        "ref_text": voice.transcript,
        "embedding_source": "audio",
        **{key: value for key, value in given.items() if value},
    }


def _consent_object(consent: Consent) -> dict[str, Any]:
    return {
        "id": consent.id,
        "object": "audio.voice_consent",
        "name": consent.name,
        "language": consent.language,
        "created_at": consent.created_at,
    }


# -- bodies --------------------------------------------------------------------------------------------------------------


async def read_parts(
    request: Request, config: ServerConfig, parts: dict[str, Part], urlencoded: bool = False
) -> dict[str, Any]:
    """The fields of a form or JSON object under their own names. Null is the same as absent."""
    own = {alias: name for name, part in parts.items() for alias in (name, *part.aliases)}
    body: dict[str, Any] = {}
    for name, value in (await read_body(request, config.limits.max_body_bytes, lambda _: True, urlencoded)).items():
        if value is None:
            continue
        known = own.get(name, name)
        if known in body:
            raise InvalidRequest(f"{name[:64]} is another name of {known[:64]}; send one of them", field=name[:64])
        body[known] = value
    return body


def read_draft(body: dict[str, Any], config: ServerConfig) -> VoiceDraft:
    """What is to be stored, from the fields of `VOICE_PARTS`."""
    consent = _text(body, "consent")
    if not consent.strip() and config.voices.consent_required:
        raise _missing("consent", "says where the speaker's consent is; it is")
    return VoiceDraft(
        name=required_text(body, "name"),
        audio=_file(body, "audio_sample", config),
        transcript=_text(body, "ref_text") or None,
        consent=consent,
        description=_text(body, "speaker_description"),
        language=_text(body, "language"),
        tags=_text(body, "tags"),
    )


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field, "")
    if isinstance(value, bytes):
        raise InvalidRequest(f"{field} must be text; it is a file", field=field, code="invalid_type")
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be text, once", field=field, code="invalid_type")
    return value


def required_text(body: dict[str, Any], field: str) -> str:
    """A field's text. Raises `InvalidRequest` if there is none."""
    if field not in body:
        raise _missing(field)
    return _text(body, field)


def _file(body: dict[str, Any], field: str, config: ServerConfig) -> Source:
    if field not in body:
        raise _missing(field)
    if isinstance(body[field], list):
        raise InvalidRequest(f"{field} must be one file", field=field, code="invalid_type")
    return read_clip(body[field], field, config.limits.reference_bytes)


def _flag(body: dict[str, Any], field: str, default: bool) -> bool:
    value = body.get(field, default)
    if isinstance(value, str) and value.strip().lower() in TRUE | FALSE:
        return value.strip().lower() in TRUE
    if not isinstance(value, bool):
        raise InvalidRequest(f"{field} must be true or false", field=field, code="invalid_type")
    return value


def _missing(field: str, what: str = "is") -> InvalidRequest:
    return InvalidRequest(f"{field} {what} missing", field=field, code="missing_field")


def request_body(parts: dict[str, Part], required: tuple[str, ...]) -> dict[str, Any]:
    """The body of an upload, for OpenAPI."""
    types: dict[str, dict[str, str]] = {
        "text": {"type": "string"}, "file": {"type": "string", "format": "binary"}, "flag": {"type": "boolean"}
    }  # fmt: skip
    properties = {name: {"description": part.note, **types[part.kind]} for name, part in parts.items()}
    schema = {"schema": {"type": "object", "required": list(required), "properties": properties}}
    return {"requestBody": {"required": bool(required), "content": dict.fromkeys((FORM, JSON, MSGPACK), schema)}}
