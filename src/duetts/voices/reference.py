"""Reference clips to codes: decoded within bounds, encoded once, kept by the hash of what was decoded.

It knows audio and codes, no transcripts: the same clip with a corrected transcript is the same entry.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial

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
        self._known: OrderedDict[str, Int32] = OrderedDict()  # least lately used first
        self._pending: dict[str, asyncio.Future[Int32]] = {}
        self._bytes = 0  # of what is known
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
        """Codes [codebooks, frames] of decoded samples. A caller that leaves does not end what others may wait for."""
        key = hashlib.sha256(wave.tobytes()).hexdigest()
        if key in self._known:
            self.hits += 1
            self._known.move_to_end(key)
            return self._known[key]
        if key in self._pending:
            self.hits += 1
        else:
            self.misses += 1
            self._pending[key] = asyncio.ensure_future(self._encode(wave))
            self._pending[key].add_done_callback(partial(self._keep, key))
        return await asyncio.shield(self._pending[key])

    def _keep(self, key: str, encoding: asyncio.Future[Int32]) -> None:
        """Keeps new codes, unless that failed, and forgets the oldest beyond the bound."""
        del self._pending[key]
        if encoding.cancelled() or encoding.exception() is not None:
            return
        self._known[key] = encoding.result()
        self._bytes += self._known[key].nbytes
        while self._bytes > self._limits.reference_cache_bytes and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1].nbytes
