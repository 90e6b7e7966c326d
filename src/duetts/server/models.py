"""What is served and whether it works: the model list, health and life. Knows no engine, only a `SpeechService`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from duetts.audio.formats import available_formats
from duetts.config import ServerConfig
from duetts.server.schemas import check_model
from duetts.types import SpeechService

FEATURES = ("speech", "streaming", "reference_audio", "seed")


def models_router(service: SpeechService, config: ServerConfig) -> APIRouter:
    """GET /v1/models and one of them, /health and /live."""
    router = APIRouter()
    created = int(time.time())

    def model_object(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "duetts",
            "root": config.served_model_names[0],
            "sample_rate": service.info.sample_rate,
            "formats": available_formats(),
            "voices": [{"id": "default", "name": "default"}],
            "max_input_chars": config.limits.max_input_chars,
            "features": FEATURES,
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The served models, the native id first."""
        return {"object": "list", "data": [model_object(name) for name in config.served_model_names]}

    @router.get("/v1/models/{model:path}")
    async def one_model(model: str) -> dict[str, Any]:
        """One served model; its id may hold slashes."""
        return model_object(check_model(model, config))

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 while the engine runs."""
        if service.stats().get("alive", True):
            return JSONResponse({"status": "healthy"})
        return JSONResponse({"status": "unhealthy", "reason": "the engine has stopped"}, 503)

    @router.get("/live")
    async def live() -> dict[str, str]:
        """200 while the process runs."""
        return {"status": "alive"}

    return router
