"""What is served: the lists of models. Knows no engine, only a `SpeechService`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from duetts.audio.formats import available_formats
from duetts.config import ServerConfig
from duetts.server.schemas import OPENAI_ALIASES, check_model
from duetts.server.voices import voice_names
from duetts.service import SpeechService

FEATURES = ("speech", "streaming", "reference_audio", "voices", "seed")


def models_router(service: SpeechService, config: ServerConfig) -> APIRouter:
    """GET /v1/models and one of them, and /v1/audio/models."""
    router = APIRouter()
    created = int(time.time())

    def names() -> list[str]:
        aliases = OPENAI_ALIASES if config.requests.openai_aliases else ()
        return list(dict.fromkeys((*config.served_model_names, *aliases)))

    def model_object(name: str, voices: list[dict[str, str]]) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "duetts",
            "root": config.served_model_names[0],
            "sample_rate": service.info.sample_rate,
            "formats": available_formats(),
            "voices": voices,
            "max_input_chars": config.limits.max_input_chars,
            "features": FEATURES,
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The served models, the native id first, then OpenAI's names for it."""
        voices = await voice_names(service.voices)
        return {"object": "list", "data": [model_object(name, voices) for name in names()]}

    @router.get("/v1/audio/models")
    async def list_audio_models() -> dict[str, Any]:
        """The same ids in the shape that web interfaces ask for."""
        return {"models": [{"id": name, "name": name} for name in names()]}

    @router.get("/v1/models/{model:path}")
    async def one_model(model: str) -> dict[str, Any]:
        """One served model; its id may hold slashes."""
        check_model(model, config)
        return model_object(model, await voice_names(service.voices))

    return router
