"""The body of a request as a plain dictionary: strict JSON, msgpack or a multipart form, within bounds. Knows no field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import Request

from duetts.errors import InvalidRequest
from duetts.server.msgpack import MAX_VALUES, parse_msgpack

JSON, MSGPACK, FORM = "application/json", "application/msgpack", "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"
OTHER_NAMES = {"application/x-msgpack": MSGPACK, "application/vnd.msgpack": MSGPACK}
MAX_PARTS = 64


async def read_body(request: Request, limit: int, is_text: Callable[[str], bool], urlencoded: bool = False) -> dict[str, Any]:
    """The fields of a body of at most `limit` bytes, which may be `urlencoded` only if that is said.

    `is_text` says of a form field whether its text is meant as it stands; other form texts are read as JSON. Files are
    bytes, fields that come several times are lists.
    """
    stated, options = parse_options_header(request.headers.get("content-type", JSON))
    media_type = OTHER_NAMES.get(stated.decode("latin-1"), stated.decode("latin-1"))
    if media_type not in (JSON, MSGPACK, FORM) and not (urlencoded and media_type == URLENCODED):
        raise HTTPException(415, f"a body must be {JSON}, {MSGPACK} or {FORM}")
    body = await _read_bytes(request, limit)
    if media_type == JSON:
        return parse_object(body)
    if media_type == MSGPACK:
        return parse_msgpack(body, "the body")
    parts = _read_parts(body, options.get(b"boundary")) if media_type == FORM else _read_pairs(body)
    return _join_parts([(name, value if is_text(name) else _json_or_text(value)) for name, value in parts])


async def _read_bytes(request: Request, limit: int) -> bytes:
    """Counts while reading, since a chunked body states no length."""
    stated = request.headers.get("content-length", "0")
    body = bytearray()
    if int(stated) <= limit:
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                break
        else:
            return bytes(body)
    raise HTTPException(413, f"the body is larger than {limit} bytes")


def parse_object(body: bytes, what: str = "the body") -> dict[str, Any]:
    """A JSON object without repeated names. Too large numbers become infinite, for the checks of the fields to refuse."""
    if _most_values(body) > MAX_VALUES:
        raise InvalidRequest(f"{what} holds more than {MAX_VALUES} values", field=None)
    try:
        value = json.loads(body.decode("utf-8-sig"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{what} is not UTF-8", field=None) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not valid JSON", field=None) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} must be a JSON object", field=None, code="invalid_type")
    return value


def _most_values(text: bytes) -> int:
    """How many values JSON can hold at most: every one but the first has a comma, colon or bracket before it."""
    return sum(text.count(mark) for mark in (b",", b":", b"[", b"{"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise InvalidRequest(f"{name[:64]} is given twice", field=name[:64])
        result[name] = value
    return result


def _read_parts(body: bytes, boundary: bytes | None) -> list[tuple[str, Any]]:
    """Names and values of a form's parts: text of fields, bytes of files. Nothing is written to disk."""
    if not boundary:
        raise InvalidRequest("the content type of a multipart form must state its boundary", field=None)
    parts: list[tuple[bytes | None, bytes | File]] = []
    ends: list[bool] = []

    def add(part: Field | File) -> None:
        if len(parts) == MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts", field=None)
        parts.append((part.field_name, part if isinstance(part, File) else part.value or b""))

    in_memory = {"MAX_MEMORY_FILE_SIZE": math.inf}
    try:
        parser = FormParser(FORM, add, add, on_end=lambda: ends.append(True), boundary=boundary, config=in_memory)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest("the body is not a valid multipart form", field=None) from error
    if not ends:
        raise InvalidRequest("the multipart form is cut off", field=None)
    return [(_decode(name or b""), _file_bytes(value) if isinstance(value, File) else _decode(value)) for name, value in parts]


def _read_pairs(body: bytes) -> list[tuple[str, Any]]:
    try:
        return list(parse_qsl(body.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=MAX_PARTS))
    except ValueError as error:  # also of what is not UTF-8
        raise InvalidRequest("the body is not a valid form", field=None) from error


def _file_bytes(part: File) -> bytes:
    part.file_object.seek(0)
    return part.file_object.read()


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("a form field is not UTF-8", field=None) from error


def _json_or_text(value: str | bytes) -> Any:
    """What a form text says if it is JSON, else the text: the field's type check then names the fault."""
    if isinstance(value, bytes) or _most_values(value.encode()) > MAX_VALUES:
        return value
    try:
        return json.loads(value, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return value


def _join_parts(parts: list[tuple[str, Any]]) -> dict[str, Any]:
    grouped: dict[str, list[Any]] = {}
    for name, value in parts:
        grouped.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in grouped.items()}
