"""The GPUs of this machine as their driver tells of them, without torch: names and memory."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from duetts.config import visible_devices

QUERY = "index,uuid,name,memory.free,memory.total"
LIMIT_S = 10.0
# Where one of these is, there is a GPU that nothing tells of: another maker's, or the driver's tool is missing.
SIGNS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and its bytes."""

    name: str
    free: int
    total: int


def local_gpus() -> list[Gpu] | None:
    """The GPUs that processes of this machine may use; none where there are none, None where that cannot be told."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None if any(Path(sign).exists() for sign in SIGNS) else []
    try:
        command = [tool, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return read_gpus(told, visible_devices())


def read_gpus(told: str, visible: str | None) -> list[Gpu] | None:
    """What the tool told, of it what `CUDA_VISIBLE_DEVICES` leaves. None if a line or a name there is not understood."""
    found: dict[str, tuple[str, Gpu]] = {}
    for line in told.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 5 or not (parts[3].isdecimal() and parts[4].isdecimal()):
            return None
        found[parts[0]] = (parts[1], Gpu(parts[2], int(parts[3]) << 20, int(parts[4]) << 20))
    if visible is None:
        return [gpu for _, gpu in found.values()]
    chosen = []
    for name in (name.strip() for name in visible.split(",") if name.strip()):
        if name == "-1":  # as for CUDA, nothing counts that follows
            break
        fit = [
            gpu for index, (uuid, gpu) in found.items() if index == name or (name.startswith("GPU-") and uuid.startswith(name))
        ]
        if len(fit) != 1:
            return None
        chosen += fit
    return chosen
