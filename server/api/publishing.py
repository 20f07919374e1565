"""Publish a stream of bytes as a variant's next version within the tenant's limits: write, check, publish.

The functions stand in the order in which a publication runs through them. The registry owns the files.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio

from deltastore.errors import ArtifactError, ArtifactTooLarge
from deltastore.format.header import check_prefix
from deltastore.registry import Publication
from deltastore.registry.records import ArtifactFacts, Visibility
from deltastore.registry.uploads import SealedUpload, Upload
from server.api.errors import is_the_clients
from server.api.service import Service
from server.errors import QueueFull, RateLimited
from server.registry_calls import free_bytes
from server.tenants.admission import Admission
from server.tenants.changes import VariantChanges
from server.tenants.stored import Counted
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

    A variant or version more than a limit may come of each other process that publishes at the same moment.
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
        most = self._limits
        given = most.max_stored_bytes, most.max_stored_versions, most.max_variants, most.max_versions
        # Without a limit of bytes, a tenant has its part of a volume.
        has_any = isinstance(service.registry.files.root, Path) or any(each is not None for each in given)
        self._has_limits = service.settings.auth == "keys" and has_any
        # Without a limit, and for bytes that are stored already, nothing is counted.
        self._counts_bytes = False
        self._stored_bytes = 0
        self._num_bytes = 0

    async def begin(self, digest: str | None) -> None:
        """Refuse what cannot be published, as far as that is known before the first byte."""
        if not self._has_limits:
            return
        # After the bytes were reserved: an upload that ends meanwhile counts twice rather than not at all.
        others, found = await self._admission.grow(), await self._service.stored.recent(self._tenant)
        self._check_count(found, digest)
        self._counts_bytes = digest is None or not found.has_artifact(digest)
        self._stored_bytes = found.num_bytes
        await self._check_bytes(others, self._size_bytes or 0)

    async def counted(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yield the chunks, and count them as they come if it was not known how many would."""
        async with aclosing(chunks):
            async for chunk in chunks:
                if self._size_bytes is None and self._counts_bytes:
                    self._num_bytes += len(chunk)
                    others = await self._admission.grow(len(chunk))
                    await self._check_bytes(others, self._num_bytes, num_written=self._num_bytes - len(chunk))
                yield chunk

    @asynccontextmanager
    async def publishing(self, sealed: SealedUpload) -> AsyncIterator[None]:
        """Count a complete upload as stored, from the beginning of a block that publishes it.

        Raises:
            RateLimited: its tenant may not publish it any more. The block is not entered.
        """
        if not self._has_limits:
            yield
            return
        counts = self._service.stored
        others, found = await self._admission.grow(), await counts.now(self._tenant)
        # Nothing is waited for between the check of numbers and the moment from which the upload counts.
        self._check_count(found, sealed.digest)
        with counts.publishing(self._tenant, self._name, sealed.digest, sealed.size_bytes):
            # Bytes of a known number were reserved before any came.
            if self._size_bytes is None and not found.has_artifact(sealed.digest):
                self._stored_bytes = found.num_bytes
                await self._check_bytes(others, sealed.size_bytes, num_written=sealed.size_bytes)
            yield

    def _check_count(self, stored: Counted, digest: str | None) -> None:
        """Refuse a variant or version too many; without a digest, the version may be one that exists."""
        num_versions, num_variants = stored.num_versions_of(self._name), stored.num_variants
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
        most = self._limits.max_stored_versions
        if most is not None and stored.num_versions >= most and is_new:
            raise RateLimited(
                f"tenant {self._tenant!r} may have {most} versions of all variants (max_stored_versions) and has "
                f"{stored.num_versions}: delete variants or versions first",
                "max_stored_versions",
            )

    async def _check_bytes(self, others: int, size_bytes: int, num_written: int = 0) -> None:
        """Refuse an upload of so many bytes, of which some are on the volume already."""
        if not self._counts_bytes:
            return
        most, num_bytes = self._limits.max_stored_bytes, self._stored_bytes + others
        if most is not None:
            if num_bytes + size_bytes > most:
                raise self._too_many_bytes(f"{most} bytes", num_bytes, size_bytes)
            return
        registry = self._service.registry
        free = await self._service.volume.run(partial(free_bytes, registry.files.root), self._tenant)
        # So a tenant alone may have half of a volume, two a third each, and the next one always finds room.
        if free is not None and num_bytes + size_bytes > (left := free - (size_bytes - num_written)):
            raise self._too_many_bytes(
                f"as many bytes as it leaves free, {max(0, left)},", num_bytes, size_bytes
            )

    def _too_many_bytes(self, most: str, num_bytes: int, size_bytes: int) -> RateLimited:
        return RateLimited(
            f"tenant {self._tenant!r} may store {most} (max_stored_bytes), has {num_bytes} and sends {size_bytes}: "
            "delete variants or versions first",
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


# Uploads of one tenant at a time in this process. Each keeps up to 2 MB in memory.
MAX_UPLOADS_PER_TENANT = 16
# Bytes that are gathered before a thread writes them.
WRITE_BYTES = 1 << 20
# The bytes at the beginning of an artifact that tell it from most other files.
PREFIX_BYTES = 9


@dataclass(frozen=True, slots=True)
class Destination:
    """The variant that an artifact becomes a version of."""

    changes: VariantChanges
    name: str
    activate: bool  # the new version becomes the active one
    visibility: Visibility | None = None  # None leaves it as it is; a new variant is private

    @property
    def tenant(self) -> Tenant:
        return self.changes.tenant


async def counted(service: Service, publishing: Coroutine[Any, Any, Publication]) -> Publication:
    """Await a publication and count its outcome: ``failed`` is the server's fault, which operators are told of.

    It ends with RegistryUnavailable if the volume hangs.
    """
    outcomes = service.metrics.uploads_total
    try:
        publication = await service.volume.unless_hanging(publishing)
    except BaseException as error:
        outcomes.labels(result="rejected" if is_the_clients(error) else "failed").inc()
        raise
    outcomes.labels(result="created" if publication.created else "duplicate").inc()
    return publication


async def gathered(pieces: AsyncIterator[bytes], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the artifact in chunks of `WRITE_BYTES` or more; the last may be less.

    Raises:
        ArtifactError: its first bytes show that it is none, or that it has more than `max_bytes`.
    """
    chunk, is_begun = bytearray(), False
    async for piece in pieces:
        chunk += piece
        if not is_begun and len(chunk) >= PREFIX_BYTES:
            is_begun = True
            check_prefix(bytes(chunk[:PREFIX_BYTES]), max_bytes)
        if len(chunk) >= WRITE_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


@contextmanager
def one_more_upload(service: Service, tenant: Tenant) -> Iterator[None]:
    """Count an upload of a tenant inside the block; raise QueueFull if it has too many under way."""
    num_uploads = service.num_uploads
    if num_uploads[tenant.name] >= MAX_UPLOADS_PER_TENANT:
        raise QueueFull(
            f"{MAX_UPLOADS_PER_TENANT} uploads are under way: send this one when another has ended"
        )
    num_uploads[tenant.name] += 1
    try:
        yield
    finally:
        num_uploads[tenant.name] -= 1


@asynccontextmanager
async def sealed_upload(
    service: Service, tenant: Tenant, chunks: AsyncGenerator[bytes, None]
) -> AsyncIterator[SealedUpload]:
    """Write the chunks to the registry and yield the complete upload. Leaving the block removes it unless published.

    Raises:
        QueueFull: the tenant's unfinished uploads have too many bytes.
    """
    with service.unfinished.growing(tenant.name) as hold:
        async with _written(service, chunks, hold) as sealed:
            yield sealed


@asynccontextmanager
async def _written(
    service: Service, chunks: AsyncGenerator[bytes, None], hold: Callable[[int], None]
) -> AsyncIterator[SealedUpload]:
    async with _open_upload(service) as upload:
        service.artifact_checks.prepare()
        async with aclosing(chunks), WriteBehind(service, upload) as writer:
            async for chunk in chunks:
                hold(len(chunk))
                await writer.write(chunk)
        yield await service.run_in_background(upload.seal)


async def check(service: Service, destination: Destination, sealed: SealedUpload) -> ArtifactFacts:
    """Check that this server can serve an upload; raises as `ArtifactChecks.check` does."""
    engine = service.engine.facts
    # vLLM's tables are made for the longest sequence when it starts.
    longest = engine.longest if service.settings.backend == "vllm" else None
    return await service.artifact_checks.check(
        destination.tenant.name,
        sealed.path,
        sealed.size_bytes,
        engine.base,
        engine.slot_bytes,
        engine.unread,
        longest,
    )


async def publish(
    service: Service,
    destination: Destination,
    sealed: SealedUpload,
    facts: ArtifactFacts,
    counted_as: CountedUpload,
) -> Publication:
    """Publish an upload. A cancelled caller still waits until it has ended.

    Raises:
        InvalidApiKey: the caller's key was revoked since the upload began.
        RateLimited: the tenant has as many variants, versions or bytes as it may by now.
    """
    async with counted_as.publishing(sealed):
        # Last: what stands before takes as long as the client or the registry likes.
        if (key_id := destination.changes.auditor.key_id) is not None:
            await service.keys.check_stands(key_id)
        return await service.run_in_background(
            destination.changes.publish,
            sealed,
            facts,
            destination.name,
            activate=destination.activate,
            visibility=destination.visibility,
        )


async def publish_file(service: Service, destination: Destination, descriptor: int) -> Publication:
    """Publish an open file of this machine as the next version of a variant, and count the outcome.

    Raises:
        ArtifactError, BaseMismatch, ArtifactTooLarge: an artifact that this server cannot serve.
        StorageFull: the registry's disk is full.
        QueueFull: the tenant has `MAX_UPLOADS_PER_TENANT` uploads under way in this process.
        RateLimited: the tenant is over its limit of uploads or of stored bytes.
    """
    return await counted(service, _publish_file(service, destination, descriptor))


async def _publish_file(service: Service, destination: Destination, descriptor: int) -> Publication:
    size_bytes = os.fstat(descriptor).st_size
    check_size(size_bytes, service.settings.max_upload_bytes, "artifact")
    chunks = gathered(_file_chunks(service, descriptor), size_bytes)
    with one_more_upload(service, destination.tenant):
        async with (
            counted_upload(service, destination.tenant, destination.name, size_bytes) as upload,
            sealed_upload(service, destination.tenant, upload.counted(chunks)) as sealed,
        ):
            if sealed.size_bytes != size_bytes:
                raise ArtifactError("the artifact changed while it was read: send the request again")
            facts = await check(service, destination, sealed)
            return await publish(service, destination, sealed, facts, upload)


async def _file_chunks(service: Service, descriptor: int) -> AsyncGenerator[bytes, None]:
    """Yield an open file in chunks. Reads on background threads."""
    offset = 0
    while chunk := await service.run_in_background(os.pread, descriptor, WRITE_BYTES, offset):
        offset += len(chunk)
        yield chunk


def check_size(size_bytes: int, max_bytes: int, what: str) -> None:
    """Raise ArtifactTooLarge for an artifact of more bytes than the server takes."""
    if size_bytes > max_bytes:
        raise ArtifactTooLarge(
            f"the {what} has {size_bytes} bytes and this server takes {max_bytes}: send a smaller one, "
            "or raise the server's --max-upload-gb"
        )


async def check_visibility(service: Service, destination: Destination) -> None:
    """Raise PublicNameTaken if the variant is to be public, and another tenant's of this name is."""
    if destination.visibility is not None:
        await service.volume.run_long(
            partial(destination.changes.check_visibility, destination.name, destination.visibility),
            destination.tenant.name,
        )


def publication_document(publication: Publication) -> dict[str, Any]:
    """Return the JSON document that a publication is answered with."""
    record = publication.record
    return {
        "name": record.name,
        "version": record.version,
        "digest": f"sha256:{record.digest}",
        "size_bytes": record.size_bytes,
        "active": publication.active_version == record.version,
    }


@asynccontextmanager
async def _open_upload(service: Service) -> AsyncIterator[Upload]:
    """Open the registry's upload and remove its partial file on a thread: unlinking gigabytes takes long."""
    async with service.in_background(
        service.registry.open_upload(service.settings.max_upload_bytes)
    ) as upload:
        yield upload


class WriteBehind:
    """Write and hash each chunk on a thread while the next one arrives.

    Leaving the `async with` block waits for the last write, even when the block is cancelled. Afterwards nothing writes
    to the upload.
    """

    def __init__(self, service: Service, upload: Upload) -> None:
        self._service = service
        self._upload = upload
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> WriteBehind:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writing is None:
            return
        with anyio.CancelScope(shield=True):
            await asyncio.gather(self._writing, return_exceptions=True)
        if error is None:
            self._writing.result()

    async def write(self, chunk: bytes) -> None:
        """Start to write a chunk once the previous one is written; raise the error of the previous write."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
        self._writing = asyncio.create_task(self._write(chunk))

    async def _write(self, chunk: bytes) -> None:
        await self._service.run_in_background(self._upload.write, chunk)
        self._service.metrics.upload_bytes_total.inc(len(chunk))
