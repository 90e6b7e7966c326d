"""Reference clips to codes: decoded within bounds, encoded once, kept by the hash of what was decoded.

It knows audio and codes, no transcripts: the same clip with a corrected transcript is the same entry.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from duetts.audio.decode import decode_audio
from duetts.config import Limits
from duetts.errors import InvalidRequest
from duetts.types import Float32, Int32


class ReferenceCodes:
    """Codes of clips through `encode`, a function of the engine. Concurrent requests for one clip encode it once."""

    def __init__(self, encode: Callable[[Float32], Awaitable[Int32]], rate: int, limits: Limits) -> None:
        self._encode = encode
        self._rate = rate
        self._limits = limits
        self._known: OrderedDict[str, asyncio.Future[Int32]] = OrderedDict()
        self._bytes = 0
        self.hits = 0
        self.misses = 0

    async def decode(self, audio: bytes, field: str) -> Float32:
        """Mono samples at the codec rate. Raises `InvalidRequest` for what is no usable clip."""
        limits = self._limits
        if len(audio) > limits.reference_bytes:
            raise InvalidRequest(
                f"{field} has {len(audio)} bytes; at most {limits.reference_bytes} are allowed",
                field=field, code="reference_too_large",
            )  # fmt: skip
        return await asyncio.to_thread(
            decode_audio, audio, rate=self._rate, min_s=limits.reference_min_s, max_s=limits.reference_max_s, field=field
        )

    async def codes(self, wave: Float32) -> Int32:
        """Codes [codebooks, frames] of decoded samples."""
        key = hashlib.sha256(wave.tobytes()).hexdigest()
        entry = self._known.get(key)
        if entry is not None:
            self.hits += 1
            self._known.move_to_end(key)
            return await asyncio.shield(entry)
        self.misses += 1
        entry = self._known[key] = asyncio.ensure_future(self._encode(wave))
        entry.add_done_callback(lambda done: self._settle(key, done))
        return await asyncio.shield(entry)

    def _settle(self, key: str, entry: asyncio.Future[Int32]) -> None:
        """Counts a new entry's bytes and drops the oldest; forgets one that failed."""
        if entry.cancelled() or entry.exception() is not None:
            self._known.pop(key, None)
            return
        self._bytes += entry.result().nbytes
        for old in list(self._known):
            if self._bytes <= self._limits.reference_cache_bytes:
                return
            if old != key and self._known[old].done():
                self._bytes -= self._known.pop(old).result().nbytes
