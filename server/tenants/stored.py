"""Counts of what tenants store, made by one HTTP process from listings, with what it has published and deleted since.

An upload's head is refused by a count that may be a moment old, and a publication by one that began after its bytes
had come. A tenant has one listing at a time, which rests, and all who wait share the next one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from deltastore.registry import Registry
from deltastore.registry.reader import Stored
from server.registry_calls import RegistryCalls

# A count is recent for so long, or for so many times as long as its listing took: it costs a tenant's heads, however
# many they are, a tenth of a processor at most.
RECENT_S = 1.0
RECENT_TIMES = 10
# Versions of all tenants in the counts that are kept, each of some 24 bytes.
MAX_KEPT = 1 << 20


@dataclass(slots=True, eq=False)
class _Published:
    """A version that this process publishes or has published."""

    name: str
    digest: str
    size_bytes: int
    published_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Counted:
    """A listing of what a tenant stores, with what this process has published since it began or is about to."""

    stored: Stored
    begun_at: float  # time.monotonic() of the listing
    recent_until: float
    added: Sequence[_Published] = ()

    @property
    def num_versions(self) -> int:
        return self.stored.num_versions + len(self._new())

    @property
    def num_variants(self) -> int:
        return self.stored.num_variants + len(
            {name for name, _ in self._new() if not self.stored.num_versions_of(name)}
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of each artifact once. Those of uploads under way are counted elsewhere."""
        sizes = {one.digest: one.size_bytes for one in self.added if math.isfinite(one.published_at)}
        new = (size for digest, size in sizes.items() if not self.stored.has_artifact(digest))
        return self.stored.num_bytes + sum(new)

    def num_versions_of(self, name: str) -> int:
        """Return the number of versions of a variant."""
        return self.stored.num_versions_of(name) + sum(name == other for other, _ in self._new())

    def has(self, name: str, digest: str) -> bool:
        """True if a version of the variant has these bytes."""
        return self.stored.has(name, digest) or (name, digest) in self._new()

    def has_artifact(self, digest: str) -> bool:
        """True if a version of any variant has these bytes."""
        return self.stored.has_artifact(digest) or any(one.digest == digest for one in self.added)

    def _new(self) -> set[tuple[str, str]]:
        return {(one.name, one.digest) for one in self.added if not self.stored.has(one.name, one.digest)}


class StoredCounts:
    """The counts of all tenants. Event loop only."""

    def __init__(self, registry: Registry, volume: RegistryCalls) -> None:
        self._registry = registry
        self._volume = volume
        self._kept: OrderedDict[str, Counted] = OrderedDict()
        # Of each tenant the listing under way, and the one that begins when it has ended.
        self._running: dict[str, asyncio.Task[Counted]] = {}
        self._next: dict[str, asyncio.Task[Counted]] = {}
        self._published: dict[str, list[_Published]] = {}

    async def recent(self, tenant: str) -> Counted:
        """Return what a tenant stores, as it was a moment ago.

        Raises:
            RegistryUnavailable: the registry cannot be listed now.
        """
        kept = self._kept.get(tenant)
        if kept is None or time.monotonic() > kept.recent_until:
            kept = await asyncio.shield(self._running.get(tenant) or self._listing(tenant))
        return self._with_published(tenant, kept)

    async def now(self, tenant: str) -> Counted:
        """Return what a tenant stores, from a listing that begins now; raises as `recent` does."""
        return self._with_published(tenant, await asyncio.shield(self._listing(tenant)))

    @contextmanager
    def publishing(self, tenant: str, name: str, digest: str, size_bytes: int) -> Iterator[None]:
        """Count a version as the tenant's, from now on and after a block that publishes it."""
        one = _Published(name, digest, size_bytes)
        published = self._published.setdefault(tenant, [])
        published.append(one)
        try:
            yield
        except BaseException:
            published.remove(one)
            raise
        one.published_at = time.monotonic()

    def deleted(self, tenant: str) -> None:
        """Forget the counts of a tenant that had versions which were deleted."""
        self._kept.pop(tenant, None)
        # Its result is for those who wait for it alone.
        self._running.pop(tenant, None)

    def _with_published(self, tenant: str, counted: Counted) -> Counted:
        published = self._published.get(tenant, ())
        added = tuple(one for one in published if one.published_at >= counted.begun_at)
        return Counted(counted.stored, counted.begun_at, counted.recent_until, added)

    def _listing(self, tenant: str) -> asyncio.Task[Counted]:
        """Return the listing of a tenant that begins next."""
        if (waiting := self._next.get(tenant)) is None:
            waiting = asyncio.create_task(self._list(tenant, self._running.get(tenant)))
            # Its waiters may have left.
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._next[tenant] = waiting
        return waiting

    async def _list(self, tenant: str, before: asyncio.Task[Counted] | None) -> Counted:
        if before is not None:
            await asyncio.wait({before})
        own = self._running[tenant] = self._next.pop(tenant)
        try:
            begun_at = time.monotonic()
            stored = await self._volume.run_list(partial(self._registry.stored, tenant, _Rests()), tenant)
            ended_at = time.monotonic()
            recent_s = max(RECENT_S, RECENT_TIMES * (ended_at - begun_at))
            counted = Counted(stored, begun_at, ended_at + recent_s)
            if self._running.get(tenant) is own:
                self._keep(tenant, counted)
            return counted
        finally:
            if self._running.get(tenant) is own:
                del self._running[tenant]

    def _keep(self, tenant: str, counted: Counted) -> None:
        now = time.monotonic()
        self._kept = OrderedDict(
            (name, kept) for name, kept in self._kept.items() if now <= kept.recent_until
        )
        self._kept[tenant] = counted
        self._kept.move_to_end(tenant)
        num_versions = sum(kept.stored.num_versions for kept in self._kept.values())
        while num_versions > MAX_KEPT:
            _, dropped = self._kept.popitem(last=False)
            num_versions -= dropped.stored.num_versions
        later = [one for one in self._published.get(tenant, ()) if one.published_at >= counted.begun_at]
        if later:
            self._published[tenant][:] = later
        else:
            self._published.pop(tenant, None)


class _Rests:
    """Lets a thread sleep for as long as it has computed since it last did."""

    def __init__(self) -> None:
        self._begun_s: float | None = None

    def __call__(self) -> None:
        if self._begun_s is not None:
            time.sleep(time.thread_time() - self._begun_s)
        self._begun_s = time.thread_time()
