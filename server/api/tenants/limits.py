"""Tenants' limits on what they store and pin, asked by routes.

Requests for tokens are admitted in `submission.py`. `server/tenants/limits/rate_limiter.py` counts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial

from deltastore.registry.reader import Stored
from deltastore.registry.uploads import SealedUpload
from server.api.service import Service
from server.errors import RateLimited
from server.tenants.limits.admission import Admission
from server.tenants.tenant import Tenant


@asynccontextmanager
async def counted_upload(
    service: Service, tenant: Tenant, name: str, size_bytes: int | None, digest: str | None = None
) -> AsyncIterator[CountedUpload]:
    """Count an upload of a variant's version inside the block: it is under way, and its bytes are reserved.

    Args:
        size_bytes: at most so many bytes come; None if that is unknown.
        digest: SHA-256 of the artifact as hex, if it is known: bytes that the tenant has already need no more space.

    Raises:
        RateLimited: the tenant has too many uploads under way, or would store more than it may.
        QueueFull: the limits cannot be known now.
    """
    with counting_refusals(service, tenant):
        admission = await service.admissions.admit_upload(tenant.name, size_bytes or 0)
        try:
            upload = CountedUpload(service, tenant, name, admission, size_bytes)
            await upload.begin(digest)
            yield upload
        finally:
            admission.release()


class CountedUpload:
    """An upload under way, and the limits of what its tenant may store. What is stored above a limit stays.

    A variant or version more than a limit may come of each upload that ends at the same moment.
    """

    def __init__(
        self, service: Service, tenant: Tenant, name: str, admission: Admission, size_bytes: int | None
    ) -> None:
        self._service = service
        self._tenant = tenant.name
        self._name = name
        self._admission = admission
        self._limits = admission.limits
        self._size_bytes = size_bytes
        # Without a limit, and for bytes that are stored already, nothing is counted.
        self._counts_bytes = False
        self._stored_bytes = 0
        self._num_bytes = 0

    async def begin(self, digest: str | None) -> None:
        """Refuse what cannot be published, as far as that is known before the first byte."""
        if not self._has_limits():
            return
        # After the bytes were reserved: an upload that ends meanwhile counts twice rather than not at all.
        others, found = await self._admission.grow(), await self._stored()
        self._check_count(found, digest)
        self._counts_bytes = self._limits.max_stored_bytes is not None and digest not in found.objects
        self._stored_bytes = sum(found.objects.values())
        self._check_bytes(others, self._size_bytes or 0)

    async def counted(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yield the chunks, and count them as they come if it was not known how many would."""
        async with aclosing(chunks):
            async for chunk in chunks:
                if self._size_bytes is None and self._counts_bytes:
                    self._num_bytes += len(chunk)
                    self._check_bytes(await self._admission.grow(len(chunk)), self._num_bytes)
                yield chunk

    async def check(self, sealed: SealedUpload) -> None:
        """Refuse a complete upload that its tenant may not publish any more."""
        if not self._has_limits():
            return
        others, found = await self._admission.grow(), await self._stored()
        self._check_count(found, sealed.digest)
        # Bytes of a known number were reserved before any came.
        if self._size_bytes is None and sealed.digest not in found.objects:
            self._stored_bytes = sum(found.objects.values())
            self._check_bytes(others, sealed.size_bytes)

    def _has_limits(self) -> bool:
        limits = self._limits
        return (limits.max_stored_bytes, limits.max_variants, limits.max_versions) != (None, None, None)

    async def _stored(self) -> Stored:
        return await self._service.volume.run_long(
            partial(self._service.registry.stored, self._tenant), self._tenant
        )

    def _check_count(self, stored: Stored, digest: str | None) -> None:
        """Refuse a variant or version too many; without a digest, the version may be one that exists."""
        num_versions, num_variants = stored.num_versions.get(self._name, 0), len(stored.num_versions)
        most = self._limits.max_variants
        if not num_versions and most is not None and num_variants >= most:
            raise RateLimited(
                f"tenant {self._tenant!r} may have {most} variants (max_variants) and has {num_variants}: "
                "delete variants first",
                "max_variants",
            )
        most = self._limits.max_versions
        is_new = digest is not None and not stored.has(self._name, digest)
        if most is not None and num_versions >= most and is_new:
            raise RateLimited(
                f"tenant {self._tenant!r} may have {most} versions of a variant (max_versions), and {self._name!r} has "
                f"{num_versions}: delete versions first",
                "max_versions",
            )

    def _check_bytes(self, others: int, size_bytes: int) -> None:
        most, num_bytes = self._limits.max_stored_bytes, self._stored_bytes + others
        if self._counts_bytes and most is not None and num_bytes + size_bytes > most:
            raise RateLimited(
                f"tenant {self._tenant!r} may store {most} bytes (max_stored_bytes), has {num_bytes} and sends "
                f"{size_bytes}: delete variants or versions first",
                "max_stored_bytes",
            )


@contextmanager
def counting_refusals(service: Service, tenant: Tenant) -> Iterator[None]:
    """Count what a limit of the tenant refuses inside the block."""
    try:
        yield
    except RateLimited as error:
        service.metrics.rejected(tenant.name, error)
        raise


def num_pinned(service: Service, tenant: str) -> int:
    """Return how many versions the tenant has pinned."""
    return sum(record.tenant == tenant for record in service.engine.pinned)


async def max_pinned(service: Service, tenant: str) -> int:
    """Return how many versions a tenant may pin: by default half of the slots, as pins never give way.

    Without keys there is one tenant, which may pin a version for each slot.

    Raises:
        QueueFull: that cannot be known now.
    """
    num_slots, usage = service.engine.facts.num_slots, await service.admissions.usage(tenant)
    if usage is None:
        return num_slots
    return num_slots // 2 if usage.limits.max_pinned is None else usage.limits.max_pinned
