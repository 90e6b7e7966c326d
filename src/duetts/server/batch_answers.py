"""The results of a batch as a body, written while they come: one JSON object, lines of JSON, parts of a form, or a ZIP file."""

from __future__ import annotations

import asyncio
import base64
import json
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

OBJECT = "audio.speech.batch"
LARGE_BYTES = 1 << 20  # encoded in another thread


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one item: its fields, and its audio as a whole file unless it failed."""

    index: int
    fields: dict[str, Any]
    audio: bytes | None = None

    @property
    def described(self) -> dict[str, Any]:
        """The fields that come before the audio; null ones are left out."""
        status = "error" if self.audio is None else "success"
        known = {name: value for name, value in self.fields.items() if value is not None}
        return {"index": self.index, "status": status, **known}

    @property
    def file_name(self) -> str:
        return f"{self.index}.{self.fields['format']}"


Writer = Callable[[str, AsyncIterator[Result]], AsyncGenerator[bytes, None]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A way to answer. `content_type` may hold `{id}`. `as_ready`: results need not be in the order of the items."""

    content_type: str
    write: Writer
    as_ready: bool = False


class _Summary:
    """Collects what stands at the end."""

    def __init__(self, batch_id: str) -> None:
        self._id = batch_id
        self._results: list[dict[str, Any]] = []
        self._succeeded = 0

    def add(self, result: Result, **fields: Any) -> dict[str, Any]:
        """The result as it is shown."""
        self._succeeded += result.audio is not None
        self._results.append(result.described | fields)
        return self._results[-1]

    def counts(self) -> dict[str, int]:
        total = len(self._results)
        return {"total": total, "succeeded": self._succeeded, "failed": total - self._succeeded}

    def whole(self) -> bytes:
        """The object that a JSON answer is, without audio."""
        return json.dumps({"id": self._id, "object": OBJECT, "results": self._results, **self.counts()}).encode()


async def _with_audio(described: dict[str, Any], audio: bytes | None) -> bytes:
    """A result as JSON on one line, its audio in base64. Built by hand: the text is not gone through again for escapes."""
    text = json.dumps(described).encode()
    if audio is None:
        return text
    large = len(audio) > LARGE_BYTES
    encoded = await asyncio.to_thread(base64.b64encode, audio) if large else base64.b64encode(audio)
    return b'%s, "audio_data": "%s"}' % (text[:-1], encoded)


async def write_json(batch_id: str, results: AsyncIterator[Result]) -> AsyncGenerator[bytes, None]:
    """One object."""
    count = succeeded = 0
    yield b'{"id": %s, "object": "%s", "results": [' % (json.dumps(batch_id).encode(), OBJECT.encode())
    async for result in results:
        yield (b", " if count else b"") + await _with_audio(result.described, result.audio)
        count, succeeded = count + 1, succeeded + (result.audio is not None)
    yield b'], "total": %d, "succeeded": %d, "failed": %d}' % (count, succeeded, count - succeeded)


async def write_lines(batch_id: str, results: AsyncIterator[Result]) -> AsyncGenerator[bytes, None]:
    """A line for each result."""
    async for result in results:
        yield await _with_audio(result.described, result.audio) + b"\n"


async def write_parts(batch_id: str, results: AsyncIterator[Result]) -> AsyncGenerator[bytes, None]:
    """A part for the audio of each result that has any, and one of JSON with all results. `batch_id` is the boundary."""
    summary = _Summary(batch_id)

    def part(content_type: str, name: str, body: bytes) -> bytes:
        head = f'--{batch_id}\r\nContent-Type: {content_type}\r\nContent-Disposition: attachment; filename="{name}"\r\n'
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body + b"\r\n"

    async for result in results:
        if result.audio is None:
            summary.add(result)
        else:
            summary.add(result, file=result.file_name)
            yield part(result.fields["media_type"], result.file_name, result.audio)
    yield part("application/json", "results.json", summary.whole()) + f"--{batch_id}--\r\n".encode()


class _Sink:
    """A file that only grows, and gives back what was written since it was last asked."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is open."""

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


async def write_zip(batch_id: str, results: AsyncIterator[Result]) -> AsyncGenerator[bytes, None]:
    """A file for the audio of each result that has any, and results.json with all results. Nothing is packed tighter."""
    summary, sink = _Summary(batch_id), _Sink()
    archive = zipfile.ZipFile(sink, "w")
    async for result in results:
        if result.audio is None:
            summary.add(result)
        else:
            summary.add(result, file=result.file_name)
            archive.writestr(result.file_name, result.audio)
            yield sink.take()
    archive.writestr("results.json", summary.whole())
    archive.close()
    yield sink.take()


JSON_ANSWER = Answer("application/json", write_json)
ANSWERS = {
    "application/x-ndjson": Answer("application/x-ndjson", write_lines, as_ready=True),
    "multipart/mixed": Answer("multipart/mixed; boundary={id}", write_parts),
    "application/zip": Answer("application/zip", write_zip),
}


def choose_answer(accept: str) -> Answer:
    """The first known type that is accepted, else JSON."""
    for entry in accept.split(","):
        name = entry.split(";")[0].strip().lower()
        if name in ANSWERS:
            return ANSWERS[name]
        if name == JSON_ANSWER.content_type:
            break
    return JSON_ANSWER
