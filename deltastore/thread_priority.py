"""Lowers the priority of threads that must not delay computing ones. Linux keeps a niceness per thread."""

from __future__ import annotations

import os

# At the niceness of the engine, a loading thread would take a core from a step that waits for all of its cores.
NICENESS = 10


def lower_thread_priority() -> None:
    """Raise the niceness of the calling thread, so that computing threads run first."""
    os.nice(NICENESS)
