"""The visible text of one sequence in the HTTP process. Knows no tokenizer, no engine and no events."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from server.text.decoding.incremental import NewText, NewTokens, Window
from server.text.decoding.stops import StopMatcher


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
