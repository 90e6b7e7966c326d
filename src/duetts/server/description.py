"""What /openapi.json says beyond what the routes say of themselves: every status that they can answer with, and the key.

The statuses are those of the error table. FastAPI's own 422 is left out, as no route answers with it.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from duetts.config import ServerConfig
from duetts.server.auth import is_public
from duetts.server.errors import is_fish

ABOUT = "Text in, speech out: OpenAI's API of speech, Fish Audio's, and voices. docs/api.md tells what each field means."
MEANING = {
    400: "The request is wrong: `code` says how, `param` names the field.",
    401: "A key is asked for, and this is none.",
    403: "It is not allowed here.",
    404: "There is no such thing.",
    408: "The body did not arrive in time.",
    409: "There is one already.",
    413: "The body is too large.",
    415: "The body is of a type that is not read here.",
    424: "Something that the request names could not be fetched.",
    429: "There is no room now; `Retry-After` says when to come again.",
    499: "It was ended by its id.",
    500: "A fault of the server.",
    503: "It is loading or stopping; `Retry-After` says when to come again.",
    504: "The request's own time was over.",
}
ANY = (500, 503)
WITH_BODY = (400, 408, 413, 415, 429)
SPEAKING = (403, 404, 424, 499, 504)
STORING = (403, 404, 409, 424)
SPEECH_PATHS = ("/v1/audio/speech", "/v1/audio/speech/batch", "/v1/tts", "/v1/vqgan/encode", "/v1/vqgan/decode")
HEALTH_PATHS = ("/live", "/health", "/v1/health", "/ready", "/v1/test", "/version", "/metrics")
# Types of good answers where a route chooses among several, or has one that is not JSON.
EITHER = ("application/msgpack", "application/json")
TYPES = {
    "/v1/audio/speech/batch": ("application/json", "application/x-ndjson", "multipart/mixed", "application/zip"),
    "/v1/vqgan/encode": EITHER, "/v1/vqgan/decode": EITHER, "/v1/references/add": EITHER, "/v1/references/list": EITHER,
    "/v1/references/update": EITHER, "/v1/references/delete": EITHER, "/metrics": ("text/plain",),
    "/v1/audio/voices/{name}/audio": ("audio/*", "video/*", "application/octet-stream"),
}  # fmt: skip

OPENAI_ERROR = {
    "type": "object",
    "required": ["error", "request_id"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
        "request_id": {"type": "string"},
    },
}  # fmt: skip
HEALTH = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
FISH_ERROR = {
    "type": "object",
    "required": ["statusCode", "message", "error"],
    "properties": {"statusCode": {"type": "integer"}, "message": {"type": "string"}, "error": {"type": "string"}},
}


def describe(app: FastAPI, config: ServerConfig) -> None:
    """Lets `app.openapi` tell all of it. Made when it is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, description=ABOUT, routes=app.routes)
            found["components"] = {"schemas": {"Error": OPENAI_ERROR, "FishError": FISH_ERROR, "Health": HEALTH}}
            if config.access.keys:
                found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, methods in found["paths"].items():
                for method, operation in methods.items():
                    _complete(operation, path, method, config)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(operation: dict[str, Any], path: str, method: str, config: ServerConfig) -> None:
    """Adds the failures of one operation, and whether it needs a key."""
    statuses = {*ANY, *_of_requests(operation), *_of_work(path, method)}
    if config.access.keys and not is_public(path, method.upper(), config.access):
        operation["security"] = [{"key": []}]
        statuses.add(401)
    answers = operation["responses"]
    answers.pop("422", None)
    if path in TYPES:
        answers["200"]["content"] = {name: {} for name in TYPES[path]}
    for status in sorted(statuses):
        healths = path in HEALTH_PATHS and status == 503  # these tell with it what is not well
        shape = "Health" if healths else "FishError" if is_fish(path) else "Error"
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
        answers.setdefault(str(status), {"description": MEANING[status], "content": content})


def _of_requests(operation: dict[str, Any]) -> set[int]:
    """What can be wrong with what is sent."""
    wrong = set(WITH_BODY) if "requestBody" in operation else set()
    return wrong | ({400} if operation.get("parameters") else set())


def _of_work(path: str, method: str) -> set[int]:
    """What can come of the work."""
    if path in SPEECH_PATHS:
        return set(SPEAKING)
    found = {404} if "{" in path or path == "/v1/audio/voice_consents" else set()  # what its list begins after
    if path == "/v1/audio/voices/{name}/audio":
        found.add(403)
    return found | set(STORING) if method != "get" and path not in HEALTH_PATHS else found
