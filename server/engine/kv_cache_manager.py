"""Gives pages of the KV cache to sequences, and finds pages again that hold the prefix of a new sequence.

Counts pages only; their tensors belong to `server/model/attention.py`. A page is looked for among those of the same
delta and tenant, so no variant is given another variant's keys and values, and no tenant can find out what another one
asked. There the hash of its tokens and all before them names it, which the HTTP process has computed for a prompt.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from server.engine.sequence import PageTable, Sequence
from server.fairness import Holdings
from server.protocol.request import HASH_BYTES, PageHashes, page_hash, token_ids_of

# Always zeros; fills up page tables of different lengths.
PADDING_PAGE = 0


class KVCacheManager:
    """Reference-counted pages of `page_tokens` tokens, and the prefix cache over those that no sequence uses.

    A page that is needed is taken from the tenant with the most cached pages without users: its least recently used.
    """

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
        # Pages with users, by tenant: all users of a page are of one.
        self._num_used: Counter[str] = Counter()
        # Cached pages by digest and tenant, then by hash; and all three of each page.
        self._cached: dict[tuple[str | None, str], dict[bytes, int]] = {}
        self._names: dict[int, tuple[tuple[str | None, str], bytes]] = {}
        # Cached pages without users, by tenant, least recently used first; their number, and that of each tenant.
        self._idle: dict[str, OrderedDict[int, None]] = {}
        self._num_idle = 0
        self._holdings = Holdings()
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
        return len(self._free) + self._num_idle

    @property
    def usage(self) -> float:
        """Share of the pages that sequences use."""
        return 1 - self.num_available / self.num_pages

    def num_used(self, tenant: str) -> int:
        """Return how many pages the sequences of a tenant use; one that several share counts once."""
        return self._num_used[tenant]

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
        cached = self._cached.get((sequence.digest, sequence.tenant))
        if cached is None:
            return
        idle = self._idle.get(sequence.tenant, OrderedDict())
        num_idle = len(idle)
        for name in self._hashes(sequence, 0, (sequence.num_tokens - 1) // self.page_tokens):
            page = cached.get(name)
            if page is None:
                break
            if not self._num_users[page]:
                del idle[page]
            self._num_users[page] += 1
            table.pages.append(page)
        table.num_hashed = len(table.pages)
        self._num_used[sequence.tenant] += num_idle - len(idle)
        self._count_idle(sequence.tenant, idle, len(idle) - num_idle)
        sequence.num_computed_tokens = len(table.pages) * self.page_tokens

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate pages for that many tokens beyond the computed ones; False, without effect, if there are too few."""
        table = sequence.page_table
        num_needed = -(-(sequence.num_computed_tokens + num_tokens) // self.page_tokens)
        num_missing = num_needed - len(table.pages)
        if num_missing > self.num_available:
            return False
        while len(self._free) < num_missing:
            self._evict(sequence.tenant, num_missing - len(self._free))
        for _ in range(num_missing):
            page = self._free.pop()
            self._num_users[page] = 1
            self._pages_to_zero.append(page)
            table.pages.append(page)
        self._num_used[sequence.tenant] += max(0, num_missing)
        # Counted here, so that a sequence that waits for pages is not counted each time it tries.
        if not table.is_counted:
            self._num_queried += sequence.num_tokens
            self._num_hit += sequence.num_computed_tokens
            table.is_counted = True
        return True

    def cache_full_pages(self, sequence: Sequence) -> None:
        """Add the pages that have become full to the prefix cache of the sequence's delta and tenant."""
        table = sequence.page_table
        first, end = table.num_hashed, sequence.num_computed_tokens // self.page_tokens
        if first == end:
            return
        table.num_hashed = end
        owner = sequence.digest, sequence.tenant
        cached = self._cached.setdefault(owner, {})
        for page, name in zip(table.pages[first:end], self._hashes(sequence, first, end), strict=True):
            if name not in cached:
                cached[name] = page
                self._names[page] = owner, name

    def discard(self, sequence: Sequence) -> None:
        """Release a failed sequence's pages and uncache them: their keys and values may be wrong."""
        for page in sequence.page_table.pages:
            if page in self._names:
                self._uncache(page)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's pages. Those in the prefix cache stay there until they are allocated again."""
        idle = self._idle.get(sequence.tenant) or OrderedDict()
        num_idle, num_left = len(idle), 0
        # In reverse, so that the end of a prefix is evicted before its beginning.
        for page in reversed(sequence.page_table.pages):
            self._num_users[page] -= 1
            if self._num_users[page]:
                continue
            num_left += 1
            if page in self._names:
                idle[page] = None
            else:
                self._free.append(page)
        self._num_used[sequence.tenant] -= num_left
        if not self._num_used[sequence.tenant]:
            del self._num_used[sequence.tenant]
        self._count_idle(sequence.tenant, idle, len(idle) - num_idle)
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

    def _evict(self, tenant: str, max_pages: int) -> None:
        """Free the least recently used cached pages of the tenant with the most, while it has the most.

        Args:
            tenant: needs them, and loses its own if no other has more.
        """
        largest, lead = self._holdings.largest()
        if len(self._idle.get(tenant, ())) < len(self._idle[largest]):
            tenant = largest
        idle = self._idle[tenant]
        num_pages = min(lead, max_pages)
        for _ in range(num_pages):
            page, _ = idle.popitem(last=False)
            self._uncache(page)
            self._free.append(page)
        self._count_idle(tenant, idle, -num_pages)

    def _uncache(self, page: int) -> None:
        owner, name = self._names.pop(page)
        cached = self._cached[owner]
        del cached[name]
        if not cached:
            del self._cached[owner]

    def _count_idle(self, tenant: str, idle: OrderedDict[int, None], more: int) -> None:
        """Note that so many more of a tenant's cached pages have no users."""
        if not more:
            return
        self._num_idle += more
        self._holdings.hold(tenant, len(idle))
        if idle:
            self._idle[tenant] = idle
        else:
            del self._idle[tenant]

    def _hashes(self, sequence: Sequence, start: int, end: int) -> Iterator[bytes]:
        """Yield the hashes of pages `start` to `end` - 1; computes each once for a sequence, and none that was given.

        Pages of generated tokens before `start` have been hashed.
        """
        given, own = sequence.page_hashes, sequence.own_hashes
        if given is None or given.page_tokens != self.page_tokens:
            given = sequence.page_hashes = PageHashes.of(sequence.prompt_ids, self.page_tokens)
        chain = given.chain
        for place in range(start * HASH_BYTES, end * HASH_BYTES, HASH_BYTES):
            if place < len(chain):
                yield chain[place : place + HASH_BYTES]
                continue
            in_own = place - len(chain)
            if in_own == len(own):
                first = place // HASH_BYTES * self.page_tokens
                tokens = token_ids_of(sequence.token_ids(first, first + self.page_tokens))
                own += page_hash(bytes(own[-HASH_BYTES:]) or chain[-HASH_BYTES:], tokens.tobytes())
            yield bytes(own[in_own : in_own + HASH_BYTES])
