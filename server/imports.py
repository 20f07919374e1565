"""Imports large modules fast at start-up. Imports nothing itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Import modules without garbage collection, and exempt all objects that exist then from later passes.

    What modules create stays. Passes over it free nothing, and take a third of the time of importing torch and
    transformers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
