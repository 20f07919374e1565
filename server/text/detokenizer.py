"""Text of a sequence's tokens as they come: what each adds to the text of prompt and answer, up to a stop string.

A `Window` is a value: the HTTP process keeps one per sequence, and the tokenizer may be in another process.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from msgspec import Struct

from deltastore.errors import ArtifactError
from server.protocol.request import SamplingParams

INCOMPLETE = "\ufffd"
# What transformers' clean-up of spaces may replace together with later text (" n't", " ' ", " ."), and its length.
UNCLEAN_END = re.compile(r"(?: n? ?'?[vr]?|')\Z")
MAX_UNCLEAN_CHARS = 5
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


def num_incomplete(text: str) -> int:
    """Return the number of characters at the end of a text that a later token may change."""
    return len(text) - len(text.rstrip(INCOMPLETE))


def num_unclean(text: str) -> int:
    """Return the same for a tokenizer with `clean_up_tokenization_spaces`."""
    unclean = UNCLEAN_END.search(text[-MAX_UNCLEAN_CHARS:])
    return num_incomplete(text) if unclean is None else len(unclean[0])


class Window(Struct, frozen=True):
    """The newest tokens of prompt and answer that have text.

    Tokens are decoded behind the tokens whose text was shown before them, because a decoder treats the first token of
    a text otherwise than the following ones.
    """

    ids: tuple[int, ...] = ()
    num_complete: int = 0  # tokens at its beginning whose text was shown in full
    # Characters at the beginning of its text that were shown; None for a prompt's tokens that were not decoded yet.
    num_shown: int | None = 0
    # Replacement characters of an incomplete character at the prompt's end that were shown with the prompt, at most.
    num_repeated: int = 0

    @classmethod
    def behind(cls, prompt_ids: Sequence[int], num_ids: int = MAX_WINDOW, is_echoed: bool = False) -> Window:
        """Return the window of an answer's first token.

        Args:
            num_ids: tokens of the prompt's end that are kept.
            is_echoed: an incomplete character at the prompt's end is shown with the answer.
        """
        ids = tuple(prompt_ids[-num_ids:])
        return cls(ids, num_shown=None, num_repeated=0 if is_echoed else MAX_HELD_CHARS)


class NewTokens(Struct, frozen=True):
    """Tokens of one sequence that are to be decoded, with the window before them."""

    window: Window
    ids: tuple[int, ...]
    is_last: bool  # no more tokens follow, so text of an incomplete character is shown too
    skip_special_tokens: bool = True
    end_ids: tuple[int, ...] = ()  # those of `ids` that end a sequence, and have no text
    mark_ids: tuple[int, ...] = ()  # those of `ids` that have no text, and before which none is held back
    num_before: int = 0  # characters of the prompt's end, with special tokens, that are asked for once


class NewText(Struct, frozen=True):
    """The text that each of some new tokens makes visible."""

    window: Window
    texts: tuple[str, ...]
    tail: str  # held back until the last token
    begins: int | None = None  # the position of the token with which the text of prompt and answer begins
    # What the own texts of tokens have in front of these: all of a special one, the space of the first one.
    left_out: Mapping[int, str] = {}
    before: str = ""  # the prompt's end


def decode_new(
    decode: Decode,
    new: NewTokens,
    left_out: frozenset[int] = frozenset(),
    num_unsettled: Callable[[str], int] = num_incomplete,
) -> NewText:
    """Decode new tokens of a sequence.

    The texts and the tail of all calls together are what the answer adds to the text of its prompt.

    Args:
        left_out: tokens of prompt and answer without text.
        num_unsettled: returns the number of characters at the end of a text that later tokens may change.

    Raises:
        ArtifactError: a few tokens make more than `MAX_WINDOW_CHARS` characters.
    """
    texts: list[str] = []
    window, begins = new.window, None
    if window.num_shown is None:
        window = _seen(decode, [token_id for token_id in window.ids if token_id not in left_out], window)
    for position, token_id in enumerate(new.ids):
        if token_id in left_out or token_id in new.end_ids:
            text, window = _settle(decode, window) if token_id in new.mark_ids else ("", window)
            texts.append(text)
            continue
        if not window.ids:
            begins = position
        text, window = _advance(decode, num_unsettled, window, token_id)
        texts.append(text)
    tail = _added(window, decode(list(window.ids))) if new.is_last else ""
    return NewText(window, tuple(texts), tail, begins)


def complete_text(decode: Decode, prompt_ids: Sequence[int]) -> str:
    """Return the text of a prompt without an incomplete character at its end."""
    window = _seen(decode, prompt_ids[-MAX_WINDOW:], Window())
    num_pending = len(window.ids) - window.num_complete
    if not num_pending:
        return decode(list(prompt_ids))
    before = decode(list(window.ids[: window.num_complete]))
    return decode(list(prompt_ids[:-num_pending])) + _shown(decode, window)[len(before) :]


def _seen(decode: Decode, ids: Sequence[int], window: Window) -> Window:
    """Return the window of a prompt's newest tokens, whose text was shown but for an incomplete character."""
    for num_pending in range(min(MAX_CHARACTER_TOKENS, len(ids) + 1)):
        end = len(ids) - num_pending
        # One that begins within a character may decode to replacement characters alone.
        for start in range(max(0, end - KEPT_WINDOW), max(end, 1)):
            complete = decode(list(ids[start:end]))
            if INCOMPLETE not in complete:
                num_shown, num_repeated = _settled(decode, complete, ids[start:], ids[end:])
                num_repeated = min(window.num_repeated, num_repeated)
                return Window(tuple(ids[start:]), end - start, num_shown, num_repeated)
    ids = ids[-KEPT_WINDOW:]
    return Window(tuple(ids), len(ids), len(decode(list(ids))))


