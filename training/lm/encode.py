"""Audio shards to codes as they appear: `python -m training.lm.encode --audio DIR --codec DIR --out DIR`.

Beside the codes of a shard lies the byte of the text that each frame speaks. Audio that has become codes can be deleted;
its folder stays, so that the generator does not make it again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from duetts.models.codec import Codec
from training.codec.codes import CodedClip, encode_shard, write_codes
from training.data.shards import list_shards, read_shard
from training.lm.alignment import frame_bytes
from training.recipe import FRAME, SAMPLE_RATE, codec_config
from training.report import say

PLACES = ".places.npy"
SOUND_ONLY = ("decoder.", "quantizer.post_module.", "quantizer.upsample.")  # what encoding does without


def load_encoder(folder: Path, device: torch.device) -> Codec:
    """The codec for encoding: a folder may lack the tensors that only decoding needs."""
    codec = Codec(codec_config())
    tensors = {}
    for path in sorted(folder.glob("codec*.safetensors")):
        tensors.update(load_file(path))
    missing, unknown = codec.load_state_dict({name: value.float() for name, value in tensors.items()}, strict=False)
    lost = [name for name in missing if not name.startswith(SOUND_ONLY)]
    if lost or unknown:
        raise SystemExit(f"{folder}: missing {lost[:3]}, unknown {unknown[:3]}")
    return codec.to(device).requires_grad_(False).eval()


def places_of(path: Path, clips: list[CodedClip]) -> np.ndarray:
    """int16: for the frames of all clips in a row, the byte being spoken; -1 where texts and sounds do not fit."""
    rows = {clip["number"]: clip for clip in read_shard(path).clips}
    parts = []
    for clip in clips:
        row, frames = rows[clip.number], clip.codes.shape[1]
        try:
            parts.append(frame_bytes(" ".join(row["texts"]), row["symbols"], np.array(row["ends_ms"]) / 1000, frames))
        except ValueError:
            parts.append(np.full(frames, -1, np.int16))
    return np.concatenate(parts)


def encode(codec: Codec, path: Path, out: Path, device: torch.device) -> int:
    """Writes the codes of one shard; returns the number of frames."""
    clips = encode_shard(codec, path, device)
    np.save(out / f"{path.name}{PLACES}", places_of(path, clips))
    partial = out / f".{path.name}"
    write_codes(partial, clips)
    partial.rename(out / f"{path.name}.safetensors")
    return sum(clip.codes.shape[1] for clip in clips)


def delete_audio(path: Path) -> None:
    for name in ("clips.jsonl", "samples.npy", "labels.npy"):
        (path / name).unlink()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audio", required=True, help="folder of shards")
    parser.add_argument("--codec", required=True, help="folder with codec.safetensors")
    parser.add_argument("--out", required=True)
    parser.add_argument("--delete", action="store_true", help="delete audio that has become codes")
    parser.add_argument("--once", action="store_true", help="end when no shard is left; otherwise wait for more")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after this long, whatever is left")
    parser.add_argument("--until", help="end when this file exists and no shard is left")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    options = parse()
    device, audio, out = torch.device(options.device), Path(options.audio), Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    codec = load_encoder(Path(options.codec), device)
    frames, busy_s, told = 0, 0.0, time.monotonic()
    end = told + 60 * options.minutes
    while True:
        last = options.once or (options.until is not None and Path(options.until).exists())
        shards = [path for path in list_shards(audio) if not (out / f"{path.name}.safetensors").exists()]
        for path in shards:
            started = time.monotonic()
            if started > end:
                shards, last = [], True
                break
            frames += encode(codec, path, out, device)
            if options.delete:
                delete_audio(path)
            busy_s += time.monotonic() - started
        if (shards and time.monotonic() - told > 60) or (last and not shards):
            hours = frames * FRAME / SAMPLE_RATE / 3600
            say(f"codes of {hours:.1f} h so far, {hours * 3600 / max(busy_s, 1e-9):.0f} x real time")
            told = time.monotonic()
        if last and not shards:
            return
        time.sleep(0 if shards else 1)


if __name__ == "__main__":
    main()
