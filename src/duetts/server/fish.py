"""POST /v1/tts, as Fish Audio's clients call it. Only names differ from POST /v1/audio/speech; see `fish_fields.py`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from duetts.audio.formats import FORMATS
from duetts.config import ServerConfig
from duetts.server.body import FORM, JSON, MSGPACK, read_body
from duetts.server.fish_fields import fish_names, fish_schema, is_text, read_fish_order
from duetts.server.outcomes import Outcomes
from duetts.server.speech import answer
from duetts.service import SpeechService


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
