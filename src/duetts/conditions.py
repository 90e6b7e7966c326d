"""The circumstances of a measurement, and the file that it is written to: versions, commit, machine, card. Measures nothing."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CARD_FIELDS = "name,driver_version,memory.used,clocks.sm,clocks.mem,power.draw,temperature.gpu"


def program() -> dict[str, Any]:
    """Versions, commit and machine of this process."""
    names = ("duetts", "torch", "triton", "numpy", "uvloop")
    return {
        "versions": {name: _version(name) for name in names} | {"python": platform.python_version()},
        "commit": commit(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "program": Path(sys.argv[0]).name,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Of the working tree that this file lies in, with a mark if something in it was changed. None outside of one."""
    folder = str(Path(__file__).parent)
    found = _output("git", "-C", folder, "rev-parse", "HEAD")
    changed = _output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no", ".") if found else None
    return f"{found} with changes" if found and changed else found


def card() -> list[str] | None:
    """What the driver tells of each GPU: CARD_FIELDS. None without one."""
    found = _output("nvidia-smi", f"--query-gpu={CARD_FIELDS}", "--format=csv,noheader")
    return found.splitlines() if found else None


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One entry of a list a line, so that a file with thousands of rows can be compared. Raises `OSError`."""
    fresh = path.with_name(f".{path.name}.writing")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh.write_text(json.dumps(_plain(content), allow_nan=False).replace("], [", "],\n[") + "\n", encoding="utf-8")
    os.replace(fresh, path)


def _plain(value: Any) -> Any:
    """JSON has no infinity: it is written as a word; what is not known as null."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 4) if math.isfinite(value) else "infinite"
    return value
