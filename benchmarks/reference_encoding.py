"""Time of encoding a reference clip whole and in blocks of several sizes. Prints JSON, one line a size.

    python benchmarks/reference_encoding.py [MODEL] [--s2-pro] [--device cuda] [--threads 1] [--blocks 4 8 16 22 32 54]

`--s2-pro` takes random weights of S2 Pro's dimensions. `host_ms` is the time until a block is issued, `block_ms` until it
is done; both are medians. Clips of 10 and 30 s are encoded once unmeasured, then three times; the fastest counts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from duetts.checkpoint import load_model, randomise_codec
from duetts.embedded import mini_folder
from duetts.engine.reference_encoder import ReferenceEncoder
from duetts.model_config import CodecConfig
from duetts.models.codec import Codec


def load(arguments: argparse.Namespace, device: torch.device) -> Codec:
    if not arguments.s2_pro:
        folder = Path(arguments.model) if arguments.model else mini_folder()
        return load_model(folder, device=device, dtype=torch.float32, codec_dtype=torch.float32).codec
    with torch.device("meta"):
        codec = Codec(CodecConfig())
    codec.to_empty(device=device)
    randomise_codec(codec, torch.Generator(device).manual_seed(0))
    return codec.requires_grad_(False).eval()


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds until the work is issued, and until it is done."""
    issued, done = [], []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        work()
        middle = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat:
            issued.append(1000 * (middle - start))
            done.append(1000 * (time.perf_counter() - start))
    return issued, done


def whole(codec: Codec, wave: torch.Tensor, device: torch.device) -> object:
    with torch.inference_mode():
        return codec.encode(wave.to(device)[None]).cpu()


def in_blocks(encoder: ReferenceEncoder, wave: torch.Tensor) -> object:
    future = encoder.submit(wave.numpy())
    while not future.done():
        encoder.step()
    return future.result()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", nargs="?", help="folder; duetts-mini if absent")
    arguments.add_argument("--s2-pro", action="store_true")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--blocks", type=int, nargs="+", default=[4, 8, 16, 22, 32, 54])
    given = arguments.parse_args()
    device = torch.device(given.device)
    torch.set_num_threads(given.threads)
    torch.backends.cudnn.allow_tf32 = False
    codec = load(given, device)
    start = time.perf_counter()
    codec.encoding_id()
    conditions = {"device": str(device), "torch": torch.__version__, "threads": given.threads, "s2_pro": given.s2_pro}
    print(json.dumps({**conditions, "encoding_id_ms": round(1000 * (time.perf_counter() - start), 1)}))
    generator = torch.Generator().manual_seed(1)
    clips = {seconds: 0.1 * torch.randn(seconds * codec.config.sample_rate, generator=generator) for seconds in (10, 30)}
    row: dict[str, object] = {"block": "whole"}
    for seconds, wave in clips.items():
        row[f"clip_{seconds}s_ms"] = round(min(timed(partial(whole, codec, wave, device), device, 3)[1]), 1)
    print(json.dumps(row), flush=True)
    for block in given.blocks:
        encoder = ReferenceEncoder(codec, max_waiting=2, block_frames=block)
        row = {"block": block}
        for seconds, wave in clips.items():
            row[f"clip_{seconds}s_ms"] = round(min(timed(partial(in_blocks, encoder, wave), device, 3)[1]), 1)
        encoder.submit(clips[30].numpy())
        issued, done = timed(encoder.step, device, min(20, 640 // block - 1))
        row |= {"host_ms": round(statistics.median(issued), 2), "block_ms": round(statistics.median(done), 2)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
