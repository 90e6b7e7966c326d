"""GET /v1/recipe: what `duetts recipe` prints as JSON, for the model that is served."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from duetts.config import ServerConfig
from duetts.errors import ConfigError, InvalidRequest
from duetts.recipe.making import MODELS, Request, make


def recipes_router(config: ServerConfig) -> APIRouter:
    """The one route. A model that is served under a name of its own is taken for S2 Pro."""
    router = APIRouter()
    served = config.served_model_names[0]

    @router.get("/v1/recipe")
    async def recipe(
        hardware: str | None = None, gpus: str | None = None, variant: str | None = None, task: str | None = None,
        goal: str | None = None, strict: str = "false",
    ) -> dict[str, Any]:  # fmt: skip
        """How to serve the model on other hardware, as docs/recipe.schema.json has it. Values without a recipe become the
        default with a warning; with `strict=true` they are refused."""
        if strict not in ("true", "false"):
            raise InvalidRequest("strict must be true or false", field="strict")
        request = Request(served if served in MODELS else None, hardware, gpus, variant, task, goal)
        try:
            return await asyncio.to_thread(make, request, strict == "true")
        except ConfigError as error:
            name = str(error).partition(" ")[0]
            raise InvalidRequest(str(error), field=name if name in Request.__slots__ else None) from None

    return router
