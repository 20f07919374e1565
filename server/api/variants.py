"""`/variants`: upload, list, promote, delete and download, and what is to be in a slot. Owners only."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from deltastore.errors import PeraxisError, RegistryError
from deltastore.registry.records import VersionRecord
from deltastore.registry.variants import Variant
from server.api.bodies import json_body
from server.api.ranges import check_range
from server.api.schemas import ActivateBody, UploadQuery, VersionQuery
from server.api.service import CallerDep, Service, ServiceDep
from server.api.uploads import receive_upload
from server.tenants import Tenant

OUTCOME_S = 1.0  # how long a call waits for an outcome that may come at once, above all a refusal

router = APIRouter(prefix="/variants")
log = logging.getLogger(__name__)


@router.post("")
async def upload(
    request: Request, query: Annotated[UploadQuery, Query()], service: ServiceDep, caller: CallerDep
) -> Response:
    """Publish the body as the next version: 201, or 200 for bytes that the variant has already."""
    publication = await receive_upload(request, service, caller, query.name, activate=query.activate)
    record = publication.record
    reply = {
        "name": record.name,
        "version": record.version,
        "digest": f"sha256:{record.digest}",
        "size_bytes": record.size_bytes,
        "active": publication.active_version == record.version,
    }
    return JSONResponse(reply, 201 if publication.created else 200)


@router.get("")
async def list_variants(service: ServiceDep, caller: CallerDep) -> dict[str, Any]:
    """Every variant of the caller."""
    variants = await run_in_threadpool(service.registry.variants, caller.name)
    return {"variants": [_shown(service, variant) for variant in variants]}


@router.get("/{name}")
async def show_variant(name: str, service: ServiceDep, caller: CallerDep) -> dict[str, Any]:
    """One variant: its versions and where each is now."""
    return _shown(service, await run_in_threadpool(service.registry.variant, caller.name, name))


@router.patch("/{name}")
async def activate(
    name: str,
    body: Annotated[ActivateBody, Depends(json_body(ActivateBody))],
    service: ServiceDep,
    caller: CallerDep,
) -> dict[str, Any]:
    """Promote or roll back; requests that run keep the digest they began with."""
    await run_in_threadpool(service.registry.activate, caller.name, name, body.active)
    return _shown(service, await run_in_threadpool(service.registry.variant, caller.name, name))


@router.delete("/{name}")
async def delete(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, caller: CallerDep
) -> dict[str, Any]:
    """Delete a variant or a version: new requests are refused at once, running ones end."""
    gone = await run_in_threadpool(_delete, service, caller, name, query.version)
    return {"name": name, "deleted": gone}


@router.post("/{name}/load", status_code=202)
async def load(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, caller: CallerDep
) -> dict[str, Any]:
    """Bring a version into a slot before the first request does."""
    record = await _resolve(service, caller, name, query)
    return await _begun(service, record, "load", service.engine.load(record))


@router.post("/{name}/unload", status_code=202)
async def unload(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, caller: CallerDep
) -> dict[str, Any]:
    """Free a version's slot as soon as no request runs on it."""
    record = await _resolve(service, caller, name, query)
    return await _begun(service, record, "unload", service.engine.unload(record))


@router.post("/{name}/pin", status_code=202)
async def pin(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, caller: CallerDep
) -> dict[str, Any]:
    """Load a version and never evict it."""
    record = await _resolve(service, caller, name, query)
    return await _begun(service, record, "pin", service.engine.pin(record))


@router.post("/{name}/unpin", status_code=202)
async def unpin(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, caller: CallerDep
) -> dict[str, Any]:
    """Let a version be evicted again."""
    record = await _resolve(service, caller, name, query)
    return await _begun(service, record, "unpin", service.engine.unpin(record))


@router.get("/{name}/artifact")
async def download(
    name: str,
    query: Annotated[VersionQuery, Query()],
    request: Request,
    service: ServiceDep,
    caller: CallerDep,
) -> Response:
    """The artifact as it was uploaded, whole or in ranges."""
    record = await _resolve(service, caller, name, query)
    etag = f'"sha256:{record.digest}"'
    if etag in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers={"ETag": etag})
    check_range(request.headers.get("range"), record.size_bytes)
    return FileResponse(
        service.registry.object_path(record.digest),
        headers={"ETag": etag},
        media_type="application/octet-stream",
        filename=f"{record.name}-{record.version}.safetensors",
    )


async def _resolve(service: Service, caller: Tenant, name: str, query: VersionQuery) -> VersionRecord:
    return await run_in_threadpool(service.registry.resolve, caller.name, name, query.version)


async def _begun(service: Service, record: VersionRecord, what: str, future: Future[None]) -> dict[str, Any]:
    """The status after asking the engine for something; what goes on longer is not waited for."""
    wrapped = asyncio.wrap_future(future)
    done, _ = await asyncio.wait({wrapped}, timeout=OUTCOME_S)
    if done:
        wrapped.result()
    else:
        wrapped.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # else asyncio logs it too
        _watch(future, what, record)
    return {"name": record.name, **_shown_version(service, record)}


def _watch(future: Future[None], what: str, record: VersionRecord) -> None:
    """Log the failure of what nobody waits for."""

    def report(done: Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, PeraxisError):
            log.warning("%s of %s/%s@%s: %s", what, record.tenant, record.name, record.version, error)

    future.add_done_callback(report)


def _delete(service: Service, caller: Tenant, name: str, version: int | None) -> list[int]:
    """Delete, then free the slots of what nobody else has. Returns the numbers that are gone."""
    registry = service.registry
    try:
        variant = registry.variant(caller.name, name)
    except RegistryError as error:  # a damaged record: deleting is the way out
        log.warning("deleting %s/%s, which cannot be read: %s", caller.name, name, error)
        registry.delete(caller.name, name, version)
        return [] if version is None else [version]
    registry.delete(caller.name, name, version)
    gone = [record for record in variant.versions if version in (None, record.version)]
    kept = {record.digest for other in registry.variants() for record in other.versions}
    for record in gone:
        if record.digest not in kept:
            _watch(service.engine.unload(record), "unload", record)
    return [record.version for record in gone]


def _shown(service: Service, variant: Variant) -> dict[str, Any]:
    versions = [_shown_version(service, record) for record in variant.versions]
    return {"name": variant.name, "active": variant.active, "versions": versions}


def _shown_version(service: Service, record: VersionRecord) -> dict[str, Any]:
    return {
        "version": record.version,
        "digest": f"sha256:{record.digest}",
        "size_bytes": record.size_bytes,
        "device_bytes": record.device_bytes,
        "method": record.method,
        "fidelity": record.fidelity,
        "created_at": record.created_at,
        "level": service.engine.level_of(record.digest),
        "pinned": service.engine.is_pinned(record.digest),
        "num_requests": service.engine.in_use(record.digest),
    }
