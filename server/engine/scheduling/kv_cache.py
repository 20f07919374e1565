"""Pages of the key-value cache: which sequence holds which, and which hold a prefix that can be used again.

Plain numbers; the tensors are `server/model/attention.py`'s. A page's key says of which delta and tenant it is, so one
variant's keys and values are never another's, and nobody learns what another tenant asked.
"""

from __future__ import annotations

import array
import hashlib
from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

PADDING_PAGE = 0  # always zeros: what tables of different lengths are filled up with


class Holder(Protocol):
    """A sequence as the cache sees it."""

    @property
    def tenant(self) -> str: ...
    @property
    def digest(self) -> str | None: ...
    @property
    def tokens(self) -> Items[int]: ...  # prompt, and what was generated
    @property
    def reuses_prefix(self) -> bool: ...  # false where every token's logits are wanted

    num_computed_tokens: int  # of `tokens`, those whose keys and values are in its pages
    held: PageTable


@dataclass(slots=True)
class PageTable:
    """What one sequence holds: its pages in order, and the keys of those that are full."""

    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    is_counted: bool = True  # whether what it looked for and found is in the counts


class KVCache:
    """Refcounted pages of `page_tokens` tokens, and the prefix cache over those that nobody holds."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        """Page `PADDING_PAGE` is never given away, so `num_pages` is at least 2."""
        assert num_pages > 1
        self.page_tokens = page_tokens
        self.num_pages = num_pages - 1
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._users = [0] * num_pages
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # keyed pages without users, least recently used first
        self._fresh: list[int] = []  # given away and not zeroed yet
        self._num_queried = self._num_hit = 0  # tokens that were looked for, and found

    @property
    def max_tokens(self) -> int:
        """The longest sequence that fits alone."""
        return self.num_pages * self.page_tokens

    @property
    def num_available(self) -> int:
        """Pages that can be given away now."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the pages that sequences hold."""
        return 1 - self.num_available / self.num_pages

    def attach(self, holder: Holder) -> None:
        """Give a sequence that begins (again) the pages of its longest known prefix; its last token is always left."""
        assert not holder.held.pages
        holder.num_computed_tokens = 0
        if not holder.reuses_prefix:
            return
        table = holder.held
        table.is_counted = False
        for index in range((len(holder.tokens) - 1) // self.page_tokens):
            key = self._next_key(holder, index)
            page = self._by_key.get(key)
            if page is None:
                break
            if not self._users[page]:
                del self._idle[page]
            self._users[page] += 1
            table.pages.append(page)
            table.keys.append(key)
        holder.num_computed_tokens = len(table.pages) * self.page_tokens

    def grow(self, holder: Holder, num_tokens: int) -> bool:
        """Pages for so many tokens more than are computed; False, and nothing changes, where there are too few."""
        table = holder.held
        missing = -(-(holder.num_computed_tokens + num_tokens) // self.page_tokens) - len(table.pages)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            page = self._free.pop() if self._free else self._forget_oldest()
            self._users[page] = 1
            self._fresh.append(page)
            table.pages.append(page)
        if not table.is_counted:  # a sequence that had to wait is not counted each time it tries
            self._num_queried += len(holder.tokens)
            self._num_hit += holder.num_computed_tokens
            table.is_counted = True
        return True

    def commit(self, holder: Holder) -> None:
        """Make the pages that have become full known to later sequences of the same delta and tenant."""
        table = holder.held
        for index in range(len(table.keys), holder.num_computed_tokens // self.page_tokens):
            key, page = self._next_key(holder, index), table.pages[index]
            table.keys.append(key)
            if key not in self._by_key:
                self._by_key[key] = page
                self._key_of[page] = key

    def discard(self, holder: Holder) -> None:
        """Take back the pages of a sequence whose numbers are bad: nobody may find them again."""
        for page in holder.held.pages:
            if page in self._key_of:
                del self._by_key[self._key_of.pop(page)]
        self.release(holder)

    def release(self, holder: Holder) -> None:
        """Take a sequence's pages back; those that hold a known prefix stay findable until room is needed."""
        for page in reversed(holder.held.pages):  # ends of prefixes are forgotten before their beginnings
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)
        holder.held = PageTable()
        holder.num_computed_tokens = 0

    def take_fresh(self) -> list[int]:
        """Pages given away since the last call: what they hold is another sequence's and must be zeroed first."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def take_counts(self) -> tuple[int, int]:
        """Tokens that were looked for among known prefixes, and those that were found, since the last call."""
        counts = self._num_queried, self._num_hit
        self._num_queried = self._num_hit = 0
        return counts

    def _forget_oldest(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._by_key[self._key_of.pop(page)]
        return page

    def _next_key(self, holder: Holder, index: int) -> bytes:
        """The key of page `index`: of all its tokens and those before, of one delta and one tenant."""
        parent = holder.held.keys[index - 1] if index else _root(holder.digest, holder.tenant)
        tokens = holder.tokens[index * self.page_tokens : (index + 1) * self.page_tokens]
        return hashlib.sha256(parent + array.array("q", tokens).tobytes()).digest()


def _root(digest: str | None, tenant: str) -> bytes:
    """Where a chain of keys begins. Each field is tagged and has its length before it, so no two pairs look alike."""
    key = hashlib.sha256()
    for tag, value in ((b"delta", digest), (b"tenant", tenant)):
        data = b"" if value is None else value.encode()
        key.update(tag + bytes([value is not None]) + len(data).to_bytes(8, "little") + data)
    return key.digest()
