"""The visible text of one sequence in the HTTP process: what its tokens show, up to a stop string."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache

from msgspec import Struct

from server.text.decoding.incremental import NewText, NewTokens, Window

# Tables of stop strings that calls share; one has two bytes per character of a stop string.
MAX_TABLES = 1024


class IncrementalDetokenizer:
    """Hands out a sequence's new tokens for decoding, takes their text back, and matches stop strings.

    Text is held back while a character is incomplete or a stop string may have begun. Calls of `push` and `take`
    alternate.

    Args:
        stop: strings that end the sequence.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._window = Window()
        self._stops = StopMatcher(stop)
        self._stopped = False
        self._is_last = False

    def push(self, token_ids: Iterable[int], is_last: bool = False) -> NewTokens:
        """Return new tokens for `VariantText.decode_streams`. An end token that has no text is left out.

        Args:
            is_last: no tokens follow; `take` then returns all text that was held back.
        """
        self._is_last = is_last
        return NewTokens(self._window, tuple(token_ids), is_last)

    def take(self, new: NewText) -> VisibleText:
        """Return the text that becomes visible."""
        self._window = new.window
        texts: list[str] = []
        for text in new.texts:
            if self._stopped:
                break
            visible, self._stopped = self._stops.push(text)
            texts.append(visible)
        tail = ""
        if self._is_last and not self._stopped:
            tail, self._stopped = self._stops.push(new.tail)
            tail += self._stops.flush()
        return VisibleText(tuple(texts), tail, self._stopped)


class VisibleText(Struct, frozen=True):
    """Text that some new tokens made visible.

    Args:
        texts: one per token, up to the token that completed a stop string.
        tail: what was held back before the last token of the sequence.
        stopped: a stop string was completed; it is in no text, nor is the text behind it.
    """

    texts: tuple[str, ...]
    tail: str
    stopped: bool


class StopMatcher:
    """Finds stop strings in text that arrives in parts, and passes text on as soon as none can begin in it.

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
