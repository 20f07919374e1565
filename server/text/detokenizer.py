"""Text of a sequence's tokens as they come: what each adds to it, up to a stop string.

A `Window` is a value: the HTTP process keeps one per sequence, and the tokenizer may be in another process.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache

from msgspec import Struct

from deltastore.errors import ArtifactError

INCOMPLETE = "\ufffd"
# A character of four bytes, without its last one, decodes to one replacement character, or to one for each byte.
MAX_HELD_CHARS = 3
# With more tokens whose text is held back, all but the newest are no part of a character. A character has at most four,
# but tokens without text may stand between them.
MAX_PENDING = 16
# Tokens of a window. The text of that many is decoded with every token, so a window must not grow without limit.
MAX_WINDOW = 64
# Tokens that are kept of a longer window, and those of them that may be parts of a character.
KEPT_WINDOW = 16
MAX_CHARACTER_TOKENS = 4
# A real token has at most a few hundred characters.
MAX_WINDOW_CHARS = 1 << 16

Decode = Callable[[list[int]], str]


class Window(Struct, frozen=True):
    """The newest tokens of a sequence.

    Tokens are decoded behind the tokens whose text was shown before them, because a decoder treats the first token of
    a text otherwise than the following ones.
    """

    ids: tuple[int, ...] = ()
    num_complete: int = 0  # tokens at its beginning whose text was shown in full
    num_shown: int = 0  # characters at the beginning of its text that were shown


class NewTokens(Struct, frozen=True):
    """Tokens of one sequence that are to be decoded, with the window before them."""

    window: Window
    ids: tuple[int, ...]
    is_last: bool  # no more tokens follow, so text of an incomplete character is shown too


class NewText(Struct, frozen=True):
    """The text that each of some new tokens makes visible."""

    window: Window
    texts: tuple[str, ...]
    tail: str  # held back until the last token


def decode_new(decode: Decode, new: NewTokens) -> NewText:
    """Decode new tokens of a sequence. The texts and the tail of all calls together are the text of all its tokens.

    Raises:
        ArtifactError: a few tokens make more than `MAX_WINDOW_CHARS` characters.
    """
    window, texts = new.window, []
    for token_id in new.ids:
        text, window = _advance(decode, window, token_id)
        texts.append(text)
    tail = decode(list(window.ids))[window.num_shown :] if new.is_last else ""
    return NewText(window, tuple(texts), tail)


def _advance(decode: Decode, window: Window, token_id: int) -> tuple[str, Window]:
    """Return the text that a token makes visible, and the window behind it."""
    ids = (*window.ids, token_id)
    text = decode(list(ids))
    if len(text) > MAX_WINDOW_CHARS:
        raise ArtifactError(
            f"the tokenizer's decoder makes {len(text)} characters of {len(ids)} tokens: use one that makes fewer"
        )
    num_held = len(text) - len(text.rstrip(INCOMPLETE)) if text.endswith(INCOMPLETE) else 0
    if len(ids) - window.num_complete > MAX_PENDING:
        num_held = min(num_held, MAX_HELD_CHARS)
    num_shown = max(window.num_shown, len(text) - num_held)
    visible = text[window.num_shown : num_shown]
    if visible and not num_held:
        ids = ids[window.num_complete :]
        return visible, Window(ids, len(ids), len(decode(list(ids))))
    if len(ids) > MAX_WINDOW:
        ids, num_hidden = ids[-KEPT_WINDOW:], max(0, len(text) - num_shown)
        num_shown = max(0, len(decode(list(ids))) - num_hidden)
        return visible, Window(ids, KEPT_WINDOW - MAX_CHARACTER_TOKENS, num_shown)
    return visible, Window(ids, window.num_complete, num_shown)


# Tables of stop strings that calls share; one has two bytes per character of a stop string.
MAX_TABLES = 1024


class IncrementalDetokenizer:
    """Hands out a sequence's new tokens for decoding, takes their text back, and matches stop strings.

    Text is held back while a character is incomplete or a stop string may have begun. Calls of `push` and `take`
    alternate.

    Args:
        stop: strings that end the sequence.
        shows_stop: the one that ends it is shown.
    """

    def __init__(self, stop: tuple[str, ...], shows_stop: bool = False) -> None:
        self._window = Window()
        self._stops = StopMatcher(stop, shows_stop)
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
        stopped: a stop string was completed; the text behind it is in no text, nor is the string unless it is shown.
    """

    texts: tuple[str, ...]
    tail: str
    stopped: bool


class StopMatcher:
    """Finds stop strings in text that arrives in parts, and passes text on as soon as none can begin in it.

    It keeps the length of each stop string's longest prefix that ends the text so far, and never reads text twice.
    """

    def __init__(self, stop: tuple[str, ...], shows_stop: bool = False) -> None:
        self._shows_stop = shows_stop
        self._stop = [(each, _shorter_prefixes(each)) for each in stop]
        self._matched = [0] * len(stop)  # characters of each that end the text so far
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Return the text that can be shown and whether a stop string was completed.

        Text behind a stop string is never shown, nor is the string itself, unless the matcher was told to show it.
        """
        if not self._stop:
            return text, False
        first: tuple[int, int] | None = None
        for number, (stop, shorter) in enumerate(self._stop):
            end, self._matched[number] = _advance_match(stop, shorter, self._matched[number], text)
            if end is not None:
                start = len(self._held) + end - len(stop)
                found = start, start + len(stop)
                first = found if first is None else min(first, found)
        self._held += text
        if first is not None:
            shown, self._held = self._held[: first[self._shows_stop]], ""
            return shown, True
        split = len(self._held) - max(self._matched)
        shown, self._held = self._held[:split], self._held[split:]
        return shown, False

    def flush(self) -> str:
        """Return the text held back, once no more text follows."""
        shown, self._held = self._held, ""
        return shown


def _advance_match(stop: str, shorter: array[int], matched: int, text: str) -> tuple[int | None, int]:
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
