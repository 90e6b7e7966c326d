"""Steps where pieces of speech are joined that a codec decoded one by one, from silence each, with and without the bridge.

    python benchmarks/joins.py CODEC_FOLDER CLIP

A clip goes through the codec; its codes are cut into pieces of about 1 s, at the quietest frame near each second as sentences
are, and at the loudest as the worst case. Prints steps between neighbouring samples, in 16-bit units.
"""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from training.codec.codes import load_codec

from duetts.audio.decode import decode_audio
from duetts.engine.vocoder import to_pcm
from duetts.models.codec import Codec
from duetts.narration import BRIDGE_S, bridge

Wave = np.ndarray


def joined(codec: Codec, codes: torch.Tensor, cuts: list[int], *, bridged: bool) -> Wave:
    """int16 samples of the pieces between the cuts, one after another."""
    rate, pcm = codec.config.sample_rate, b""
    for start, end in pairwise(cuts):
        piece = to_pcm(codec.decode(codes[:, :, start:end])[0])
        if pcm and bridged:
            piece = bridge(piece, int(np.frombuffer(pcm[-2:], "<i2")[0]), round(BRIDGE_S * rate))
        pcm += piece
    return np.frombuffer(pcm, "<i2").astype(int)


@torch.inference_mode()
def main(folder: str, clip: str) -> None:
    codec = load_codec(Path(folder), torch.device("cpu"))
    rate, hop = codec.config.sample_rate, codec.config.frame_length
    codes = codec.encode(torch.from_numpy(decode_audio(Path(clip).read_bytes(), rate=rate, min_s=1, max_s=60))[None])
    frames = codes.shape[-1]
    whole = np.frombuffer(to_pcm(codec.decode(codes)[0]), "<i2").astype(int)
    steps = np.abs(np.diff(whole))
    print(f"{frames} frames; steps of the whole decode: p50 {np.median(steps):.0f}, p99.9 {np.quantile(steps, 0.999):.0f}, "
          f"largest {steps.max()}")  # fmt: skip
    level = np.array([np.abs(whole[max(0, frame * hop - hop // 2) : frame * hop + hop // 2]).mean() for frame in range(frames)])
    for name, choose in (("quiet", np.argmin), ("loud", np.argmax)):
        around = [(second - 10, second + 10) for second in range(21, frames - 21, 21)]
        cuts = [0, *(low + int(choose(level[low:high])) for low, high in around), frames]
        for bridged in (False, True):
            wave = joined(codec, codes, sorted(set(cuts)), bridged=bridged)
            at = np.array(sorted(set(cuts))[1:-1]) * hop
            near = np.array([np.abs(np.diff(wave[cut - 1 : cut + round(BRIDGE_S * rate)])).max() for cut in at])
            join = np.abs(wave[at] - wave[at - 1])
            print(f"{name:>5} cuts, {'bridge' if bridged else 'plain ':6}: {len(at)} joins, step median {np.median(join):.0f}, "
                  f"largest {join.max()}; largest within 5 ms after {near.max()}")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
