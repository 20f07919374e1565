"""Tenants' limits on what they store and pin, asked by routes.

Requests for tokens are admitted in `submission.py`. `server/tenants/limits/` counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from deltastore.registry import Registry
from server.api.service import Service
from server.errors import InvalidRequest, RateLimited
from server.tenants.limits.limiter import Seat
from server.tenants.tenant import Tenant


@asynccontextmanager
async def counted_upload(
    service: Service, tenant: Tenant, size_bytes: int | None, digest: str | None = None
) -> AsyncIterator[None]:
    """Count an upload inside the block: it is under way, and its bytes are reserved.

    Args:
        size_bytes: at most so many bytes come; None if that is unknown.
        digest: SHA-256 of the artifact as hex, if it is known: bytes that the tenant has already need no more space.

    Raises:
        RateLimited: the tenant has too many uploads under way, or would store too many bytes.
        InvalidRequest: the tenant's stored bytes are limited and the size is unknown.
        QueueFull: the limits cannot be known now.
    """
    with counting_refusals(service, tenant):
        seat = await service.limiter.admit_upload(tenant.name, size_bytes or 0)
    try:
        with counting_refusals(service, tenant):
            await _check_stored_bytes(service, tenant, seat, size_bytes, digest)
        yield
    finally:
        seat.release()


@contextmanager
def counting_refusals(service: Service, tenant: Tenant) -> Iterator[None]:
    """Count what a limit of the tenant refuses inside the block."""
    try:
        yield
    except RateLimited as error:
        service.metrics.rejected(tenant.name, error)
        raise


async def _check_stored_bytes(
    service: Service, tenant: Tenant, seat: Seat, size_bytes: int | None, digest: str | None
) -> None:
    most = seat.limits.max_stored_bytes
    if most is None:
        return
    if size_bytes is None:
        raise InvalidRequest(
            f"the stored bytes of tenant {tenant.name!r} are limited: send the upload with its Content-Length",
            "Content-Length",
        )
    # After the bytes were reserved: an upload that ends meanwhile counts twice rather than not at all.
    stored = await service.volume.run_long(
        partial(stored_objects, service.registry, tenant.name), tenant.name
    )
    num_bytes = sum(stored.values()) + seat.reserved_bytes
    if digest not in stored and num_bytes + size_bytes > most:
        raise RateLimited(
            f"tenant {tenant.name!r} may store {most} bytes, has {num_bytes} and sends {size_bytes}: "
            "delete variants or versions first",
            "max_stored_bytes",
        )


def stored_objects(registry: Registry, tenant: str) -> dict[str, int]:
    """Return the bytes of each artifact that a live version of the tenant has, by digest. Reads files."""
    return {
        record.digest: record.size_bytes
        for variant in registry.variants(tenant)
        for record in variant.versions
    }


def num_pinned(service: Service, tenant: str) -> int:
    """Return how many versions the tenant has pinned."""
    return sum(record.tenant == tenant for record in service.engine.pinned)


async def max_pinned(service: Service, tenant: str) -> int:
    """Return how many versions a tenant may pin: by default half of the slots, as pins give way to nobody.

    Without keys there is one tenant, which may pin a version for each slot.

    Raises:
        QueueFull: that cannot be known now.
    """
    num_slots, usage = service.engine.facts.num_slots, await service.limiter.usage(tenant)
    if usage is None:
        return num_slots
    return num_slots // 2 if usage.limits.max_pinned is None else usage.limits.max_pinned
