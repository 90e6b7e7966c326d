"""Clips on disk: a shard is a folder with flat int16 samples, flat labels and one JSON line per clip.

A shard appears under its final name only when it is whole, so a trainer may read while a generator writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training.data.clips import Clip


@dataclass(frozen=True, slots=True)
class Shard:
    """Memory-mapped samples and labels of many clips and where each clip lies."""

    samples: np.ndarray
    labels: np.ndarray
    clips: list[dict[str, Any]]  # start and length in samples, speaker, texts, symbols, ends_ms


def write_shard(folder: Path, name: str, clips: list[Clip]) -> None:
    partial = folder / f".{name}"
    partial.mkdir(parents=True, exist_ok=True)
    np.save(partial / "samples.npy", np.concatenate([clip.samples for clip in clips]))
    np.save(partial / "labels.npy", np.concatenate([clip.labels for clip in clips]))
    start = 0
    with (partial / "clips.jsonl").open("w", encoding="utf-8") as file:
        for clip in clips:
            file.write(json.dumps(_describe(clip, start), ensure_ascii=False) + "\n")
            start += len(clip.samples)
    partial.rename(folder / name)


def _describe(clip: Clip, start: int) -> dict[str, Any]:
    return {
        "number": clip.row.number,
        "speaker": clip.row.speaker.name,
        "texts": list(clip.row.texts),
        "start": start,
        "length": len(clip.samples),
        "symbols": clip.symbols,
        "ends_ms": np.round(clip.ends_s * 1000).astype(int).tolist(),
    }


def list_shards(folder: Path) -> list[Path]:
    """Whole shards, by name."""
    return sorted(path for path in folder.glob("[!.]*") if (path / "clips.jsonl").exists())


def read_shard(path: Path) -> Shard:
    lines = (path / "clips.jsonl").read_text(encoding="utf-8").splitlines()
    return Shard(
        np.load(path / "samples.npy", mmap_mode="r"),
        np.load(path / "labels.npy", mmap_mode="r"),
        [json.loads(line) for line in lines],
    )
