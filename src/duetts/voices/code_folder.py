"""Codes of reference clips on disk: one small file a clip, shared by processes, within a bound. No audio and no text.

A file that is damaged counts as absent and goes. A disk that cannot be written or read is said once in the log, and the
codes are made again instead.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from duetts.types import Int32

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
UNFINISHED = ".writing-"
UNFINISHED_S = 3600.0  # after this a file that was never completed belongs to a process that died
DISK_BLOCK = 4096  # bytes; what the smallest file takes
HEADROOM = 16  # a sixteenth of the bound is free after a clearing, so that not every new file needs one


class CodeFolder:
    """The codes that one codec made, `folder / codec_id / key.safetensors`. Any thread and any number of processes.

    All codecs share the bound, so that those of weights that are gone make room in the end: the files that were not used
    for longest go first, by modification time, which a read renews. Each process counts what it writes and looks at the
    whole folder after every sixteenth of the bound, so n processes may exceed it by n - 1 sixteenths for a while.
    """

    def __init__(self, folder: Path, codec_id: str, max_bytes: int) -> None:
        self._folder = folder
        self._own = folder / codec_id
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._unchecked = max_bytes  # bytes written since the folder was looked at; at first nobody has
        self._complained = False

    def read(self, key: str) -> Int32 | None:
        """Codes [codebooks, frames] of a key, if they are there and whole."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(error)
            return None
        codes = parse_codes(key, content)
        with suppress(OSError):
            if codes is None:
                log.warning("the reference codes %s are damaged and will be made again", path.name)
                path.unlink()
            else:
                os.utime(path)
        return codes

    def write(self, key: str, codes: Int32) -> None:
        """Keeps codes, whole or not at all, and makes room."""
        content = compose_codes(key, codes)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a voice is its speaker's own
            self._own.mkdir(mode=0o700, exist_ok=True)
            self._place(content, self._path(key))
        except OSError as error:
            self._complain(error)
            return
        with self._lock:
            self._unchecked += _disk_size(len(content))
            if self._unchecked * HEADROOM > self._max_bytes:
                self._unchecked = 0
                self._clear()

    def _path(self, key: str) -> Path:
        return self._own / f"{key}{SUFFIX}"

    def _place(self, content: bytes, path: Path) -> None:
        handle, name = tempfile.mkstemp(dir=self._own, prefix=UNFINISHED)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except OSError:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _clear(self) -> None:
        """Removes what was not used for longest beyond the bound, and what dead processes left. Others may remove as well."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        allowed = self._max_bytes - self._max_bytes // HEADROOM
        for _, size, path in files if total > self._max_bytes else []:
            if total <= allowed:
                break
            with suppress(OSError):
                path.unlink()
            total -= size
        for folder in {path.parent for _, _, path in files} - {self._own}:
            with suppress(OSError):  # it is not empty, as a rule
                folder.rmdir()

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """When each file was last used, its bytes on disk and its path."""
        for path in self._paths():
            with suppress(OSError):
                status = path.stat()
                if path.suffix == SUFFIX:
                    yield status.st_mtime, _disk_size(status.st_size), path
                elif path.name.startswith(UNFINISHED) and time.time() - status.st_mtime > UNFINISHED_S:
                    path.unlink()

    def _paths(self) -> Iterator[Path]:
        """What lies in the codecs' folders, any of which another process may remove at this moment."""
        with suppress(OSError):
            for folder in list(self._folder.iterdir()):
                with suppress(OSError):
                    yield from list(folder.iterdir())

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            log.warning("reference codes cannot be kept on disk: %s", error)


def _disk_size(num_bytes: int) -> int:
    return -(-num_bytes // DISK_BLOCK) * DISK_BLOCK


def _checksum(key: str, codes: np.ndarray) -> np.ndarray:
    """uint8 [32]. The key is in it, so that a file under another's name is no one's."""
    digest = hashlib.sha256(f"{key} {codes.shape}".encode() + codes.astype("<i2").tobytes()).digest()
    return np.frombuffer(digest, np.uint8)


def compose_codes(key: str, codes: Int32) -> bytes:
    """The content of a file of codes [codebooks, frames], which says of what they are."""
    assert not (codes >> 15).any(), "a code does not fit 15 bits"
    narrow = codes.astype(np.int16)
    return safetensors.numpy.save({"codes": narrow, "sha256": _checksum(key, narrow)})


def parse_codes(key: str, content: bytes) -> Int32 | None:
    """The codes in a file's content, if they are whole and those of the key."""
    try:
        found = safetensors.numpy.load(content)
        codes, checksum = found["codes"], found["sha256"]
    except (SafetensorError, KeyError, ValueError, TypeError):
        return None
    if codes.dtype != np.int16 or codes.ndim != 2 or not np.array_equal(checksum, _checksum(key, codes)):
        return None
    return codes.astype(np.int32)
