"""Puts a trained model into the package: `python -m training.ship MODEL --presets DIR [--gates judged/gates.json]`.

MODEL is a folder of `training.export_lm`, presets are clips of `training.judge.originals`. All is checked before anything
is replaced: dimensions and weights (by loading them), their size, and every preset (its clip is encoded once and its codes ship
beside it, so that nothing is ever written into the package). With `--gates` alone the card's table is filled anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from duetts.audio.decode import decode_audio
from duetts.checkpoint import load_model
from duetts.embedded import SHIPPED, SUMS, check_sums
from duetts.models.codec import Codec
from duetts.types import Voice
from duetts.voices.store import RECORD, VoiceStore, read_presets
from training.export_lm import MOST_BYTES
from training.judge.gates import Finding, table
from training.judge.references import read_wave, write_opus
from training.judge.sets import ORIGINAL, Line, read_json, read_lines
from training.report import say

LICENCE = Path(__file__).parents[1] / "LICENSE"
WEIGHTS = ("model.safetensors", "codec.safetensors")
FILES = ("config.json", "codec_config.json", "generation_config.json", "tokenizer.json", *WEIGHTS)
CARD, NOTICE, VOICES = "README.md", "NOTICE", "voices"
BIT_RATE = 64_000
MOST_VOICES, MOST_VOICE_BYTES = 99, 10 << 20
TABLE = re.compile(r"(<!-- gates: [^>]*-->\n).*?(<!-- end of gates -->)", re.DOTALL)
CREATED = 1795996800  # seconds since 1970, of every preset: a package made twice is the same


def check_weights(model: Path) -> Codec:
    """Loads everything; returns the codec. Raises `SystemExit` for what must not ship."""
    missing = [name for name in FILES if not (model / name).is_file()]
    if missing:
        raise SystemExit(f"{model} lacks {', '.join(missing)}")
    if read_json(model / "config.json").get("untrained"):
        raise SystemExit("these weights say of themselves that they are not trained")
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if size > MOST_BYTES:
        raise SystemExit(f"{size / 1e6:.1f} MB of weights are more than {MOST_BYTES / 1e6:.0f} MB")
    say(f"{size / 1e6:.1f} MB of weights")
    return load_model(model, device=torch.device("cpu"), dtype=torch.float32, codec_dtype=torch.float32).codec


def place_preset(store: VoiceStore, clips: Path, line: Line, codec: Codec, *, default: bool) -> None:
    """One voice as an Opus clip, its transcript and its codes."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "clip.opus"
        write_opus(path, *read_wave(clips / f"{line.name}-{ORIGINAL}.wav"), bit_rate=BIT_RATE)
        audio = path.read_bytes()
    rate = codec.config.sample_rate
    samples = decode_audio(audio, rate=rate, min_s=1, max_s=30, field=line.name)
    with torch.inference_mode():
        codes = codec.encode(torch.from_numpy(samples)[None])[0].numpy().astype(np.int32)
    voice = Voice(line.name, line.text, CREATED, len(samples) / rate, len(audio), "audio/ogg", "preset",
                  description="synthetic", language="en")  # fmt: skip
    stored = store.add(voice, audio, codec.encoding_id(), codes, replace=False)
    record = stored.folder / RECORD
    values: dict[str, Any] = {**read_json(record), "default": default}
    record.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def fill_card(card: Path, gates: Path | None) -> None:
    """Writes the table of gates between its two marks."""
    if gates is None:
        return
    rows = read_json(gates)["gates"]
    findings = [Finding(**{key: value for key, value in row.items() if key != "passed"}) for row in rows]
    text, count = TABLE.subn(lambda marks: f"{marks[1]}{table(findings)}\n{marks[2]}", card.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"{card} has {count} places for the table of gates; one is needed")
    card.write_text(text, encoding="utf-8")


def write_sums(folder: Path) -> None:
    """The sums of everything that speaking needs; words about it may change."""
    wanted = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (CARD, NOTICE, SUMS, "LICENSE"))
    rows = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n" for path in wanted]
    (folder / SUMS).write_text("".join(rows), encoding="utf-8")


def assemble(model: Path, clips: Path, default: str, folder: Path) -> None:
    """The whole folder, but for words about it. Raises `SystemExit` for what must not ship."""
    codec = check_weights(model)
    lines = read_lines(clips)
    if default and default not in [line.name for line in lines]:
        raise SystemExit(f"there is no preset {default!r}")
    for name in FILES:
        shutil.copyfile(model / name, folder / name)
    store = VoiceStore(folder / VOICES, MOST_VOICES, MOST_VOICE_BYTES)
    for line in lines:
        place_preset(store, clips, line, codec, default=line.name == default)
    (folder / VOICES).chmod(0o755)
    say(f"presets: {', '.join(stored.voice.name for stored in read_presets(folder / VOICES))}")
    write_sums(folder)


def ship(model: Path, clips: Path, default: str, into: Path) -> None:
    """Assembles the folder aside, then puts its files into place; the sums come last, and with them the model counts."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name)
        assemble(model, clips, default, fresh)
        (into / SUMS).unlink(missing_ok=True)
        shutil.rmtree(into / VOICES, ignore_errors=True)
        shutil.copytree(fresh / VOICES, into / VOICES)
        for file in (*FILES, SUMS):
            shutil.copyfile(fresh / file, into / file)
    shutil.copyfile(LICENCE, into / "LICENSE")
    check_sums(into)
    say(f"{into}: {sum(path.stat().st_size for path in into.rglob('*') if path.is_file()) / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="folder of training.export_lm; without it only the card is filled")
    parser.add_argument("--presets", type=Path, help="clips of training.judge.originals")
    parser.add_argument("--default", default="heart", help="the preset that speaks if nobody names one")
    parser.add_argument("--gates", type=Path, help="gates.json of training.judge, for the card")
    parser.add_argument("--into", type=Path, default=SHIPPED)
    options = parser.parse_args()
    if options.model is not None:
        if options.presets is None:
            parser.error("--presets is needed with a model")
        ship(options.model, options.presets, options.default, options.into)
    fill_card(options.into / CARD, options.gates)


if __name__ == "__main__":
    main()
