"""Shares the cores among the workers of pytest-xdist; conftest imports it before torch, which reads the variables once.

Servers and commands that tests start inherit it. A test of threads asks for as many as it needs.
"""

from __future__ import annotations

import os

num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if num_workers > 1:
    num_cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_workers)))
    # Threads of one worker that spin for work would hold up the other workers.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
