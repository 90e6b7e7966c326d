"""An HTTP/1.1 answer that arrives in pieces: how much of each is body, how much of that are samples, and where chunks end.

Knows no sockets and no clocks. HTTP is read by httptools, which uvicorn brings.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import httptools

MAX_HEADER = 64 << 10  # of a WAV file
MAX_ERROR = 300  # bytes kept of a body that is no audio


class BadAnswer(ValueError):
    """The bytes are no HTTP answer, or no WAV file where one was promised."""


@dataclass(slots=True)
class News:
    """What a piece of an answer held: body bytes, bytes of samples among them, and the samples' bytes of chunks that ended."""

    body: int = 0
    audio: int = 0
    chunks: list[int] = field(default_factory=list)


class Answer:
    """Feed it what arrives. With `wav` the header of the file is no audio."""

    def __init__(self, *, wav: bool = False) -> None:
        self.headers: dict[str, str] = {}  # names in small letters
        self.complete = False
        self.error = b""  # the body's beginning when the status is not 200
        self._wav: bytes | None = b"" if wav else None  # a header that is not whole yet
        self._parser = httptools.HttpResponseParser(self)
        self._news = News()
        self._in_body = False
        self._chunk = 0  # samples' bytes of the chunk that is being read

    @property
    def status(self) -> int:
        """0 before there is one."""
        return self._parser.get_status_code()

    def feed(self, data: bytes | memoryview) -> News:
        """Reads what arrived. Raises `BadAnswer`."""
        self._news = News()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, BadAnswer):
                raise error.__context__ from None
            raise BadAnswer(f"no HTTP answer: {error}") from None
        return self._news

    def close(self) -> None:
        """The other side has ended the connection: the end of a body without a length, else `BadAnswer`."""
        if not self._in_body or {"content-length", "transfer-encoding"} & self.headers.keys():
            raise BadAnswer("the connection ended before the answer did")
        self.complete = True

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._news.body += len(body)
        audio = len(body)
        if self.status != 200:
            self.error = (self.error + body)[:MAX_ERROR]
            audio = 0
        elif self._wav is not None:
            self._wav += body
            start = wav_samples(self._wav)
            audio = 0 if start is None else len(self._wav) - start
            self._wav = self._wav if start is None else None
        self._news.audio += audio
        self._chunk += audio

    def on_chunk_complete(self) -> None:
        if self._chunk:
            self._news.chunks.append(self._chunk)
        self._chunk = 0

    def on_message_complete(self) -> None:
        self.on_chunk_complete()  # of a body that has no chunks
        self.complete = True


def wav_samples(data: bytes) -> int | None:
    """Where the samples of a WAV file begin; None while its header is not whole. Raises `BadAnswer`."""
    if len(data) < 12:
        return None
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise BadAnswer("the audio is no WAV file")
    at = 12
    while at + 8 <= len(data):
        size: int = struct.unpack_from("<I", data, at + 4)[0]
        if data[at : at + 4] == b"data":
            return at + 8
        at += 8 + size + size % 2
    if at > MAX_HEADER:
        raise BadAnswer("the WAV file has no samples")
    return None
