"""A clock that tests move."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


class Clock:
    """Seconds since 1970 that go on only with `advance`."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def fake_clock(now: float = 1_800_000_000.0) -> Iterator[Clock]:
    """Replace `time.time` inside the block. The default is the beginning of a minute."""
    clock = Clock(now)
    with mock.patch.object(time, "time", clock):
        yield clock
