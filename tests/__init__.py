"""Tests. Their models are so small that a second thread of torch's costs more than it gives: it spins while it waits."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, and for all processes that tests start
