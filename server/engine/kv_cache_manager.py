"""Gives pages of the KV cache to sequences, and finds pages again that hold the prefix of a new sequence.

Counts pages only; their tensors belong to `server/model/attention.py`. The key of a page includes the delta and the
tenant, so no variant is given another variant's keys and values, and no tenant can find out what another one asked.
"""

from __future__ import annotations

import array
import hashlib
from collections import OrderedDict

from server.engine.sequence import PageTable, Sequence

# Always zeros; fills up page tables of different lengths.
PADDING_PAGE = 0


class KVCacheManager:
    """Reference-counted pages of `page_tokens` tokens, and the prefix cache over those that no sequence uses."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        """Manage pages 1 to `num_pages` - 1; page `PADDING_PAGE` is never given away.

        Raises:
            ValueError: there is no page but the padding page.
        """
        if num_pages < 2:
            raise ValueError(f"a KV cache needs at least 2 pages, got {num_pages}")
        self.page_tokens = page_tokens
        self.num_pages = num_pages - 1
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._num_users = [0] * num_pages
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}
        # Cached pages without users, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pages_to_zero: list[int] = []
        # Tokens looked up in the prefix cache, and tokens found there.
        self._num_queried = self._num_hit = 0

    @property
    def max_tokens(self) -> int:
        """Length of the longest sequence that fits alone."""
        return self.num_pages * self.page_tokens

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated now."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the pages that sequences use."""
        return 1 - self.num_available / self.num_pages

    def attach_prefix(self, sequence: Sequence) -> None:
        """Attach the longest cached prefix, leaving the last token to compute.

        Raises:
            RuntimeError: the sequence has pages already.
        """
        table = sequence.page_table
        if table.pages:
            raise RuntimeError(f"sequence {sequence.id} has pages already")
        sequence.num_computed_tokens = 0
        if not sequence.reuses_prefix:
            return
        table.is_counted = False
        for index in range((sequence.num_tokens - 1) // self.page_tokens):
            key = self._next_key(sequence, index)
            page = self._page_of_key.get(key)
            if page is None:
                break
            if not self._num_users[page]:
                del self._idle[page]
            self._num_users[page] += 1
            table.pages.append(page)
            table.keys.append(key)
        sequence.num_computed_tokens = len(table.pages) * self.page_tokens

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate pages for that many tokens beyond the computed ones; False, without effect, if there are too few."""
        table = sequence.page_table
        num_needed = -(-(sequence.num_computed_tokens + num_tokens) // self.page_tokens)
        num_missing = num_needed - len(table.pages)
        if num_missing > self.num_available:
            return False
        for _ in range(num_missing):
            page = self._free.pop() if self._free else self._evict_oldest()
            self._num_users[page] = 1
            self._pages_to_zero.append(page)
            table.pages.append(page)
        # Counted here, so that a sequence that waits for pages is not counted each time it tries.
        if not table.is_counted:
            self._num_queried += sequence.num_tokens
            self._num_hit += sequence.num_computed_tokens
            table.is_counted = True
        return True

    def cache_full_pages(self, sequence: Sequence) -> None:
        """Add the pages that have become full to the prefix cache of the sequence's delta and tenant."""
        table = sequence.page_table
        for index in range(len(table.keys), sequence.num_computed_tokens // self.page_tokens):
            key, page = self._next_key(sequence, index), table.pages[index]
            table.keys.append(key)
            if key not in self._page_of_key:
                self._page_of_key[key] = page
                self._key_of_page[page] = key

    def discard(self, sequence: Sequence) -> None:
        """Release a failed sequence's pages and uncache them: their keys and values may be wrong."""
        for page in sequence.page_table.pages:
            if page in self._key_of_page:
                del self._page_of_key[self._key_of_page.pop(page)]
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's pages. Those in the prefix cache stay there until they are allocated again."""
        # In reverse, so that the end of a prefix is evicted before its beginning.
        for page in reversed(sequence.page_table.pages):
            self._num_users[page] -= 1
            if self._num_users[page]:
                continue
            if page in self._key_of_page:
                self._idle[page] = None
            else:
                self._free.append(page)
        sequence.page_table = PageTable()
        sequence.num_computed_tokens = 0

    def take_pages_to_zero(self) -> list[int]:
        """Return the pages allocated since the last call. They hold another sequence's values; zero them before use."""
        pages, self._pages_to_zero = self._pages_to_zero, []
        return pages

    def take_prefix_counts(self) -> tuple[int, int]:
        """Return how many tokens were looked up in the prefix cache and found there since the last call."""
        counts = self._num_queried, self._num_hit
        self._num_queried = self._num_hit = 0
        return counts

    def _evict_oldest(self) -> int:
        """Remove the least recently used page from the prefix cache and return it."""
        page, _ = self._idle.popitem(last=False)
        del self._page_of_key[self._key_of_page.pop(page)]
        return page

    def _next_key(self, sequence: Sequence, index: int) -> bytes:
        """Return the key of page `index`: a hash of its tokens and all before them, of the delta and of the tenant."""
        keys = sequence.page_table.keys
        parent = keys[index - 1] if index else _root_key(sequence.digest, sequence.tenant)
        tokens = sequence.token_ids(index * self.page_tokens, (index + 1) * self.page_tokens)
        return hashlib.sha256(parent + array.array("q", tokens).tobytes()).digest()


def _root_key(digest: str | None, tenant: str) -> bytes:
    """Return the key before the first page. Each field has its tag and length before it, so no two pairs are alike."""
    key = hashlib.sha256()
    for tag, value in ((b"delta", digest), (b"tenant", tenant)):
        data = b"" if value is None else value.encode()
        key.update(tag + bytes([value is not None]) + len(data).to_bytes(8, "little") + data)
    return key.digest()
