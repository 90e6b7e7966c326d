"""How many processor cores this process may use: those of the machine, of its affinity and of its container's limit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of cgroups' version 2: "max 100000", or microseconds of each period


def usable_cores(quota: Path = QUOTA) -> int:
    """At least one; a container's share of a core counts as a whole one."""
    count = os.cpu_count() or 1
    if sys.platform == "linux":
        count = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(count, -(-int(allowed) // int(period))))
    except (OSError, ValueError):  # no such file, or no limit
        return count
