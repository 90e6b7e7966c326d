"""Fixtures that several rooms share."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
import torch

from duetts.embedded import write_random_checkpoint

from .server.real import Served, serve
from .tiny import TINY

# Triton reads this once, when it is first imported: without a GPU, kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Whether an example takes 0.2 s, and how long it takes to make one, is the machine's affair, also in tests that do not say so.
# The same examples in every run, so that a change is judged by itself; `--hypothesis-profile curious` looks for others.
PATIENT = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("curious", PATIENT)
hypothesis.settings.register_profile("patient", PATIENT, derandomize=True)
hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    write_random_checkpoint(folder, TINY)
    return folder


@pytest.fixture(scope="session")
def tiny_served(tiny_folder: Path) -> Iterator[Served]:
    """A server of the tiny model, for all tests that leave it as it was."""
    yield from serve(tiny_folder, max_queue=100)


@pytest.fixture(scope="session")
def endless_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without an end: every utterance runs to its bound.

    The end's logit is 0. Among 64 choices it is out of reach only if the others are spread widely, hence the large weights.
    """
    folder = tmp_path_factory.mktemp("endless-model")
    write_random_checkpoint(folder, replace(TINY, end_scale=0.0, std=1.0))
    return folder


@pytest.fixture(autouse=True, scope="session")
def hearing() -> None:
    """What a shell runs in its background is deaf to SIGINT, and so are its children; some tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing that tests make lands in the user's cache, or among the user's voices."""
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("DUETTS_CACHE_DIR", str(folder))
    patch.setenv("DUETTS_VOICES_DIR", str(folder / "voices"))
    yield folder
    patch.undo()
