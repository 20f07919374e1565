"""Publishing from a source: a job that fetches an artifact of a hub or an allowed directory.

A source is a file of a hub, or below a directory that the operator allowed. Its artifact is checked and published as
an upload is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, TypeVarTuple

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from deltastore.errors import ArtifactTooLarge, PeraxisError, VariantNotFound
from deltastore.registry import Publication
from deltastore.registry.records import check_names
from deltastore.registry.uploads import SealedUpload
from server.api.errors import error_body, http_request_id_of
from server.api.json_io import JsonReply, json_body
from server.api.publishing import (
    WRITE_BYTES,
    Destination,
    check,
    counted,
    counted_upload,
    gathered,
    publication_document,
    publish,
    sealed_upload,
)
from server.api.schemas import SourceBody, TenantQuery
from server.api.service import Service, ServiceDep, TenantDep
from server.errors import InvalidRequest, SourceUnavailable, WorkerDied, WorkerTimeout
from server.publishing import hub
from server.publishing.directories import PARAM, opened_artifact, size_of
from server.publishing.hub import SCHEME, HubFile, HubReference
from server.publishing.source_jobs import Progress
from server.shared_state import FindSourceJob, SourceJob
from server.workers.pool import WorkerPool
from server.workers.worker_main import Limits

log = logging.getLogger(__name__)

# To find a file on a hub: three replies of its API.
FIND_S = 60.0
# To download a file, beside its bytes at the speed of a slow hub.
DOWNLOAD_S = 120.0
HUB_BYTES_PER_S = 1e6
# Reading from a socket, decrypting and writing to a pipe.
CPU_BYTES_PER_S = 50e6
MEMORY_BYTES = 512 << 20

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def file_chunks(service: Service, descriptor: int) -> AsyncGenerator[bytes, None]:
    """Yield an open file in chunks. Reads on background threads."""
    offset = 0
    while chunk := await service.run_in_background(os.pread, descriptor, WRITE_BYTES, offset):
        offset += len(chunk)
        yield chunk


async def find_on_hub(workers: WorkerPool, tenant: str, reference: HubReference, hub_url: str) -> HubFile:
    """Find a file on a hub; raises as `hub.find_file` does."""
    limits = Limits(MEMORY_BYTES, FIND_S)
    return await _run(workers, tenant, FIND_S, limits, hub.find_file, reference, hub_url)


async def hub_chunks(
    workers: WorkerPool, tenant: str, file: HubFile, hub_url: str, max_bytes: int
) -> AsyncGenerator[bytes, None]:
    """Yield a hub's file in chunks while a worker downloads it. Closing the generator kills the worker.

    Raises:
        SourceUnavailable: the hub failed, or took too long for `max_bytes`.
    """
    loop = asyncio.get_running_loop()
    deadline_s = DOWNLOAD_S + max_bytes / HUB_BYTES_PER_S
    limits = Limits(MEMORY_BYTES, DOWNLOAD_S + max_bytes / CPU_BYTES_PER_S)
    with tempfile.TemporaryDirectory(prefix="peraxis-source-", ignore_cleanup_errors=True) as directory:
        pipe = os.path.join(directory, "pipe")
        os.mkfifo(pipe, 0o600)
        read_end = os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
        # This end stays open until the worker is done, so that the reader does not see the end of the pipe before.
        write_end = os.open(pipe, os.O_WRONLY | os.O_CLOEXEC)
        reader = asyncio.StreamReader(limit=WRITE_BYTES)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), read_end)
        fetching = asyncio.create_task(
            _run(workers, tenant, deadline_s, limits, hub.download, file, hub_url, pipe)
        )
        fetching.add_done_callback(lambda _: os.close(write_end))
        try:
            while chunk := await reader.read(WRITE_BYTES):
                yield chunk
            await fetching
        finally:
            transport.close()
            fetching.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({fetching})


async def _run(
    workers: WorkerPool,
    tenant: str,
    deadline_s: float,
    limits: Limits,
    function: Callable[[*Ts], T],
    *args: *Ts,
) -> T:
    try:
        return await workers.run(tenant, deadline_s, function, *args, limits=limits)
    except WorkerTimeout as error:
        raise SourceUnavailable(
            f"the hub did not send the file within {deadline_s:g} s: try again later"
        ) from error
    except WorkerDied as error:
        raise SourceUnavailable(f"the hub's answer could not be read: {error}") from error
    except RuntimeError as error:
        log.warning("a download for tenant %s failed", tenant, exc_info=error)
        raise SourceUnavailable("the hub cannot be reached: try again later") from error


# Seconds after which a client should ask again.
POLL_S = "1"

router = APIRouter(prefix="/variants/{name}/sources")
_source_body = json_body(SourceBody)


@dataclass(frozen=True, slots=True)
class SourceBytes:
    """The artifact of a source, on its way."""

    pieces: AsyncGenerator[bytes, None]
    size_bytes: int | None
    sha256: str | None  # as the source names it


async def start_source(request: Request, service: Service, destination: Destination) -> Response:
    """Answer `POST /variants` with a source: 202, and the job that publishes it.

    Raises:
        InvalidRequest, UsageError: no source that this server publishes from.
        PublicNameTaken: the variant is to be public, and another tenant's of this name is.
        QueueFull: the tenant has as many running jobs as it may, or no base was ever loaded.
    """
    body = await _source_body(request)
    check_names(destination.tenant.name, destination.name)
    if destination.visibility is not None:
        await service.volume.run_long(
            partial(destination.changes.check_visibility, destination.name, destination.visibility),
            destination.tenant.name,
        )
    reference = _reference(service, body.source)
    # Refuse while no base was ever loaded: without one, no artifact can be checked.
    _ = service.engine.facts
    job = SourceJob(
        id=secrets.token_hex(12),
        tenant=destination.tenant.name,
        name=destination.name,
        source=body.source,
        started_at=time.time(),
    )
    http_request_id = http_request_id_of(request)

    async def work(progress: Progress) -> dict[str, Any]:
        publishing = _publish(service, destination, reference, progress)
        return publication_document(await counted(service, publishing))

    await service.source_jobs.start(job, work, partial(_error, http_request_id))
    location = f"/variants/{job.name}/sources/{job.id}"
    if "tenant" in request.query_params:
        location += f"?tenant={job.tenant}"
    return JsonReply(_document(job), 202, headers={"Location": location, "Retry-After": POLL_S})


@router.get("/{source_id}")
async def show_source(
    name: str,
    source_id: str,
    query: Annotated[TenantQuery, Query()],
    service: ServiceDep,
    tenant: TenantDep,
) -> Response:
    """Show a job: running, done with what an upload would have been answered, or failed with its error."""
    job = await service.shared.ask(FindSourceJob(tenant.name, name, source_id))
    if job is None:
        raise VariantNotFound(
            "there is no such publication from a source: it ended long ago, or the server was restarted"
        )
    return JsonReply(_document(job), headers={"Retry-After": POLL_S} if job.status == "running" else {})


def _reference(service: Service, source: str) -> HubReference | str:
    """Return what a source names, a path as it is; raise InvalidRequest if this server does not publish from it."""
    settings = service.settings
    if source.startswith(SCHEME):
        if not settings.allow_hub:
            raise InvalidRequest(
                "this server publishes from no hub: upload the artifact, or ask the operator for --allow-hub",
                PARAM,
            )
        return HubReference.parse(source)
    if not settings.source_dir:
        raise InvalidRequest(
            "this server publishes from no directory: upload the artifact, or ask the operator for --source-dir",
            PARAM,
        )
    return source


async def _publish(
    service: Service, destination: Destination, reference: HubReference | str, progress: Progress
) -> Publication:
    """Fetch, check and publish. Leaving early removes what was written."""
    async with (
        _opened(service, destination, reference, progress) as found,
        aclosing(found.pieces) as pieces,
    ):
        max_bytes = service.settings.max_upload_bytes
        if found.size_bytes is not None and found.size_bytes > max_bytes:
            raise ArtifactTooLarge(
                f"the artifact has {found.size_bytes} bytes and this server takes {max_bytes}: publish a smaller "
                "one, or raise the server's --max-upload-gb"
            )
        size_bytes = max_bytes if found.size_bytes is None else found.size_bytes
        chunks = gathered(progress.counted(pieces), size_bytes)
        tenant = destination.tenant
        async with (
            counted_upload(service, tenant, destination.name, found.size_bytes, found.sha256) as upload,
            sealed_upload(service, tenant, upload.counted(chunks)) as sealed,
        ):
            _check_whole(sealed, found)
            facts = await check(service, destination, sealed)
            return await publish(service, destination, sealed, facts, upload)


@asynccontextmanager
async def _opened(
    service: Service, destination: Destination, reference: HubReference | str, progress: Progress
) -> AsyncIterator[SourceBytes]:
    """Open a source; its file is closed at the end of the block, also if nothing was read."""
    settings, tenant = service.settings, destination.tenant.name
    async with AsyncExitStack() as stack:
        if isinstance(reference, str):
            opening = opened_artifact(reference, settings.source_dir)
            descriptor = await stack.enter_async_context(service.in_background(opening))
            found = SourceBytes(file_chunks(service, descriptor), size_of(descriptor), None)
        else:
            workers = service.source_jobs.workers
            file = await find_on_hub(workers, tenant, reference, settings.hub_url)
            await progress.report(revision=file.commit)
            max_bytes = min(file.size_bytes or settings.max_upload_bytes, settings.max_upload_bytes)
            pieces = hub_chunks(workers, tenant, file, settings.hub_url, max_bytes)
            found = SourceBytes(pieces, file.size_bytes, file.sha256)
        await progress.report(size_bytes=found.size_bytes)
        yield found


def _check_whole(sealed: SealedUpload, found: SourceBytes) -> None:
    if found.size_bytes not in (None, sealed.size_bytes) or found.sha256 not in (None, sealed.digest):
        raise SourceUnavailable("the artifact changed on its way or did not arrive whole: try again")


def _error(http_request_id: str, error: BaseException) -> dict[str, Any]:
    """Return the `error` of a job as a refused upload has it."""
    known = error if isinstance(error, PeraxisError) else PeraxisError(f"{type(error).__name__}: {error}")
    document: dict[str, Any] = error_body(known, http_request_id)["error"]
    return document


def _document(job: SourceJob) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(job)
    del document["tenant"]
    return document
