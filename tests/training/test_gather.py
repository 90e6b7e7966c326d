"""Codes of many shards travel in few files, each clip with the bytes that its frames speak."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training.codec.codes import CodedClip, read_codes, write_codes
from training.lm import gather as room
from training.lm.encode import PLACES


def shard(folder: Path, name: str, kind: str, numbers: range, *, places: bool = True) -> None:
    rng = np.random.default_rng(numbers.start)
    clips = [CodedClip(kind, number, rng.integers(512, size=(8, 5 + number)).astype(np.int16)) for number in numbers]
    write_codes(folder / f"{name}.safetensors", clips)
    if places:
        np.save(folder / f"{name}{PLACES}", np.concatenate([np.full(5 + number, number, np.int16) for number in numbers]))


@pytest.mark.parametrize("limit", [room.FILE_BYTES, 200])
def test_wanted_kinds_arrive_with_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(room, "FILE_BYTES", limit)
    shard(tmp_path, "blend-00000", "blend", range(3))
    shard(tmp_path, "heart-00000", "heart", range(3, 5))
    shard(tmp_path, "held-blend-00000", "held-blend", range(5, 7), places=False)
    files = list(tmp_path.glob("*.safetensors"))
    hours = room.gather(files, tmp_path / "out", room.BLENDS)
    assert hours == pytest.approx((5 + 6 + 7 + 10 + 11) * 2048 / 44100 / 3600)
    found = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(found) > 1) == (limit == 200)
    seen = {}
    for path in found:
        clips = list(read_codes(path))
        places = np.load(path.with_name(path.stem + PLACES))
        ends = np.cumsum([clip.codes.shape[1] for clip in clips])
        assert len(places) == ends[-1]
        for clip, own in zip(clips, np.split(places, ends[:-1]), strict=True):
            seen[clip.kind, clip.number] = set(own.tolist())
    assert seen == {("blend", 0): {0}, ("blend", 1): {1}, ("blend", 2): {2}, ("held-blend", 5): {-1}, ("held-blend", 6): {-1}}