def _settled(decode: Decode, complete: str, ids: Sequence[int], pending: Sequence[int]) -> tuple[int, int]:
    """Return the characters of `ids` before an incomplete character, and the replacement characters of that.

    Args:
        complete: the text of the tokens before the last ones, `pending`.
    """
    if not pending:
        return len(complete), 0
    text = decode(list(ids))
    settled = text.rstrip(INCOMPLETE)
    if settled.startswith(complete):
        return len(settled), len(text) - len(settled)
    return len(complete), len(decode(list(pending)))


def _advance(
    decode: Decode, num_unsettled: Callable[[str], int], window: Window, token_id: int
) -> tuple[str, Window]:
    """Return the text that a token makes visible, and the window behind it."""
    ids = (*window.ids, token_id)
    text = decode(list(ids))
    if len(text) > MAX_WINDOW_CHARS:
        raise ArtifactError(
            f"the tokenizer's decoder makes {len(text)} characters of {len(ids)} tokens: use one that makes fewer"
        )
    assert window.num_shown is not None
    if window.num_complete and INCOMPLETE in text and not text.startswith(_shown(decode, window)):
        # Of a run of byte tokens, one that is wrong or missing makes replacement characters of all.
        pending = Window(window.ids[window.num_complete :], num_repeated=window.num_repeated)
        return _advance(decode, num_unsettled, pending, token_id)
    num_held = num_unsettled(text)
    if len(ids) - window.num_complete > MAX_PENDING:
        num_held = min(num_held, MAX_HELD_CHARS)
    num_shown = max(window.num_shown, len(text) - num_held)
    visible = _added(window, text[:num_shown])
    num_repeated = 0 if num_shown > window.num_shown else window.num_repeated
    if visible and not num_held:
        ids = ids[window.num_complete :]
        return visible, Window(ids, len(ids), len(decode(list(ids))))
    if len(ids) > MAX_WINDOW:
        ids, num_hidden = ids[-KEPT_WINDOW:], max(0, len(text) - num_shown)
        text = decode(list(ids))
        num_shown = max(0, len(text) - num_hidden)
        return visible, Window(ids, KEPT_WINDOW - MAX_CHARACTER_TOKENS, num_shown, num_repeated)
    return visible, Window(ids, window.num_complete, num_shown, num_repeated)


def _settle(decode: Decode, window: Window) -> tuple[str, Window]:
    """Return the text that is held back, and the window behind it."""
    text = decode(list(window.ids))
    return _added(window, text), Window(window.ids, len(window.ids), len(text))


def _added(window: Window, text: str) -> str:
    """Return what a text of the window's tokens adds to that which was shown."""
    return text[window.num_shown :].removeprefix(INCOMPLETE * window.num_repeated)


def _shown(decode: Decode, window: Window) -> str:
    return decode(list(window.ids))[: window.num_shown]


# Tables of stop strings that calls share; one has two bytes per character of a stop string.
MAX_TABLES = 1024


