"""How long a device takes: steps, prompts and codec calls of full-size S2 Pro on one H200, from sizes and measured rates.

Formulas are the roofline of the project's performance notes, with what a good engine reaches: 75 % of the memory's bandwidth,
60 % of the matrix throughput, and gaps between a graph's nodes. Nothing here knows requests.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

SLOW_WEIGHTS = 3.634e9  # parameters of 36 layers
FAST_WEIGHTS = 0.4037e9  # parameters of 4 layers, read once a pass
SLOW_HEAD = 4097 * 2560
FAST_HEAD = 1024 * 2560
KV_BYTES = 36 * 8 * 128 * 2 * 2  # of a position: layers, heads, width, keys and values, 16-bit
ATTENTION_FLOP = 4 * 36 * 4096  # of one query and one position in its past
CODEC_FLOP = 6.77e9  # of a frame in the decoder
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows of a captured step; a step is padded to the next

FRAME_S = 2048 / 44100


@dataclass(frozen=True, slots=True)
class Card:
    """Rates of one device; the defaults are an H200's.

    `codec_call_s` and `codec_rate` are the straight line through the fused fp16 codec's measured calls: 0.8 to 1.0 ms for one
    frame, 1.3 to 1.7 ms for 16 x 2, 8.8 ms for 64 x 4, 13.5 ms for 16 x 25.
    """

    bandwidth: float = 0.75 * 4.3e12  # bytes/s
    matrix: float = 0.60 * 790e12  # FLOP/s, bf16
    gaps_s: float = 0.6e-3  # between the nodes of a step
    codec_call_s: float = 0.6e-3
    codec_rate: float = 205e12  # FLOP/s, fp16
    kv_bytes: float = 128e9  # of 141 GB, what weights, codec and work space leave

    @property
    def num_positions(self) -> int:
        """Positions of the KV cache."""
        return int(self.kv_bytes / KV_BYTES)

    def step_s(self, rows: int, positions: int) -> float:
        """A frame of `rows` sequences that have `positions` in their caches together: t_slow + t_kv + t_fast and gaps.

        The fast decoder reads its weights 9 times (positions 0 and 1 in one pass), 16 bits a weight.
        """
        padded = BUCKETS[bisect_left(BUCKETS, rows)]
        slow = max(2 * (SLOW_WEIGHTS + SLOW_HEAD) / self.bandwidth, 2 * padded * (SLOW_WEIGHTS + SLOW_HEAD) / self.matrix)
        kv = max(positions * KV_BYTES / self.bandwidth, positions * ATTENTION_FLOP / self.matrix)
        fast = max(
            9 * 2 * (FAST_WEIGHTS + FAST_HEAD) / self.bandwidth,
            2 * padded * (10 * FAST_WEIGHTS + 9 * FAST_HEAD) / self.matrix,
        )
        return slow + kv + fast + self.gaps_s

    def read_s(self, positions: int, past: int) -> float:
        """`positions` of a prompt in one pass, after `past` others of the same sequence."""
        flop = 2 * positions * SLOW_WEIGHTS + ATTENTION_FLOP * positions * (past + positions / 2)
        return max(2 * SLOW_WEIGHTS / self.bandwidth, flop / self.matrix)

    def decode_s(self, frames: int) -> float:
        """One codec call of so many frames in all streams together, each with its state."""
        return self.codec_call_s + frames * CODEC_FLOP / self.codec_rate
