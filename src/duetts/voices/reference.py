"""Reference clips to codes: fetched and read within bounds, encoded once, and kept in memory and on disk by the hash of their
samples.

It knows audio and codes, no transcripts: the same clip with a corrected transcript is the same entry.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from duetts.audio.decode import decode_audio
from duetts.config import Limits, MediaConfig, cache_folder
from duetts.cores import usable_cores
from duetts.errors import InvalidRequest
from duetts.types import Address, Float32, Int32, Source
from duetts.voices.code_folder import CodeFolder
from duetts.voices.fetch import Fetcher
from duetts.voices.sharing import SharedWork, Threads

READING_THREADS = min(4, usable_cores())
MAX_KNOWN_FILES = 8192  # whose hashes of file and samples are remembered, about 400 bytes each


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Clip:
    """A clip that was read. `key` is the hash of its samples at the codec rate; `wave` is None if its `codes` are known."""

    key: str
    num_samples: int
    wave: Float32 | None = None
    codes: Int32 | None = None


@dataclass(frozen=True, slots=True)
class ClipCodes:
    """Codes int32 [codebooks, frames] of a clip. A `hit` did not have to be encoded for this request."""

    codes: Int32
    hit: bool


class ReferenceCodes:
    """Codes of clips through `encode`, a function of the engine, in three tiers: memory, disk, and the codec.

    Concurrent requests for one clip fetch, read and encode it once; that goes on as long as one of them waits. Without a
    `codec_id`, which must differ whenever codes would, nothing is kept on disk. Used from one event loop.
    """

    def __init__(
        self,
        encode: Callable[[Float32], Awaitable[Int32]],
        rate: int,
        limits: Limits,
        codec_id: str = "",
        fetcher: Fetcher | None = None,
    ) -> None:
        self._encode = encode
        self._rate = rate
        self._limits = limits
        self._threads = Threads("duetts-reference", READING_THREADS, limits.reference_queue)
        self._fetcher = fetcher or Fetcher(MediaConfig(), limits)
        self._folder: CodeFolder | None = None
        if codec_id and limits.reference_disk_bytes:
            self._folder = CodeFolder(cache_folder() / "references", codec_id, limits.reference_disk_bytes)
        self._known: OrderedDict[str, Int32] = OrderedDict()  # codes by the hash of samples, least lately used first
        self._files: OrderedDict[str, tuple[str, int]] = OrderedDict()  # by the hash of a file: hash and number of samples
        self._in_use: WeakValueDictionary[str, Clip] = WeakValueDictionary()  # by the hash of a file
        self._addresses: SharedWork[Clip] = SharedWork()
        self._readings: SharedWork[Clip] = SharedWork()
        self._encodings: SharedWork[ClipCodes] = SharedWork()
        self.num_bytes = 0  # of the codes in memory
        self.num_decoded = 0
        self.hits = 0
        self.disk_hits = 0  # of the hits, those that began on disk
        self.misses = 0

    async def decode(self, source: Source, field: str) -> Clip:
        """The clip of an encoded file. A file that was decoded before is not decoded again while its codes are kept.

        Raises `InvalidRequest` for what is no usable clip or cannot be fetched, `Overloaded` when too many wait to be read.
        """
        if isinstance(source, Address):
            return await self._addresses.run((source, field), lambda: self._fetch_and_read(source, field))
        return await self._decode_file(source, field)

    async def file(self, source: Source, field: str) -> bytes:
        """The encoded file itself. Raises what `decode` raises."""
        if not isinstance(source, Address):
            return source
        async with self._fetcher.fetched(source, field) as audio:
            return audio

    async def _fetch_and_read(self, address: Address, field: str) -> Clip:
        async with self._fetcher.fetched(address, field) as audio:
            return await self._decode_file(audio, field)

    async def _decode_file(self, audio: bytes, field: str) -> Clip:
        if len(audio) > self._limits.reference_bytes:
            raise InvalidRequest(
                f"{field} has {len(audio)} bytes; at most {self._limits.reference_bytes} are allowed",
                field=field, code="reference_too_large",
            )  # fmt: skip
        file = await self._threads.run(_hash, audio)
        clip = self._in_use.get(file)
        if clip is None:
            clip = await self._readings.run((file, field), lambda: self._read(file, audio, field))
        return clip

    async def codes(self, clip: Clip) -> ClipCodes:
        """The codes of a clip. A caller that leaves does not end what others wait for."""
        codes = self._recall(clip.key)
        if codes is None:
            codes = clip.codes
        if codes is not None:
            self.hits += 1
            return ClipCodes(codes, hit=True)
        joins = clip.key in self._encodings
        found = await self._encodings.run(clip.key, lambda: self._find(clip))
        self.hits += joins
        return ClipCodes(found.codes, hit=joins or found.hit)

    def close(self) -> None:
        """Reads no more clips. Waits for nothing."""
        self._threads.close()
        self._fetcher.close()

    async def _read(self, file: str, audio: bytes, field: str) -> Clip:
        """A clip from what is known of its file, or decoded."""
        if file in self._files:
            self._files.move_to_end(file)
            key, num_samples = self._files[file]
            codes = self._recall(key)
            if codes is None:
                codes = await self._load(key)
            if codes is not None:
                return Clip(key, num_samples, codes=codes)
        wave, key = await self._threads.run(self._samples, audio, field)
        self.num_decoded += 1
        self._files[file] = key, len(wave)
        while len(self._files) > MAX_KNOWN_FILES:
            self._files.popitem(last=False)
        clip = self._in_use[file] = Clip(key, len(wave), wave)
        return clip

    def _samples(self, audio: bytes, field: str) -> tuple[Float32, str]:
        """On a thread: samples at the codec rate and their hash."""
        limits = self._limits
        wave = decode_audio(audio, rate=self._rate, min_s=limits.reference_min_s, max_s=limits.reference_max_s, field=field)
        return wave, _hash(wave.data)

    async def _find(self, clip: Clip) -> ClipCodes:
        """Codes that are not in memory: from disk, or encoded."""
        codes = await self._load(clip.key)
        if codes is not None:
            self.hits += 1
            return ClipCodes(codes, hit=True)
        assert clip.wave is not None, "a clip without samples has codes"
        self.misses += 1
        codes = await self._encode(clip.wave)
        self._keep(clip.key, codes)
        if self._folder is not None:
            self._threads.start(self._folder.write, clip.key, codes)
        return ClipCodes(codes, hit=False)

    async def _load(self, key: str) -> Int32 | None:
        """Codes from disk into memory."""
        codes = None if self._folder is None else await self._threads.run(self._folder.read, key)
        if codes is not None:
            self.disk_hits += 1
            self._keep(key, codes)
        return codes

    def _recall(self, key: str) -> Int32 | None:
        codes = self._known.get(key)
        if codes is not None:
            self._known.move_to_end(key)
        return codes

    def _keep(self, key: str, codes: Int32) -> None:
        """Keeps codes in memory, and forgets those least lately used beyond the bound."""
        self.num_bytes += codes.nbytes - (self._known[key].nbytes if key in self._known else 0)
        codes.setflags(write=False)  # it is shared from now on
        self._known[key] = codes
        self._known.move_to_end(key)
        while self.num_bytes > self._limits.reference_cache_bytes and len(self._known) > 1:
            self.num_bytes -= self._known.popitem(last=False)[1].nbytes


def _hash(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
