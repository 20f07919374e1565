"""Finds stop strings in text that arrives in parts."""

from __future__ import annotations


class StopMatcher:
    """Passes text on as soon as no stop string can begin in it."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Return the text that can be shown and whether a stop string was completed.

        A stop string is never shown, nor is the text behind it.
        """
        if not self._stop:
            return text, False
        self._held += text
        found = [position for stop in self._stop if (position := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        num_held = max((self._overlap(stop) for stop in self._stop), default=0)
        split = len(self._held) - num_held
        shown, self._held = self._held[:split], self._held[split:]
        return shown, False

    def flush(self) -> str:
        """Return the text held back, once no more text follows."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Return the length of the longest prefix of `stop` that ends the held text."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
