"""The versions that names mean: as the registry says, or while it cannot be asked, as it said last."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from deltastore.errors import RegistryUnavailable, VariantNotFound, VariantQuarantined
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.fairness import FairCache
from server.registry_calls import RegistryCalls

# Approximate bound on all records that are remembered. Beyond it, the tenant with the most loses those that it has
# used least recently.
MAX_BYTES = 64 << 20
RECORD_BYTES = 2 << 10
CHUNK_BYTES = 120

# The tenant that asks, a name, and the number of a version; None is the active one.
Key = tuple[str, str, int | None]


@dataclass(frozen=True, slots=True)
class Remembered:
    """An answer of the registry.

    Attributes:
        record: the version that was meant.
        at: `time.monotonic()` when the registry was asked.
    """

    record: VersionRecord
    at: float


class Resolutions:
    """Resolves names for one process. Event loop only.

    Args:
        is_in_memory: tells whether the engine can serve a version without the registry, for the tenant that asks.
        max_age_s: the age until which an answer is given again without asking the registry. 0 for a directory, where
            asking takes microseconds; above 0, changes by other servers are seen later by so much.
    """

    def __init__(
        self,
        registry: Registry,
        calls: RegistryCalls,
        is_in_memory: Callable[[VersionRecord, str], Awaitable[bool]],
        max_age_s: float = 0.0,
    ) -> None:
        self._registry = registry
        self._calls = calls
        self._is_in_memory = is_in_memory
        self._max_age_s = max_age_s
        self._remembered: FairCache[Key, Remembered] = FairCache(MAX_BYTES)

    async def resolve(
        self, tenant: str, name: str, version: int | None = None, *, owned: bool = False
    ) -> VersionRecord:
        """Return the version that a request means; the arguments are those of `Registry.resolve`.

        Raises:
            VariantNotFound, VariantQuarantined: as `Registry.resolve` does.
            RegistryUnavailable: the registry cannot be asked, and the version is unknown or not in memory.
        """
        key = (tenant, name, version)
        known = self._known(key, owned)
        if known is not None and time.monotonic() - known.at < self._max_age_s:
            return known.record
        asked = time.monotonic()
        resolve = partial(self._registry.resolve, tenant, name, version, owned=owned)
        try:
            record = await self._calls.run(resolve, tenant, ("resolve", *key, owned))
        except (VariantNotFound, VariantQuarantined):
            # The name alone first, since its answer counts for its version.
            for stale in ((tenant, name, None), key):
                answer = self._known(stale, owned)
                if answer is not None and version in (None, answer.record.version):
                    self._remembered.drop(stale)
            raise
        except RegistryUnavailable:
            if known is None or not await self._is_in_memory(known.record, tenant):
                raise
            return known.record
        self._remembered.put(key, Remembered(record, asked), tenant, _num_bytes(record))
        return record

    def _known(self, key: Key, owned: bool) -> Remembered | None:
        known = self._remembered.get(key)
        if known is None:
            # The answer to the name alone is one to its version, too.
            active = self._remembered.get((*key[:2], None))
            known = active if active is not None and active.record.version == key[2] else None
        # A tenant's own variant hides public ones, so its answer holds for both kinds of questions.
        return known if known is None or not owned or known.record.tenant == key[0] else None


def _num_bytes(record: VersionRecord) -> int:
    return RECORD_BYTES + CHUNK_BYTES * len(record.chunk_sha256)
