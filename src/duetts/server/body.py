"""The body of a request as a plain dictionary: strict JSON, msgpack or a multipart form, within bounds; and the bounds on all
bodies that are under way: how much memory they take together, and how long one may take to arrive. Knows no field."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

import ormsgpack
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duetts.errors import InvalidRequest, Overloaded

JSON, MSGPACK, FORM = "application/json", "application/msgpack", "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"
OTHER_NAMES = {"application/x-msgpack": MSGPACK, "application/vnd.msgpack": MSGPACK}
MAX_PARTS = 64
LARGEST_AT_ONCE = 32  # bodies of the largest size that are held together, in as many pieces as they come in
ARRIVAL_S = 120.0  # 16 MiB at 1.1 Mbit/s
MAX_VALUES = 500_000  # a minute of codes has 13,000; unpacked they take up to 100 bytes each
MAX_DEPTH = 16

# Format bytes with a length of so many bytes behind them, in the order bin, ext (one byte more), str, array, map.
SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
EXTENSIONS = (0xC7, 0xC8, 0xC9)
ARRAYS, MAPS = (0xDC, 0xDD), (0xDE, 0xDF)
# Bytes behind a format byte of fixed size: numbers, and extensions with their type.
FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
         0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # fmt: skip


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


# -- msgpack: bounded before it is unpacked, as a few bytes may stand for millions of values --------------------------------


def parse_msgpack(data: bytes, name: str) -> dict[str, Any]:
    """The map that a whole message is, with strings as its keys. `name` is what it is called in errors.

    Raises `InvalidRequest` for everything else, for too many values or levels, and for what follows the map.
    """
    if not _is_whole(data, name):
        raise InvalidRequest(f"{name} is not valid msgpack", field=None)
    try:
        value = ormsgpack.unpackb(data)
    except ormsgpack.MsgpackDecodeError as error:
        raise InvalidRequest(f"{name} is not valid msgpack", field=None) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a msgpack map", field=None, code="invalid_type")
    return value


def _is_whole(data: bytes, name: str) -> bool:
    """Whether the data is one value, wholly there. Walks over it without keeping anything."""
    at, values, end = 0, 0, len(data)
    waiting = [1]  # values that each open array or map still lacks
    while waiting:
        if waiting[-1] == 0:
            waiting.pop()
            continue
        waiting[-1] -= 1
        values += 1
        if values > MAX_VALUES:
            raise InvalidRequest(f"{name} holds more than {MAX_VALUES} values", field=None)
        if at >= end:
            return False
        kind = data[at]
        at += 1
        inside = 0
        if kind < 0x80 or kind >= 0xE0:  # a small number
            continue
        if kind < 0x90:
            inside = 2 * (kind & 0x0F)
        elif kind < 0xA0:
            inside = kind & 0x0F
        elif kind < 0xC0:
            at += kind & 0x1F
        elif kind in SIZED:
            width = SIZED[kind]
            size = int.from_bytes(data[at : at + width], "big")
            at += width
            inside = size * (kind in ARRAYS) + 2 * size * (kind in MAPS)
            at += 0 if inside or kind in ARRAYS or kind in MAPS else size + (kind in EXTENSIONS)
        else:
            at += FIXED.get(kind, 0)
        if inside:
            if len(waiting) > MAX_DEPTH:
                raise InvalidRequest(f"{name} is nested deeper than {MAX_DEPTH} levels", field=None)
            waiting.append(inside)
    return at == end


# -- all bodies that are under way --------------------------------------------------------------------------------------


class Bodies:
    """Lets bodies in as long as there is room for their bytes, which are held until the request has ended."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._room = LARGEST_AT_ONCE * max_body_bytes
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        try:
            await self._app(scope, lambda: self._take(body), send)
        finally:
            self._held -= body.held

    async def _take(self, body: _Body) -> Message:
        """The next message. Raises `Overloaded` when there is no room for it, `HTTPException` when it comes too late."""
        message = await body.next()
        size = len(message.get("body", b""))
        body.held += size
        self._held += size
        if self._held > self._room:
            raise Overloaded("the bodies of all open requests take too much memory", retry_after_s=2.0)
        return message


class _Body:
    """One body while it arrives: the bytes that were handed on, and until when it must be there."""

    def __init__(self, receive: Receive) -> None:
        self.held = 0
        self._receive = receive
        self._arrived = False
        self._until = asyncio.get_running_loop().time() + ARRIVAL_S

    async def next(self) -> Message:
        if self._arrived:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body has not arrived within {ARRIVAL_S:g} s") from None
        self._arrived = not message.get("more_body", False)
        return message
