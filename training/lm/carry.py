"""Gathers what stage 2 reads on another machine: `python -m training.lm.carry --stage1 DIR --out DIR`.

The codec without its decoder, the codes of the slow teacher's clips with the bytes that their frames speak (the fast one's
are made again there), the lines, and the fast teacher's wheels; with `--weights` also a language model to go on from.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from training.lm.encode import SOUND_ONLY
from training.lm.gather import BLENDS
from training.lm.gather import gather as gather_codes
from training.lm.state import PROGRESS
from training.report import say

MOST_BYTES = 62 << 20
WHEELS = ("hibari_tts-*.whl", "soxr-*.whl")


def gather(options: argparse.Namespace) -> None:
    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    for name in ("wheels", "codec", "codes"):
        (out / name).mkdir(parents=True)
    for pattern in WHEELS:
        for path in options.wheels.glob(pattern):
            shutil.copy(path, out / "wheels")
    shutil.copy(options.lines, out / "lines.txt.xz")
    tensors = load_file(options.stage1 / "codec.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith(SOUND_ONLY)}, out / "codec" / "codec.safetensors")
    gather_codes(list(options.stage1.glob("codes-*.safetensors")), out / "codes", options.kinds)
    if options.weights is not None:
        (out / "weights").mkdir()
        for path in (*options.weights.glob("model*"), options.weights / PROGRESS):
            shutil.copy(path, out / "weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage1", required=True, type=Path, help="folder with codec.safetensors and codes-*.safetensors")
    parser.add_argument("--out", required=True, type=Path, help="made anew")
    parser.add_argument("--wheels", type=Path, default=Path(".whl"))
    parser.add_argument("--lines", type=Path, default=Path(".carry/lines.txt.xz"))
    parser.add_argument("--kinds", nargs="+", default=BLENDS, help="whose codes travel; held-blend if blends are made again")
    parser.add_argument("--weights", type=Path, help="a run's export, to go on from")
    options = parser.parse_args()
    gather(options)
    size = 0
    for path in sorted(path for path in options.out.rglob("*") if path.is_file()):
        size += path.stat().st_size
        say(f"{path.stat().st_size / 1e6:8.2f} MB  {path.relative_to(options.out)}")
    say(f"{size / (1 << 20):.1f} MiB together")
    if size > MOST_BYTES:
        raise SystemExit(f"that is more than {MOST_BYTES >> 20} MiB")


if __name__ == "__main__":
    main()
