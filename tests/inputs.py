"""The trial inputs: clips, texts and request bodies with the outcome that each must have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INPUTS = Path(__file__).parent / "data" / "inputs"
REF_TEXT = (INPUTS / "ref_text.txt").read_text(encoding="utf-8").strip()

# The code of every clip that is refused; all others are accepted.
REFUSED_CLIPS = {
    "zero_length.wav": "reference_undecodable",
    "text_named.wav": "reference_undecodable",
    "rate_zero.wav": "reference_undecodable",
    "nan_inf.wav": "reference_undecodable",
    "sixty_seconds.mp3": "reference_too_long",
    "one_hour_small_file.flac": "reference_too_long",
    "fifth_of_a_second.wav": "reference_too_short",
    "silent.wav": "reference_silent",
}


def clips() -> list[dict[str, Any]]:
    """The manifest's rows of audio files: `file`, `seconds` and more."""
    rows = json.loads((INPUTS / "manifest.json").read_text(encoding="utf-8"))["files"]
    return [row for row in rows if row["kind"] == "audio"]


def clip(name: str) -> bytes:
    return (INPUTS / "audio" / name).read_bytes()
