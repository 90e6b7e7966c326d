"""The folder of reference outputs: `DUETTS_GOLDEN_DIR`, or the repository's copy."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return Path(os.environ.get("DUETTS_GOLDEN_DIR") or Path(__file__).parents[1] / "data" / "golden")
