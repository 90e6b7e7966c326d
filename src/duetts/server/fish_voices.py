"""Stored voices as Fish Audio's servers and clients know them: /v1/references by name, /model as its cloud has it.

Both are the store of /v1/audio/voices, with the same rules: a clip needs its transcript, and the speaker's consent where the
server asks for it. A voice's name is its id.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from duetts.config import ServerConfig
from duetts.errors import InvalidRequest
from duetts.server.fish import fish_answer, fish_names
from duetts.server.schemas import ignored_names
from duetts.server.voices import VOICE_PARTS, Part, read_draft, read_parts, request_body, required_text
from duetts.service import SpeechService
from duetts.types import Voice

REFERENCE_NAMES = {"id": "name", "audio": "audio_sample", "text": "ref_text"}
MODEL_NAMES = {"title": "name", "voices": "audio_sample", "texts": "ref_text", "description": "speaker_description"}
MODEL_PARTS = {
    name: Part(part.note, tuple(theirs for theirs, ours in MODEL_NAMES.items() if ours == name), part.kind)
    for name, part in VOICE_PARTS.items()
}
UPLOADED, CHANGED = ("title", "voices", "texts"), ("title", "description", "tags")
RENAME_PARTS = {"old_reference_id": Part("The name so far."), "new_reference_id": Part("The name from now on.")}
REMOVE_PARTS = {"reference_id": Part("The name.")}
MAX_PAGE = 1000


def references_router(service: SpeechService, config: ServerConfig) -> APIRouter:
    """/v1/references: add, list, update, delete. Answers are msgpack unless JSON is asked for."""
    router = APIRouter()

    upload = request_body(_in_their_names(VOICE_PARTS, REFERENCE_NAMES), tuple(REFERENCE_NAMES))

    @router.post("/v1/references/add", response_class=Response, openapi_extra=upload)
    async def add(request: Request) -> Response:
        """Store a voice: id, audio, text."""
        with fish_names(REFERENCE_NAMES):
            voice = await service.voices.add(read_draft(await read_parts(request, config, VOICE_PARTS), config), replace=False)
        return _answer(request, f"the voice {voice.name!r} is stored", reference_id=voice.name)

    @router.get("/v1/references/list", response_class=Response)
    async def list_all(request: Request) -> Response:
        """The names of all voices."""
        names = [voice.name for voice in await service.voices.all()]
        return _answer(request, f"there are {len(names)} voices", reference_ids=names)

    names = request_body(RENAME_PARTS, tuple(RENAME_PARTS))

    @router.post("/v1/references/update", response_class=Response, openapi_extra=names)
    async def rename(request: Request) -> Response:
        """Give a voice another name."""
        body = await read_parts(request, config, RENAME_PARTS)
        old, new = (required_text(body, field) for field in RENAME_PARTS)
        with fish_names({"new_reference_id": "name"}):
            voice = await service.voices.change(old, new_name=new)
        return _answer(request, f"the voice is now {voice.name!r}", old_reference_id=old, new_reference_id=voice.name)

    @router.delete("/v1/references/delete", response_class=Response, openapi_extra=request_body(REMOVE_PARTS, ()))
    async def remove(request: Request, reference_id: str | None = None) -> Response:
        """Remove a voice, named in the body or the query."""
        if reference_id is None:
            reference_id = required_text(await read_parts(request, config, REMOVE_PARTS), "reference_id")
        with fish_names({"reference_id": "name"}):
            voice = await service.voices.remove(reference_id)
        return _answer(request, f"the voice {voice.name!r} is removed", reference_id=voice.name)

    return router


def _answer(request: Request, message: str, **fields: Any) -> Response:
    return fish_answer(request, {"success": True, "message": message, **fields})


def model_router(service: SpeechService, config: ServerConfig) -> APIRouter:
    """/model: the cloud's registry of voices, as its clients call it."""
    router = APIRouter()

    @router.get("/model")
    async def list_models(
        page_size: str = "10", page_number: str = "1", title: str = "", title_language: str = "", sort_by: str = ""
    ) -> dict[str, Any]:
        """Voices page by page, of those whose name holds `title`. Other filters find everything."""
        size, number = _count("page_size", page_size, MAX_PAGE), _count("page_number", page_number, 1 << 30)
        voices = [voice for voice in await service.voices.all() if title.strip().lower() in voice.name.lower()]
        page = voices[size * (number - 1) : size * number]
        return {"total": len(voices), "items": [model_object(voice) for voice in page]}

    @router.get("/model/{model_id:path}")
    async def one_model(model_id: str) -> dict[str, Any]:
        """One voice."""
        return model_object(await service.voices.get(model_id))

    parts = _in_their_names(VOICE_PARTS, MODEL_NAMES)

    @router.post("/model", status_code=201, response_class=JSONResponse, openapi_extra=request_body(parts, UPLOADED))
    async def create_model(request: Request) -> Response:
        """Store a voice: title, one file of voices, one of texts."""
        with fish_names(MODEL_NAMES):
            body = await read_parts(request, config, MODEL_PARTS)
            if isinstance(body.get("audio_sample"), list):
                raise InvalidRequest("audio_sample must be one file: a voice has one clip", field="audio_sample")
            draft = read_draft({**body, "tags": _tags(body) or ""}, config)
            voice = await service.voices.add(draft, replace=False)
        return _model_answer(voice, body, tuple(MODEL_PARTS), 201)

    changed = request_body({name: parts[name] for name in CHANGED}, ())

    @router.patch("/model/{model_id:path}", response_class=JSONResponse, openapi_extra=changed)
    async def change_model(model_id: str, request: Request) -> Response:
        """Change a voice's title, description or tags. A new title is a new id."""
        with fish_names(MODEL_NAMES):
            body = await read_parts(request, config, MODEL_PARTS, urlencoded=True)
            title, description = (_optional_text(body, name) for name in ("name", "speaker_description"))
            voice = await service.voices.change(model_id, new_name=title, description=description, tags=_tags(body))
        return _model_answer(voice, body, ("name", "speaker_description", "tags"), 200)

    @router.delete("/model/{model_id:path}")
    async def remove_model(model_id: str) -> dict[str, Any]:
        """Remove a voice."""
        voice = await service.voices.remove(model_id)
        return {"_id": voice.name, "deleted": True}

    return router


