"""Find the worker processes of a process."""

from __future__ import annotations

import psutil


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the workers that the process started itself; a server under test that it started has its own."""
    return [
        child
        for child in psutil.Process(pid).children()
        if child.status() != psutil.STATUS_ZOMBIE and "server.workers.worker_main" in child.cmdline()
    ]
