"""Finds stop strings in text that arrives in pieces, and holds back what may be the beginning of one."""

from __future__ import annotations


class StopMatcher:
    """Passes text on as soon as no stop string can begin in it."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string, which is never shown, was completed."""
        self._held += text
        found = [position for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        split = len(self._held) - keep
        shown, self._held = self._held[:split], self._held[split:]
        return shown, False

    def flush(self) -> str:
        """What is still held back, when nothing more comes."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of `stop` that ends the held text."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
