"""One way to tell the person at the terminal what happens, so that logs of many processes stay readable."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Writes a line at once, also when the output is a file or a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
