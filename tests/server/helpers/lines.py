"""Counts how much Python a call runs: a measure of work that neither load nor the processor changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_of(call: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs, those of libraries included."""
    num_lines, before = 0, sys.gettrace()

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines
