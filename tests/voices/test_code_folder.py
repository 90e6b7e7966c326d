"""Codes on disk: whole or absent, within a bound, whoever else writes, and never in the way."""

import hashlib
import logging
import os
import random
import stat
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duetts.types import Int32
from duetts.voices.code_folder import DISK_BLOCK, CodeFolder

ROOMY = 1 << 30
UNHURRIED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def codes_of(name: str, frames: int = 20) -> Int32:
    """Codes that follow from a key, so that a mistaken one is noticed."""
    return np.random.default_rng(int(name[:8], 16)).integers(0, 4096, (10, frames)).astype(np.int32)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def used(folder: Path) -> int:
    return sum(-(-path.stat().st_size // DISK_BLOCK) * DISK_BLOCK for path in files(folder))


@given(books=st.integers(1, 10), frames=st.integers(1, 700), highest=st.sampled_from([0, 4095, 32767]), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None, suppress_health_check=UNHURRIED)
def test_what_is_written_is_read(tmp_path: Path, books: int, frames: int, highest: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, highest + 1, (books, frames)).astype(np.int32)
    folder = CodeFolder(tmp_path / "references", "codec", ROOMY)
    folder.write(key(1), codes)
    found = CodeFolder(tmp_path / "references", "codec", ROOMY).read(key(1))
    assert found is not None
    assert found.dtype == np.int32
    assert np.array_equal(found, codes)
    assert folder.read(key(2)) is None


def test_another_codec_finds_nothing(tmp_path: Path) -> None:
    CodeFolder(tmp_path, "one", ROOMY).write(key(1), codes_of(key(1)))
    assert CodeFolder(tmp_path, "two", ROOMY).read(key(1)) is None


def test_a_file_holds_codes_and_nothing_else_and_is_its_owners(tmp_path: Path) -> None:
    CodeFolder(tmp_path / "references", "codec", ROOMY).write(key(1), codes_of(key(1), 216))
    (path,) = files(tmp_path)
    assert path == tmp_path / "references" / "codec" / f"{key(1)}.safetensors"
    content = safetensors.numpy.load(path.read_bytes())
    assert content.keys() == {"codes", "sha256"}
    assert content["codes"].dtype == np.int16
    assert path.stat().st_size < 4600  # 10 s: 4,320 bytes of codes
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(path.parents[1].stat().st_mode) == 0o700


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=UNHURRIED)
def test_damage_counts_as_absence(tmp_path: Path, data: st.DataObject) -> None:
    folder = CodeFolder(tmp_path, "codec", ROOMY)
    name = key(1)
    folder.write(name, codes_of(name))
    path = tmp_path / "codec" / f"{name}.safetensors"
    whole = path.read_bytes()
    match data.draw(st.sampled_from(["cut", "longer", "flipped", "replaced"])):
        case "cut":
            damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
        case "longer":
            damaged = whole + data.draw(st.binary(min_size=1, max_size=20))
        case "flipped":
            at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
            damaged = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
        case _:
            damaged = data.draw(st.binary(max_size=300))
    path.write_bytes(damaged)
    found = folder.read(name)
    if found is None:
        assert not path.exists()
    else:  # a bit of the file that says nothing, if there is one
        assert np.array_equal(found, codes_of(name))
    folder.write(name, codes_of(name))
    assert folder.read(name) is not None


@pytest.mark.parametrize(
    "content",
    [
        {"codes": np.zeros((10, 4), np.int16)},
        {"codes": np.zeros((10, 4), np.int32), "sha256": np.zeros(32, np.uint8)},
        {"codes": np.zeros(4, np.int16), "sha256": np.zeros(32, np.uint8)},
        {"codes": np.zeros((10, 4), np.int16), "sha256": np.zeros((2, 16), np.float32)},
    ],
    ids=["no checksum", "other type", "one row", "odd checksum"],
)
def test_other_tensors_are_damage(tmp_path: Path, content: dict[str, np.ndarray]) -> None:
    folder = CodeFolder(tmp_path, "codec", ROOMY)
    path = tmp_path / "codec" / f"{key(1)}.safetensors"
    path.parent.mkdir()
    path.write_bytes(safetensors.numpy.save(content))
    assert folder.read(key(1)) is None
    assert not path.exists()


def test_a_file_under_anothers_name_is_damage(tmp_path: Path) -> None:
    folder = CodeFolder(tmp_path, "codec", ROOMY)
    folder.write(key(1), codes_of(key(1)))
    os.rename(tmp_path / "codec" / f"{key(1)}.safetensors", tmp_path / "codec" / f"{key(2)}.safetensors")
    assert folder.read(key(2)) is None


def test_the_least_lately_used_go_of_all_codecs(tmp_path: Path) -> None:
    bound = 10 * DISK_BLOCK  # of which a clearing leaves 9
    old, own = CodeFolder(tmp_path, "old", bound), CodeFolder(tmp_path, "own", bound)
    for number in range(9):  # 0 to 2 of the old codec, the others of the own; each older than the one before it
        folder = old if number < 3 else own
        folder.write(key(number), codes_of(key(number)))
        age_s = (1000 if folder is old else 100) + number
        path = tmp_path / ("old" if folder is old else "own") / f"{key(number)}.safetensors"
        os.utime(path, (time.time() - age_s,) * 2)
    assert len(files(tmp_path)) == 9
    assert own.read(key(8)) is not None  # the oldest of its own, which a read renews
    for number in range(100, 106):
        own.write(key(number), codes_of(key(number)))
        assert used(tmp_path) <= bound
    assert not (tmp_path / "old").exists()
    assert {number for number in range(3, 9) if own.read(key(number)) is None} == {7, 6, 5}
    assert all(own.read(key(number)) is not None for number in range(100, 106))


def test_a_bound_below_one_file_keeps_none(tmp_path: Path) -> None:
    folder = CodeFolder(tmp_path, "codec", 1)
    for number in range(3):
        folder.write(key(number), codes_of(key(number)))
    assert used(tmp_path) <= DISK_BLOCK


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "codec").mkdir()
    dead, alive = tmp_path / "codec" / ".writing-a", tmp_path / "codec" / ".writing-b"
    for path in (dead, alive):
        path.write_bytes(b"half")
    os.utime(dead, (time.time() - 7200,) * 2)
    CodeFolder(tmp_path, "codec", ROOMY).write(key(1), codes_of(key(1)))
    assert not dead.exists()
    assert alive.exists()


