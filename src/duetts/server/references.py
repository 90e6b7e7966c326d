"""Reference clips in a request: the many ways to write one, sorted in one place. Opens no file and no connection."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any
from urllib.parse import unquote

import numpy as np

from duetts.errors import InvalidRequest
from duetts.types import Address, Int32, Reference, Source

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):")
# Short enough to be no clip, and written like a path or a file name.
LOCAL_PATH = re.compile(r"[/~.\\].{0,1023}|.{0,1023}\\.{0,1023}|.{1,1000}\.\w{1,5}", re.DOTALL)
FILE_ADDRESS = re.compile(r"file:(?://(?:localhost)?(?=/))?(.*)", re.DOTALL | re.IGNORECASE)
CLIP_KEYS = ("audio", "ref_audio", "audio_path", "data")
LARGEST_CODE = 2**31 - 1


def read_references(given: dict[str, Any], max_bytes: int) -> tuple[Reference, ...]:
    """The clips of `ref_audio` with `ref_text`, or of `references`. Each has at most `max_bytes` bytes."""
    audio, text = given.get("ref_audio"), given.get("ref_text")
    if "references" in given:
        if audio is not None or text is not None:
            raise InvalidRequest("references and ref_audio with ref_text exclude each other; send one", field="references")
        return tuple(_read_entry(entry, max_bytes) for entry in _filled_list(given["references"], "references"))
    if audio is None:
        if text:
            raise InvalidRequest("ref_text is the transcript of ref_audio, which is missing", field="ref_audio")
        return ()
    clips = _filled_list(audio, "ref_audio") if isinstance(audio, list) else [audio]
    if text is None:
        raise _text_required("ref_text", "the voice is cloned from ref_audio and its transcript: ref_text is missing")
    texts = text if isinstance(text, list) else [text]
    if len(texts) != len(clips):
        raise InvalidRequest(f"ref_text has {len(texts)} transcripts for {len(clips)} clips of ref_audio", field="ref_text")
    return tuple(
        Reference(read_clip(clip, "ref_audio", max_bytes), _string(words, "ref_text"))
        for clip, words in zip(clips, texts, strict=True)
    )


def unread_keys(given: dict[str, Any]) -> list[str]:
    """Keys of `references` that nobody reads, as names of fields. The media type is one of those that are known."""
    known = (*CLIP_KEYS, "vq_codes", "text", "media_type")
    keys = {key for entry in given.get("references", ()) if isinstance(entry, dict) for key in entry if key not in known}
    return [f"references.{key}" for key in sorted(keys)]


def _read_entry(entry: Any, max_bytes: int) -> Reference:
    if not isinstance(entry, dict):
        raise InvalidRequest("references must be a list of objects", field="references", code="invalid_type")
    keys = [key for key in (*CLIP_KEYS, "vq_codes") if entry.get(key) is not None]
    if len(keys) != 1:
        raise InvalidRequest(f"each of references needs exactly one of {', '.join(CLIP_KEYS)}, vq_codes", field="references")
    if entry.get("text") is None:
        raise _text_required("references", "each of references needs text, the transcript of its clip")
    clip, text = entry[keys[0]], _string(entry["text"], "references")
    if keys == ["vq_codes"]:
        return Reference(read_codes(clip, "references.vq_codes"), text, "references")
    return Reference(read_clip(clip, "references", max_bytes), text, "references")


def read_codes(value: Any, field: str) -> Int32:
    """Codes int32 [codebooks, frames] of lists of integers of one length. Raises `InvalidRequest` for everything else."""
    rows = value if isinstance(value, list) else []
    if not rows or not all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows):
        raise InvalidRequest(f"{field} must be [codebooks][frames], all rows of one length", field=field, code="invalid_type")
    if not all(type(code) is int and -LARGEST_CODE <= code <= LARGEST_CODE for row in rows for code in row):
        raise InvalidRequest(f"{field} must hold integers", field=field, code="invalid_type")
    return np.array(rows, np.int32)


def read_clip(value: Any, field: str, max_bytes: int) -> Source:
    """What a value means: bytes of a form's file, a data address, base64 as it stands, or where a clip is.

    Everything else is refused by what it looks like. Whether an address is allowed is for whoever goes there to say.
    """
    if isinstance(value, bytes):
        _check_size(len(value), field, max_bytes)
        return value
    text = _string(value, field)
    scheme = SCHEME.match(text)
    if scheme is None:
        if LOCAL_PATH.fullmatch(text):
            return Address(text, local=True)
        return _decode_base64(text, field, max_bytes)
    match scheme.group(1).lower():
        case "data":
            return _decode_data_address(text, field, max_bytes)
        case "file":
            found = FILE_ADDRESS.fullmatch(text)
            return Address(unquote(found[1]) if found else text, local=True)
        case "http" | "https":
            return Address(text)
        case other:
            raise InvalidRequest(f"{field}: the scheme {other} is not supported; https, http, data or base64 are", field=field)


def _decode_data_address(text: str, field: str, max_bytes: int) -> bytes:
    """The media type in front is not looked at: the content decides."""
    head, comma, payload = text.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest(f"{field} must look like data:audio/wav;base64,... as a data address", field=field)
    return _decode_base64(payload, field, max_bytes)


def _decode_base64(text: str, field: str, max_bytes: int) -> bytes:
    """Both alphabets, with or without line breaks and padding."""
    compact = "".join(text.split()).rstrip("=").translate({ord("-"): "+", ord("_"): "/"})
    _check_size(len(compact) * 3 // 4, field, max_bytes)
    try:
        return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{field} is neither a data address nor valid base64", field=field) from error


def _check_size(num_bytes: int, field: str, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InvalidRequest(
            f"{field} has {num_bytes} bytes; at most {max_bytes} are allowed", field=field, code="reference_too_large"
        )


def _filled_list(value: Any, field: str) -> list[Any]:
    if not value:
        raise InvalidRequest(f"{field} is an empty list", field=field)
    return list(value)


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must hold strings", field=field, code="invalid_type")
    return value


def _text_required(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, field=field, code="reference_text_required")
