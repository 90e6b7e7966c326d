"""MessagePack from clients, bounded before it is unpacked: a few bytes may stand for millions of values. Knows no field."""

from __future__ import annotations

from typing import Any

import ormsgpack

from duetts.errors import InvalidRequest

MAX_VALUES = 500_000  # a minute of codes has 13,000; unpacked they take up to 100 bytes each
MAX_DEPTH = 16

# Format bytes with a length of so many bytes behind them, in the order bin, ext (one byte more), str, array, map.
SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
EXTENSIONS = (0xC7, 0xC8, 0xC9)
ARRAYS, MAPS = (0xDC, 0xDD), (0xDE, 0xDF)
# Bytes behind a format byte of fixed size: numbers, and extensions with their type.
FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
         0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # fmt: skip


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
