"""How many cores are counted, and that what only Linux has is asked of Linux only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from duetts import doctor
from duetts.audio.encode import open_encoder
from duetts.cores import usable_cores


@pytest.mark.parametrize(
    ("told", "most"),
    [("max 100000\n", 64), ("200000 100000\n", 2), ("150000 100000\n", 2), ("20000 100000\n", 1), ("9900000 100000\n", 64),
     ("", 64), ("nonsense\n", 64), ("0 0 0", 64)],
)  # fmt: skip
def test_a_container_s_limit_counts(told: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    if sys.platform == "linux":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    quota = tmp_path / "cpu.max"
    quota.write_text(told)
    assert usable_cores(quota) == most


def test_without_a_limit_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "absent") == (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count())


@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is not here")
def test_a_process_held_to_one_core_knows_it() -> None:
    code = "from duetts.cores import usable_cores; print(usable_cores())"
    core = str(min(os.sched_getaffinity(0)))
    told = subprocess.run(["taskset", "-c", core, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "1\n"


def test_other_systems_have_no_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    assert usable_cores(tmp_path / "absent") == os.cpu_count()
    encoder = open_encoder("mp3", 44100)
    assert encoder.write(bytes(88200)) + encoder.finish()


def test_other_systems_tell_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._free_host_bytes() > 0
    monkeypatch.setattr(Path, "read_text", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    assert doctor._free_host_bytes() > 1 << 28