def test_a_folder_that_cannot_be_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "references").write_text("a file where the folder should be")
    folder = CodeFolder(tmp_path / "references", "codec", ROOMY)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            folder.write(key(number), codes_of(key(number)))
            assert folder.read(key(number)) is None
    assert len(caplog.records) == 1


FULL = """
import resource, sys
import numpy as np
from pathlib import Path
from duetts.voices.code_folder import CodeFolder
folder = CodeFolder(Path(sys.argv[1]), "codec", 1 << 30)
codes = np.zeros((10, 200), np.int32)
folder.write("early", codes)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for name in ("a", "b"):
    folder.write(name, codes)
    assert folder.read(name) is None
assert np.array_equal(folder.read("early"), codes)
"""


def test_a_full_disk_is_said_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The system refuses to write more than 1,000 bytes into a file, as it does on a full disk."""
    result = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("cannot be kept on disk") == 1
    assert [path.name for path in files(tmp_path)] == ["early.safetensors"]


def write_and_read(folder: Path, seed: int, max_bytes: int) -> int:
    """Writes and reads keys that other processes use too; the number of reads that found something."""
    own, rng, found = CodeFolder(folder, f"codec{seed % 2}", max_bytes), random.Random(seed), 0
    for _ in range(150):
        name = key(rng.randrange(30))
        codes = own.read(name)
        if codes is None:
            own.write(name, codes_of(name))
        else:
            assert np.array_equal(codes, codes_of(name))
            found += 1
    return found


def test_processes_share_a_folder(tmp_path: Path) -> None:
    bound, processes = 16 * DISK_BLOCK, 3
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(write_and_read, [tmp_path] * processes, range(processes), [bound] * processes))
    assert all(found)
    assert all(path.suffix == ".safetensors" for path in files(tmp_path))
    assert used(tmp_path) <= bound + processes * bound // 16
