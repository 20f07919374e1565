"""`/variants`: upload, list, promote, delete and download the tenant's variants, and load them into slots.

Uploads go through `uploads.py`, downloads through `downloads.py`, changes of names and versions to the registry, loads
to the engine.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from deltastore.errors import PeraxisError, RegistryError
from deltastore.registry.records import VersionRecord
from deltastore.registry.variants import Variant
from server.api.artifacts.downloads import ArtifactResponse, etag_of, selected
from server.api.artifacts.uploads import receive_upload
from server.api.bodies import json_body
from server.api.json_replies import JsonReply
from server.api.schemas import ActivateBody, UploadQuery, VersionQuery
from server.api.service import Service, ServiceDep, TenantDep
from server.tenants import Tenant

# How long a load, unload, pin or unpin waits for its outcome, so that a refusal is answered with its error.
OUTCOME_S = 1.0

router = APIRouter(prefix="/variants")
log = logging.getLogger(__name__)


@router.post("")
async def upload(
    request: Request, query: Annotated[UploadQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> Response:
    """Publish the body as the next version: 201, or 200 if the variant has these bytes already."""
    publication = await receive_upload(request, service, tenant, query.name, activate=query.activate)
    record = publication.record
    reply = {
        "name": record.name,
        "version": record.version,
        "digest": f"sha256:{record.digest}",
        "size_bytes": record.size_bytes,
        "active": publication.active_version == record.version,
    }
    return JsonReply(reply, 201 if publication.created else 200)


@router.get("")
async def list_variants(service: ServiceDep, tenant: TenantDep) -> dict[str, Any]:
    """List every variant of the tenant."""
    variants = await run_in_threadpool(service.registry.variants, tenant.name)
    return {"variants": [_document(service, variant) for variant in variants]}


@router.get("/{name}")
async def show_variant(name: str, service: ServiceDep, tenant: TenantDep) -> dict[str, Any]:
    """Show one variant: its versions and the level of each."""
    return _document(service, await run_in_threadpool(service.registry.variant, tenant.name, name))


@router.patch("/{name}")
async def activate(
    name: str,
    body: Annotated[ActivateBody, Depends(json_body(ActivateBody))],
    service: ServiceDep,
    tenant: TenantDep,
) -> dict[str, Any]:
    """Promote or roll back. Running requests keep their digest."""
    await run_in_threadpool(service.registry.activate, tenant.name, name, body.active)
    return _document(service, await run_in_threadpool(service.registry.variant, tenant.name, name))


@router.delete("/{name}")
async def delete(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> dict[str, Any]:
    """Delete a variant or a version. New requests are refused at once; running ones end normally."""
    gone = await run_in_threadpool(_delete, service, tenant, name, query.version)
    return {"name": name, "deleted": gone}


@router.post("/{name}/load", status_code=202)
async def load(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> dict[str, Any]:
    """Load a version into a slot before a request needs it."""
    record = await _resolve(service, tenant, name, query)
    return await _status_after(service, record, "load", service.backend.engine.load(record))


@router.post("/{name}/unload", status_code=202)
async def unload(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> dict[str, Any]:
    """Free a version's slot as soon as no request uses it."""
    record = await _resolve(service, tenant, name, query)
    return await _status_after(service, record, "unload", service.backend.engine.unload(record))


@router.post("/{name}/pin", status_code=202)
async def pin(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> dict[str, Any]:
    """Load a version and never evict it."""
    record = await _resolve(service, tenant, name, query)
    return await _status_after(service, record, "pin", service.backend.engine.pin(record))


@router.post("/{name}/unpin", status_code=202)
async def unpin(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> dict[str, Any]:
    """Allow eviction of a pinned version again."""
    record = await _resolve(service, tenant, name, query)
    return await _status_after(service, record, "unpin", service.backend.engine.unpin(record))


@router.get("/{name}/artifact")
async def download(
    name: str,
    query: Annotated[VersionQuery, Query()],
    request: Request,
    service: ServiceDep,
    tenant: TenantDep,
) -> Response:
    """Send the artifact as it was uploaded, whole or in ranges."""
    record = await _resolve(service, tenant, name, query)
    etag = etag_of(record)
    if etag in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers={"ETag": etag})
    return ArtifactResponse(service.registry, record, selected(request, record), service.downloads)


async def _resolve(service: Service, tenant: Tenant, name: str, query: VersionQuery) -> VersionRecord:
    return await run_in_threadpool(service.registry.resolve, tenant.name, name, query.version)


async def _status_after(
    service: Service, record: VersionRecord, action: str, future: Future[None]
) -> dict[str, Any]:
    """Wait up to `OUTCOME_S` for the engine's outcome, then return the version's status."""
    wrapped = asyncio.wrap_future(future)
    done, _ = await asyncio.wait({wrapped}, timeout=OUTCOME_S)
    if done:
        wrapped.result()
    else:
        # Retrieve a later error, or asyncio would log it, too.
        wrapped.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        _log_failure(future, action, record)
    return {"name": record.name, **_version_document(service, record)}


def _log_failure(future: Future[None], action: str, record: VersionRecord) -> None:
    """Log the error of an action that no call waits for."""

    def report(done: Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, PeraxisError):
            log.warning("%s of %s: %s", action, record.label, error)

    future.add_done_callback(report)


def _delete(service: Service, tenant: Tenant, name: str, version: int | None) -> list[int]:
    """Delete, then free the slots of digests that no other variant has. Return the deleted version numbers."""
    registry = service.registry
    try:
        variant = registry.variant(tenant.name, name)
    except RegistryError as error:
        # A record is damaged, and deleting the variant repairs that.
        log.warning("deleting %s/%s, which cannot be read: %s", tenant.name, name, error)
        registry.delete(tenant.name, name, version)
        return [] if version is None else [version]
    registry.delete(tenant.name, name, version)
    gone = [record for record in variant.versions if version in (None, record.version)]
    kept = {record.digest for other in registry.variants() for record in other.versions}
    for record in gone:
        if record.digest not in kept:
            _log_failure(service.backend.engine.unload(record), "unload", record)
    return [record.version for record in gone]


def _document(service: Service, variant: Variant) -> dict[str, Any]:
    versions = [_version_document(service, record) for record in variant.versions]
    return {"name": variant.name, "active": variant.active, "versions": versions}


def _version_document(service: Service, record: VersionRecord) -> dict[str, Any]:
    return {
        "version": record.version,
        "digest": f"sha256:{record.digest}",
        "size_bytes": record.size_bytes,
        "device_bytes": record.device_bytes,
        "method": record.method,
        "fidelity": record.fidelity,
        "created_at": record.created_at,
        "level": service.backend.engine.level_of(record.digest),
        "pinned": service.backend.engine.is_pinned(record.digest),
        "num_requests": service.backend.engine.num_requests_on(record.digest),
    }
