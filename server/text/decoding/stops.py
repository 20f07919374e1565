"""Finds stop strings in text that arrives in parts, with a bounded number of comparisons per character."""

from __future__ import annotations

from array import array
from functools import lru_cache

# Tables that calls share; one has two bytes per character of a stop string.
MAX_TABLES = 1024


class StopMatcher:
    """Passes text on as soon as no stop string can begin in it.

    It keeps the length of each stop string's longest prefix that ends the text so far, and never reads text twice.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = [(each, _shorter_prefixes(each)) for each in stop]
        self._matched = [0] * len(stop)  # characters of each that end the text so far
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Return the text that can be shown and whether a stop string was completed.

        A stop string is never shown, nor is the text behind it.
        """
        if not self._stop:
            return text, False
        first: int | None = None
        for number, (stop, shorter) in enumerate(self._stop):
            end, self._matched[number] = _advance(stop, shorter, self._matched[number], text)
            if end is not None:
                start = len(self._held) + end - len(stop)
                first = start if first is None else min(first, start)
        self._held += text
        if first is not None:
            shown, self._held = self._held[:first], ""
            return shown, True
        split = len(self._held) - max(self._matched)
        shown, self._held = self._held[:split], self._held[split:]
        return shown, False

    def flush(self) -> str:
        """Return the text held back, once no more text follows."""
        shown, self._held = self._held, ""
        return shown


def _advance(stop: str, shorter: array[int], matched: int, text: str) -> tuple[int | None, int]:
    """Read text behind a prefix of `matched` characters, as Knuth, Morris and Pratt do.

    Returns:
        the position in `text` behind the first whole stop string, or None; and the length of the longest prefix that
        ends the text.
    """
    position = 0
    while position < len(text):
        if not matched:
            # Usually there is none, and this is all there is to do.
            position = text.find(stop[0], position)
            if position < 0:
                return None, 0
        elif text[position] != stop[matched]:
            matched = shorter[matched]
            continue
        position += 1
        matched += 1
        if matched == len(stop):
            return position, 0
    return None, matched


@lru_cache(MAX_TABLES)
def _shorter_prefixes(stop: str) -> array[int]:
    """Return for each length of a prefix the length of the longest shorter one that ends it."""
    shorter = array("H", [0, 0])
    length = 0
    for char in stop[1:]:
        while length and char != stop[length]:
            length = shorter[length]
        length += char == stop[length]
        shorter.append(length)
    return shorter
