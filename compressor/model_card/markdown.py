"""Markdown that shows any text as that text. Names and continuations come from fine-tunes and are not trusted."""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Iterable, Sequence

UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # Unicode categories of characters without a glyph
JOINERS = "\u200c\u200d"  # needed by scripts and emoji


def code(text: str) -> str:
    """Return `text` as an inline code span that no character of it can end; "" for no text."""
    shown = visible(text)
    if "`" not in shown and "|" not in shown:
        return f"`{shown}`" if shown else ""
    # A backtick ends a code span and a pipe ends a table cell; a character reference does neither.
    referenced = "".join(f"&#{ord(c)};" if c in string.punctuation else c for c in shown)
    return f"<code>{referenced}</code>"


def visible(text: str) -> str:
    """Return `text` on one line, with every invisible character replaced by a visible one."""
    return text if text.isprintable() else "".join(map(_glyph, text))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _glyph(character: str) -> str:
    if character in "\n\t":
        return "↵" if character == "\n" else "→"
    is_seen = unicodedata.category(character) not in UNSEEN or character in JOINERS
    return character if is_seen else f"⟨U+{ord(character):04X}⟩"
