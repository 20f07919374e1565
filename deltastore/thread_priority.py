"""Lowers the priority of threads that must not delay computing ones. Linux keeps a niceness per thread."""

from __future__ import annotations

import os

# At the niceness of the engine, a loading thread would take a core from a step that waits for all of its cores.
NICENESS = 10
# The highest: for work that no request waits for.
IDLE_NICENESS = 19


def lower_thread_priority(niceness: int = NICENESS) -> None:
    """Add to the niceness of the calling thread, so that computing threads run first."""
    os.nice(niceness)
