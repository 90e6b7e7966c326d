"""A complete duetts-mini folder: `python -m training.export_lm --weights DIR --codec DIR --out FOLDER`.

Both parts in bf16, each in one file, with everything that `duetts say --model FOLDER` reads. The result is loaded once.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from duetts.checkpoint import load_model
from duetts.text.byte_level import write_byte_tokenizer
from training.lm.state import read_weights
from training.recipe import CODEC, PIECES, SAMPLING, language_model_values
from training.report import say

MOST_BYTES = 45_000_000


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def export(weights: Path, codec: Path, out: Path) -> int:
    """Writes the folder; returns the bytes of its two weight files."""
    out.mkdir(parents=True, exist_ok=True)
    tokens = write_byte_tokenizer(out / "tokenizer.json", int(CODEC["semantic_codebook_size"]))
    write_json(out / "config.json", language_model_values(tokens))
    write_json(out / "codec_config.json", CODEC)
    write_json(out / "generation_config.json", {**SAMPLING, **PIECES})
    save_file(read_weights(weights), out / "model.safetensors", {"format": "pt"})
    sound = {name: value for path in sorted(codec.glob("codec*.safetensors")) for name, value in load_file(path).items()}
    save_file({name: value.bfloat16() for name, value in sound.items()}, out / "codec.safetensors", {"format": "pt"})
    load_model(out, device=torch.device("cpu"), dtype=torch.float32, codec_dtype=torch.float32)
    return sum((out / name).stat().st_size for name in ("model.safetensors", "codec.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", required=True, type=Path, help="folder with model*.safetensors of a run")
    parser.add_argument("--codec", required=True, type=Path, help="folder with codec*.safetensors")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    size = export(options.weights, options.codec, options.out)
    say(f"{options.out}: {size / 1e6:.2f} MB of weights")
    if size > MOST_BYTES:
        raise SystemExit(f"that is more than {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
