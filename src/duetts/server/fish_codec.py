"""/v1/vqgan: the codec by itself, as Fish Audio's server has it. Clips to codes and codes to sound, several at once."""

from __future__ import annotations

import base64
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from duetts.audio.encode import wav_file
from duetts.config import ServerConfig
from duetts.errors import InvalidRequest
from duetts.server.body import FORM, JSON, MSGPACK, read_body
from duetts.server.fish import fish_answer, wants_json
from duetts.server.references import read_clip, read_codes
from duetts.server.speech import Listening
from duetts.service import SpeechService
from duetts.types import Float32, Int32

T = TypeVar("T")
MAX_ITEMS = 32

# What PCM of 16 bits becomes, given it and its rate.
SOUNDS: dict[str, Callable[[bytes, int], bytes]] = {
    "f16": lambda pcm, rate: _floats(pcm).astype("<f2").tobytes(),
    "s16": lambda pcm, rate: pcm,
    "f32": lambda pcm, rate: _floats(pcm).tobytes(),
    "wav": wav_file,
}


def codec_router(service: SpeechService, config: ServerConfig) -> APIRouter:
    """The two routes. Answers are msgpack unless JSON is asked for, which has bytes in base64."""
    router = APIRouter()

    @router.post("/v1/vqgan/encode", response_class=Response, openapi_extra=_body("audios", {"type": "string"}))
    async def encode(request: Request) -> Response:
        """Codes of clips: tokens [clips][codebooks][frames] of audios."""
        fields = await read_body(request, config.limits.max_body_bytes, lambda name: name != "audios")
        audios = fields.get("audios")
        items = _items("audios", [audios] if isinstance(audios, bytes) else audios)
        request.state.take(len(items) - 1)
        clips = [read_clip(item, f"audios.{index}", config.limits.reference_bytes) for index, item in enumerate(items)]

        async def work() -> list[Int32]:
            return [await service.codes_of(clip, f"audios.{index}") for index, clip in enumerate(clips)]

        return fish_answer(request, {"tokens": [codes.tolist() for codes in await _unless_left(request, work())]})

    tokens = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}

    @router.post("/v1/vqgan/decode", response_class=Response, openapi_extra=_body("tokens", tokens))
    async def decode(request: Request, dtype: str = "f16") -> Response:
        """Sound of codes: audios of tokens, at the codec's rate. `dtype` is f16, s16, f32 (raw) or wav."""
        if dtype not in SOUNDS:
            raise InvalidRequest(f"dtype {dtype[:64]!r} is not one of {', '.join(SOUNDS)}", field="dtype")
        fields = await read_body(request, config.limits.max_body_bytes, lambda name: name != "tokens")
        codes = [read_codes(item, f"tokens.{index}") for index, item in enumerate(_items("tokens", fields.get("tokens")))]
        request.state.take(len(codes) - 1)
        rate, speech_id = service.info.sample_rate, request.state.speech_id

        async def work() -> list[bytes]:
            named = [(item, f"tokens.{index}", f"{speech_id}-{index}") for index, item in enumerate(codes)]
            return [SOUNDS[dtype](await service.sound_of(*name), rate) for name in named]

        audios: list[Any] = await _unless_left(request, work())
        if wants_json(request):
            audios = [base64.b64encode(audio).decode() for audio in audios]
        return fish_answer(request, {"audios": audios})

    return router


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    with closing(Listening(request.receive)) as listening:
        return await listening.caller.unless_gone(work)


def _items(field: str, value: Any) -> list[Any]:
    if value is None:
        raise InvalidRequest(f"{field} is missing", field=field, code="missing_field")
    if not isinstance(value, list):
        raise InvalidRequest(f"{field} must be a list", field=field, code="invalid_type")
    if not 1 <= len(value) <= MAX_ITEMS:
        raise InvalidRequest(
            f"{field} has {len(value)} entries; it must have between 1 and {MAX_ITEMS}", field=field, code="out_of_range"
        )
    return value


def _floats(pcm: bytes) -> Float32:
    floats: Float32 = np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)
    return floats


def _body(field: str, items: dict[str, Any]) -> dict[str, Any]:
    """The body for OpenAPI."""
    properties = {field: {"type": "array", "items": items, "maxItems": MAX_ITEMS}}
    schema = {"schema": {"type": "object", "required": [field], "properties": properties}}
    return {"requestBody": {"required": True, "content": dict.fromkeys((MSGPACK, JSON, FORM), schema)}}
