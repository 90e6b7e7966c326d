"""Object stores for tests: fsspec's own memory, a folder that behaves like one, and S3 as moto answers it."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fsspec import register_implementation
from fsspec.config import conf
from fsspec.implementations.local import LocalFileSystem

from duetts.voices.bucket import Bucket

KINDS = ["memory", "shelf", pytest.param("s3", marks=pytest.mark.slow)]


class Shelf(LocalFileSystem):
    """Files of a folder, written whole or not at all, as objects are, also by a process that is killed."""

    protocol = "shelf"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        path = self._strip_protocol(path)
        handle, aside = tempfile.mkstemp(dir=tempfile.gettempdir())
        try:
            os.write(handle, value)
            if mode == "create":
                os.link(aside, path)
            else:
                os.replace(aside, path)
        finally:
            os.close(handle)
            Path(aside).unlink(missing_ok=True)


register_implementation("shelf", Shelf, clobber=True)


@contextmanager
def a_bucket(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty folder in a store of this kind."""
    if kind == "memory":
        yield f"memory://{uuid.uuid4().hex}/voices"
    elif kind == "shelf":
        (folder / "bucket").mkdir()
        yield f"shelf://{folder}/bucket/voices"
    else:
        with s3() as url:
            yield url


@contextmanager
def s3() -> Iterator[str]:
    """A bucket of a moto server on loopback."""
    if find_spec("s3fs") is None or find_spec("moto") is None:
        pytest.skip("s3fs and moto[server] are not installed")
    import s3fs

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    variables["FSSPEC_S3_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"  # for processes that are started from here
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setitem(conf, "s3", {"endpoint_url": f"http://127.0.0.1:{port}"})
            s3fs.S3FileSystem().mkdir("bucket")
            yield "s3://bucket/voices"
    finally:
        server.kill()
        server.wait()


class Killed(BaseException):
    """A process that ends here: nothing catches it."""


class Between(Bucket):
    """A bucket of which something happens before one of its operations: the n-th, from 0."""

    def __init__(self, url: str, number: int, happening: Callable[[], None]) -> None:
        super().__init__(url)
        self.count, self._number, self._happening = 0, number, happening

    def _pass(self) -> None:
        self.count += 1
        if self.count == self._number + 1:
            self._happening()

    def read(self, name: str) -> bytes:
        self._pass()
        return super().read(name)

    def write(self, name: str, content: bytes) -> None:
        self._pass()
        super().write(name, content)

    def create(self, name: str, content: bytes) -> bool:
        self._pass()
        return super().create(name, content)

    def remove(self, names: Any) -> None:
        for name in names:  # each is an operation of its own
            self._pass()
            super().remove([name])

    def items(self, below: str = "") -> Any:
        self._pass()
        return super().items(below)
