"""Speed of one model in this process: time to first audio and real-time factor, one stream and several. Prints JSON.

    python benchmarks/first_audio.py [MODEL] [--repeats N] [--streams 1 4] [--output FILE]

First audio is from the call to the first chunk of samples; RTF is the time of a whole sentence over its duration, for
several streams the time until the last has ended over the sum of durations.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from duetts import TTS, __version__

SENTENCE = "The quick brown fox jumps over the lazy dog, and then it takes a rest."


def one(tts: TTS, seed: int, frames: int) -> tuple[float, float, float]:
    """Seconds to the first samples, to the last, and of audio."""
    start = time.perf_counter()
    first, samples = 0.0, 0
    for part in tts.stream(SENTENCE, seed=seed, max_new_tokens=frames):
        first = first or time.perf_counter() - start
        samples += len(part)
    return first, time.perf_counter() - start, samples / tts.sample_rate


def measure(tts: TTS, streams: int, repeats: int, frames: int) -> dict[str, float]:
    firsts, factors = [], []
    with ThreadPoolExecutor(streams) as pool:
        for repeat in range(repeats):
            start = time.perf_counter()
            runs = list(pool.map(lambda index, repeat=repeat: one(tts, 1000 * repeat + index, frames), range(streams)))
            factors.append((time.perf_counter() - start) / sum(run[2] for run in runs))
            firsts += [run[0] for run in runs]
    return {
        "streams": streams,
        "repeats": repeats,
        "first_audio_ms_median": round(1000 * statistics.median(firsts), 1),
        "first_audio_ms_worst": round(1000 * max(firsts), 1),
        "rtf_median": round(statistics.median(factors), 4),
        "rtf_worst": round(max(factors), 4),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", nargs="?", help="folder or hub id; duetts-mini if absent")
    arguments.add_argument("--repeats", type=int, default=10)
    arguments.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    arguments.add_argument("--frames", type=int, default=108, help="frames of each sentence, 21.5 a second")
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    with TTS(options.model) as tts:
        one(tts, 0, options.frames)
        results = [measure(tts, streams, options.repeats, options.frames) for streams in options.streams]
    report = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "duetts": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "frames": options.frames,
        "results": results,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
