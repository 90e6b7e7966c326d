"""How fast a frame can be at best: the formulas of docs/benchmarks.md, from a model's and a card's sizes."""

from __future__ import annotations

from dataclasses import dataclass

FRAME_S = 2048 / 44100


@dataclass(frozen=True, slots=True)
class Card:
    """Bytes and 16-bit floating-point operations a second; `codec_flops` those that a codec on it is expected to reach."""

    name: str
    bandwidth: float
    flops: float
    codec_flops: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parameters of both decoders and of the head rows that are needed, bytes of keys and values of a position, and
    operations of an attended position; `passes` reads of the fast weights for a frame, of which `books - 1` need the head."""

    slow: float = 3.634e9
    fast: float = 0.4037e9
    slow_head: float = 4097 * 2560
    fast_head: float = 1024 * 2560
    cache_bytes: float = 147456
    attention: float = 4 * 36 * 4096
    books: int = 10
    passes: int = 9
    codec_flop: float = 6.77e9  # of a frame
    weight_bytes: float = 2


H200 = Card("H200", 4.3e12, 790e12, 200e12)
S2_PRO = Sizes()
# A good engine, 80 % of the bandwidth and 60 % of the arithmetic with the gaps between kernels: ms a frame by streams.
TARGET_MS = {1: 5.0, 16: 5.3, 32: 5.6, 64: 6.3, 128: 7.8}


def frame_floor_s(streams: int, context: float, sizes: Sizes = S2_PRO, card: Card = H200) -> float:
    """Seconds of one frame of so many streams, each with so many positions of context."""
    half = card.bandwidth / sizes.weight_bytes
    slow = max(
        sizes.slow / half + 2 * sizes.slow_head / card.bandwidth, 2 * streams * (sizes.slow + sizes.slow_head) / card.flops
    )
    heads = sizes.books - 1
    cache = max(
        streams * context * sizes.cache_bytes / card.bandwidth, streams * context * sizes.attention / card.flops
    )  # fmt: skip
    fast = max(
        sizes.passes * sizes.fast / half + heads * 2 * sizes.fast_head / card.bandwidth,
        2 * streams * (sizes.books * sizes.fast + heads * sizes.fast_head) / card.flops,
    )
    return slow + cache + fast


def codec_floor_s(sizes: Sizes = S2_PRO, card: Card = H200) -> float:
    """Seconds for one frame of one stream: its arithmetic."""
    return sizes.codec_flop / card.flops


def prefill_floor_s(positions: int, sizes: Sizes = S2_PRO, card: Card = H200) -> float:
    """Seconds for reading a prompt: its arithmetic, at least one reading of the weights."""
    arithmetic = (2 * positions * sizes.slow + positions**2 * sizes.attention / 2) / card.flops
    return max(arithmetic, sizes.weight_bytes * sizes.slow / card.bandwidth)


def throughput(streams: int, frame_s: float, codec_s: float = 0.0) -> float:
    """Seconds of audio a second, when the codec's work for the frames follows each step."""
    return streams * FRAME_S / (frame_s + streams * codec_s)
