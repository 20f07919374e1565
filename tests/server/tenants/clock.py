"""A clock that tests move."""

from __future__ import annotations


class Clock:
    """Seconds that go on only with `advance`. The default is the beginning of a minute."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
