"""What a codec process does: calls of the decoder in the order in which they come, and references to codes. No torch.

It has no policy: which frames are decoded when is decided by the engine's codec worker, here as in one process. What it holds
is bounded: a stream is in one call at a time, and an engine has at most `credit` calls with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from duetts.engine.parts import DecodeCall, Decoded, Decoding, Encoder, EncoderDriver, Faults, Vocoder
from duetts.engine.stream import await_codes
from duetts.types import Float32, Int32, SpeakerInfo

CREDIT_OF_ONE = 2  # calls where each is computed by itself: one that is computed, one that waits
CREDIT = 4  # calls where several go to a device one behind the other


class CodecService:
    """A vocoder on a thread of its own; without a `driver` the encoder is stepped there, too. Calls are touched only by threads
    that have called `prepare` first: asking one whether it is ready would open another GPU where none is chosen."""

    def __init__(
        self, info: SpeakerInfo, vocoder: Vocoder, encoder: Encoder, driver: EncoderDriver | None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.info = info
        self.slots = vocoder.slots
        self._vocoder, self._encoder, self._driver = vocoder, encoder, driver
        self._credit = CREDIT if vocoder.quantum is None else CREDIT_OF_ONE
        self._launching = ThreadPoolExecutor(1, "duetts-codec", prepare)
        self._landing = ThreadPoolExecutor(1, "duetts-codec-landing", prepare)
        self._pumping: asyncio.Task[None] | None = None
        self._broken = False
        self._faults = Faults()
        self._open = self._most = self._calls = self._frames = 0

    async def decode(self, call: DecodeCall) -> Decoded:
        """What the call makes. Calls are begun in the order in which this is; raises whatever a device raises."""
        loop = asyncio.get_running_loop()
        self._open += 1
        self._most = max(self._most, self._open)
        try:
            with self._faults:
                begun = await loop.run_in_executor(self._launching, self._launch, call)
                made = begun if isinstance(begun, Decoded) else await loop.run_in_executor(self._landing, begun)
        finally:
            self._open -= 1
        self._calls += 1
        self._frames += len(call.slots) * int(call.codes.shape[2])
        return made

    async def encode_reference(self, wave: Float32) -> Int32:
        """Mono float32 [samples] at the codec rate -> codes int32 [codebooks, frames], as a speaker does it."""
        future = self._encoder.submit(wave)
        if self._driver is None and (self._pumping is None or self._pumping.done()):
            self._pumping = asyncio.create_task(self._pump())
        return await await_codes(future)

    def stats(self) -> dict[str, Any]:
        """Gauges and counters since the start. `credit` is how many calls an engine may have here."""
        return {
            "role": "codec", "device": self.info.device, "credit": self._credit, "open_calls": self._open,
            "most_calls": self._most, "calls": self._calls, "frames": self._frames, "encoding": self._encoder.waiting,
            "alive": not self._broken and not self._faults.lasting and (self._driver is None or self._driver.alive),
        }  # fmt: skip

    async def close(self) -> None:
        """Ends the threads after what they do now."""
        await asyncio.to_thread((self._driver or self._encoder).close)
        for pool in (self._launching, self._landing):
            await asyncio.to_thread(pool.shutdown)

    def _launch(self, call: DecodeCall) -> Decoded | Callable[[], Decoded]:
        """Begins the call: what it makes, if that is there at once, as on a CPU, or how to wait for it."""
        began = time.monotonic()
        for slot in call.fresh:
            self._vocoder.reset(slot)
        decoding = self._vocoder.start(call.slots, call.codes, keep=call.keep)
        landing = partial(land, decoding, time.monotonic() - began)
        return landing() if decoding.ready() else landing

    async def _pump(self) -> None:
        """Steps the encoder between calls of the decoder while it has anything to do."""
        loop = asyncio.get_running_loop()
        try:
            while self._encoder.waiting:
                await loop.run_in_executor(self._launching, self._encoder.step)
        finally:  # whatever went wrong, nobody may wait for ever
            if self._encoder.waiting:
                self._broken = True
                self._encoder.close()


def land(decoding: Decoding, seconds: float) -> Decoded:
    """What a call makes; it took so many seconds, unless it knows better. Waits, and raises whatever a device raises."""
    sounds = decoding.result()
    return Decoded(sounds, seconds if decoding.seconds is None else decoding.seconds)
