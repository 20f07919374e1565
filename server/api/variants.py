"""`/variants`: upload, list, promote, delete and download the tenant's variants, and load them into slots.

Uploads go through `uploads.py`, downloads through `downloads.py`, changes of names and versions to the registry, loads
to the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from deltastore.registry.records import VersionRecord
from server.api.artifacts.downloads import ArtifactResponse, etag_of, selected
from server.api.artifacts.publishing import Destination, publication_document
from server.api.artifacts.sources import start_source
from server.api.artifacts.uploads import receive_upload
from server.api.bodies import JSON, json_body, media_type_of
from server.api.json_replies import JsonReply, page_reply
from server.api.schemas import TenantPageQuery, UploadQuery, VariantPatch, VersionQuery, VersionsQuery
from server.api.service import ChangesDep, Service, ServiceDep, TenantDep
from server.api.tenants.limits import counting_refusals, max_pinned
from server.api.variant_lists import ListedVariant, list_one, list_page, show_page, version_document
from server.protocol.messages import DeltaState, LoadAction
from server.tenants.tenant import Tenant

# How long a load, unload, pin or unpin waits for its outcome, so that a refusal is answered with its error.
OUTCOME_S = 1.0

router = APIRouter(prefix="/variants")
log = logging.getLogger(__name__)


@router.post("")
async def upload(
    request: Request, query: Annotated[UploadQuery, Query()], service: ServiceDep, changes: ChangesDep
) -> Response:
    """Publish the body as the next version: 201, or 200 if the variant has these bytes already; 202 for a source."""
    destination = Destination(changes, query.name, query.activate, query.visibility)
    if media_type_of(request) == JSON:
        return await start_source(request, service, destination)
    publication = await receive_upload(request, service, destination)
    return JsonReply(publication_document(publication), 201 if publication.created else 200)


@router.get("")
async def list_variants(
    query: Annotated[TenantPageQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> Response:
    """List the tenant's variants by name, each with its newest versions, a page at a time."""
    listed, has_more = await service.volume.run_list(
        partial(list_page, service.registry, tenant.name, query.after or "", query.limit), tenant.name
    )
    documents = zip((each.name for each in listed), await _documents(service, listed), strict=True)
    return page_reply("variants", documents, has_more=has_more)


@router.get("/{name}")
async def show_variant(
    name: str, query: Annotated[VersionsQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> Response:
    """Show one variant: its versions with their reports and the level of each, a page at a time."""
    shown = await service.volume.run_list(
        partial(show_page, service.registry, tenant.name, name, query.after, query.limit), tenant.name
    )
    (document,) = await _documents(service, [shown])
    versions = document.pop("versions")
    documents = ((str(version["version"]), version) for version in versions)
    return page_reply("versions", documents, has_more=shown.has_more, **document)


@router.patch("/{name}")
async def change_variant(
    name: str,
    body: Annotated[VariantPatch, Depends(json_body(VariantPatch))],
    service: ServiceDep,
    changes: ChangesDep,
) -> dict[str, Any]:
    """Promote or roll back, or make the variant public or private. Running requests keep their digest."""
    if body.active is not None:
        await service.volume.run_long(partial(changes.promote, name, body.active), changes.tenant.name)
    if body.visibility is not None:
        await service.volume.run_long(
            partial(changes.set_visibility, name, body.visibility), changes.tenant.name
        )
    listed = await service.volume.run_long(
        partial(list_one, service.registry, changes.tenant.name, name), changes.tenant.name
    )
    (document,) = await _documents(service, [listed])
    return document


@router.delete("/{name}")
async def delete(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, changes: ChangesDep
) -> dict[str, Any]:
    """Delete a variant or a version. New requests are refused at once; running ones end normally."""
    deleted = await service.volume.run_long(partial(changes.delete, name, query.version), changes.tenant.name)
    for record in deleted.records:
        _log_failure(service.engine.load("unload", record), "unload", record)
    return {"name": name, "deleted": deleted.versions}


@router.post("/{name}/load", status_code=202)
async def load(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> dict[str, Any]:
    """Load a version into a slot before a request needs it."""
    record = await _resolve(service, tenant, name, query)
    service.check_base(record)
    return await _status_after(service, record, "load")


@router.post("/{name}/unload", status_code=202)
async def unload(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> dict[str, Any]:
    """Unpin a version and free its slot once no request uses it, unless another variant of these bytes is loaded."""
    record = await _resolve(service, tenant, name, query)
    return await _status_after(service, record, "unload")


@router.post("/{name}/pin", status_code=202)
async def pin(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, changes: ChangesDep
) -> dict[str, Any]:
    """Load a version and never evict it."""
    record = await _resolve(service, changes.tenant, name, query)
    service.check_base(record)
    return await _status_after(service, record, "pin", partial(changes.note, "pin", record))


@router.post("/{name}/unpin", status_code=202)
async def unpin(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, changes: ChangesDep
) -> dict[str, Any]:
    """Allow eviction of a pinned version again, unless another variant of the same bytes is pinned."""
    record = await _resolve(service, changes.tenant, name, query)
    return await _status_after(service, record, "unpin", partial(changes.note, "unpin", record))


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
    return ArtifactResponse(
        service.registry, record, selected(request, record), service.downloads, tenant.name
    )


async def _resolve(service: Service, tenant: Tenant, name: str, query: VersionQuery) -> VersionRecord:
    """Return a version of the tenant's own variant: another tenant's public one is as absent here as a private one."""
    return await service.resolutions.resolve(tenant.name, name, query.version, owned=True)


async def _status_after(
    service: Service, record: VersionRecord, action: LoadAction, note: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Start the action, wait up to `OUTCOME_S` for its outcome, then return the version's status.

    Args:
        note: writes the audit line once the action has succeeded, which may be after the reply.
    """
    limit = await max_pinned(service, record.tenant) if action == "pin" else None
    outcome = service.engine.load(action, record, limit)
    if note is not None:
        outcome = service.keep(_noted(service, outcome, record.tenant, note))
    done, _ = await asyncio.wait({outcome}, timeout=OUTCOME_S)
    if done:
        with counting_refusals(service, Tenant(record.tenant)):
            outcome.result()
    else:
        _log_failure(outcome, action, record)
    (state,) = await service.engine.residency_of((record,))
    return {"name": record.name, **version_document(record), **_state_document(state)}


async def _noted(
    service: Service, outcome: asyncio.Future[None], tenant: str, note: Callable[[], None]
) -> None:
    await outcome
    await service.volume.run_long(note, tenant)


def _log_failure(outcome: asyncio.Future[None], action: LoadAction, record: VersionRecord) -> None:
    """Log the error of an action that no call waits for."""

    def report(done: asyncio.Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            log.warning("%s of %s: %s", action, record.label, error)

    outcome.add_done_callback(report)


async def _documents(service: Service, listed: Sequence[ListedVariant]) -> list[dict[str, Any]]:
    """Return the documents of variants, with the state of each version that is shown.

    Versions of the same bytes share a slot, also across tenants. Level, pins and requests are those of each
    version alone.
    """
    refs = [ref for variant in listed for ref in variant.refs]
    states = iter(await service.engine.residency_of(refs))
    return [
        {
            **variant.document,
            "versions": [{**version, **_state_document(next(states))} for version in variant.versions],
        }
        for variant in listed
    ]


def _state_document(state: DeltaState) -> dict[str, Any]:
    return {"level": state.level, "pinned": state.is_pinned, "num_requests": state.num_requests}