class IncrementalDetokenizer:
    """Hands out a sequence's new tokens for decoding, takes their text back, and matches stop strings.

    Text is held back while a character is incomplete or a stop string may have begun. Calls of `push` and `take`
    alternate.

    Args:
        prompt_ids: of the prompt that the sequence stands behind.
        is_echoed: an incomplete character at the prompt's end is shown with the sequence.
        marks: special tokens by id that are shown, whether others are or not.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        is_echoed: bool = False,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        self._params = params
        self._marks = marks or {}
        self._marked: list[str | None] = []  # of each token that is being decoded
        # A token may have one character.
        self._num_before = max(map(len, params.stop), default=0) if params.stops_begin_in_prompt else 0
        self._window = Window.behind(prompt_ids, max(MAX_WINDOW, self._num_before), is_echoed)
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._stopped = False
        self._is_last = False

    def push(self, token_ids: Iterable[int], is_last: bool = False) -> NewTokens:
        """Return new tokens for `VariantText.decode_streams`.

        Args:
            is_last: no tokens follow; `take` then returns all text that was held back.
        """
        self._is_last = is_last
        params, ids = self._params, tuple(token_ids)
        shows_end = params.include_stop_str_in_output
        ends = () if shows_end else tuple(filter(params.stop_token_ids.__contains__, ids))
        self._marked = [None if each in ends else self._marks.get(each) for each in ids]
        marks = tuple(each for each in ids if each in self._marks and each not in ends) if self._marks else ()
        return NewTokens(
            self._window, ids, is_last, params.skip_special_tokens, ends, marks, self._num_before
        )

    def take(self, new: NewText) -> VisibleText:
        """Return the text that becomes visible."""
        self._window = new.window
        if self._num_before:
            self._stops.begin_behind(new.before)
            self._num_before = 0
        texts: list[str] = []
        for position, text in enumerate(new.texts):
            if self._stopped:
                break
            parts = [(text, True)]
            if (mark := self._marked[position]) is not None and position in new.left_out:
                parts.append((mark, True))
            elif position in new.left_out:
                parts.insert(0, (new.left_out[position], False))
            released = ""
            for part, is_shown in parts:
                if not self._stopped:
                    visible, self._stopped = self._stops.push(part, is_shown)
                    released += visible
            texts.append(released)
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

    They are found in parts that are not shown, too, such as special tokens, as transformers' `generate()` finds them.
    It keeps the length of each stop string's longest prefix that ends the text so far, and never reads text twice.
    """

    def __init__(self, stop: tuple[str, ...], shows_stop: bool = False) -> None:
        self._shows_stop = shows_stop
        self._stop = [(each, _shorter_prefixes(each)) for each in stop]
        self._matched = [0] * len(stop)  # characters of each that end the text so far
        # Parts of the text that were not passed on, whether each is shown, and their characters.
        self._held: deque[tuple[str, bool]] = deque()
        self._num_held = 0

    def begin_behind(self, text: str) -> None:
        """Take in the text before the first part, in which a stop string may begin and none ends."""
        for number, (stop, shorter) in enumerate(self._stop):
            end, self._matched[number] = _advance_match(stop, shorter, 0, text)
            rest = text
            while end is not None:
                rest = rest[end:]
                end, self._matched[number] = _advance_match(stop, shorter, shorter[len(stop)], rest)
        self._hold(text[len(text) - max(self._matched, default=0) :], False)

    def push(self, text: str, is_shown: bool = True) -> tuple[str, bool]:
        """Add text. Return the text that can be shown and whether a stop string was completed.

        Text behind a stop string is never shown, nor is the string itself, unless the matcher was told to show it.
        """
        if not self._stop:
            return text if is_shown else "", False
        first: tuple[int, int] | None = None
        for number, (stop, shorter) in enumerate(self._stop):
            end, self._matched[number] = _advance_match(stop, shorter, self._matched[number], text)
            if end is not None:
                start = self._num_held + end - len(stop)
                found = start, start + len(stop)
                first = found if first is None else min(first, found)
        self._hold(text, is_shown)
        if first is not None:
            return self._released(first[self._shows_stop]), True
        return self._released(self._num_held - max(self._matched)), False

    def flush(self) -> str:
        """Return the text held back, once no more text follows."""
        return self._released(self._num_held)

    def _hold(self, text: str, is_shown: bool) -> None:
        if text:
            self._held.append((text, is_shown))
            self._num_held += len(text)

    def _released(self, length: int) -> str:
        """Return what is shown of the first characters that are held, which are held no longer."""
        shown = []
        self._num_held -= length
        while length:
            text, is_shown = self._held.popleft()
            if len(text) > length:
                self._held.appendleft((text[length:], is_shown))
                text = text[:length]
            length -= len(text)
            if is_shown:
                shown.append(text)
        return "".join(shown)


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