def _in_their_names(parts: dict[str, Part], names: dict[str, str]) -> dict[str, Part]:
    """An upload in Fish Audio's names. Nothing can be overwritten there."""
    theirs = {ours: name for name, ours in names.items()}
    return {theirs.get(name, name): part for name, part in parts.items() if name != "overwrite"}


def _count(field: str, text: str, most: int) -> int:
    number = int(text) if re.fullmatch("[0-9]{1,10}", text) else 0
    if not 1 <= number <= most:
        raise InvalidRequest(f"{field} must be a number between 1 and {most}", field=field, code="out_of_range")
    return number


def _model_answer(voice: Voice, body: dict[str, Any], used: tuple[str, ...], status: int) -> Response:
    ignored = ignored_names([name for name in body if name not in used])
    return JSONResponse(model_object(voice), status, {"X-Ignored-Fields": ", ".join(ignored)} if ignored else None)


def _optional_text(body: dict[str, Any], field: str) -> str | None:
    return required_text(body, field) if field in body else None


def _tags(body: dict[str, Any]) -> str | None:
    """One text for the list that clients send; None if they send none."""
    tags = body.get("tags")
    if not isinstance(tags, list):
        return None if tags is None else required_text(body, "tags")
    return ", ".join(required_text({"tags": tag}, "tags") for tag in tags)


def model_object(voice: Voice) -> dict[str, Any]:
    """A voice as the cloud's clients insist on it. What has no meaning here is neutral."""
    created = datetime.fromtimestamp(voice.created_at, UTC).isoformat().replace("+00:00", "Z")
    return {
        "_id": voice.name,
        "type": "tts",
        "title": voice.name,
        "description": voice.description,
        "cover_image": "",
        "train_mode": "fast",
        "state": "trained",
        "tags": [tag.strip() for tag in voice.tags.split(",") if tag.strip()],
        "samples": [],
        "created_at": created,
        "updated_at": created,
        "languages": [voice.language] if voice.language else [],
        "visibility": "private",
        "lock_visibility": True,
        "like_count": 0,
        "mark_count": 0,
        "shared_count": 0,
        "task_count": 0,
        "liked": False,
        "marked": False,
        "author": {"_id": "local", "nickname": "local", "avatar": ""},
    }
