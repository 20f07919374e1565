"""Incremental text of one sequence: which tokens still have hidden text, and what a new token adds to it.

A `Window` is a value: the HTTP process keeps one per sequence, and the tokenizer may be in another process. Each token
makes one value of each class here, and msgspec makes them five times as fast as a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Callable

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
