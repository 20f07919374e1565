"""`/variants`: upload, list, promote, delete and download the tenant's variants, and load them into slots.

Uploads go through `uploads.py`, downloads through `downloads.py`, changes of names and versions to the registry, loads
to the engine.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from deltastore.errors import RegistryError, VariantNotFound
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.registry.variants import VariantSummary
from server.api.downloads import ArtifactResponse, etag_of, selected
from server.api.json_io import JSON, MAX_PAGE_BYTES, JsonReply, json_body, media_type_of, page_reply
from server.api.publishing import Destination, counting_refusals, max_pinned, publication_document
from server.api.schemas import UploadQuery, VariantPatch, VariantsQuery, VersionQuery, VersionsQuery
from server.api.service import ChangesDep, Service, ServiceDep, TenantDep
from server.api.uploads import publish_source, receive_upload
from server.protocol.messages import DeltaState, LoadAction
from server.tenants.tenant import Tenant

# How long a load, unload, pin or unpin waits for its outcome, so that a refusal is answered with its error.
OUTCOME_S = 1.0
# The newest versions of a variant that a list of variants shows beside its active one.
NUM_NEWEST = 5
# Records that are read together.
READ_AHEAD = 20

router = APIRouter(prefix="/variants")
log = logging.getLogger(__name__)


@router.post("")
async def upload(
    request: Request, query: Annotated[UploadQuery, Query()], service: ServiceDep, changes: ChangesDep
) -> Response:
    """Publish an artifact as the next version: 201, or 200 if the variant has these bytes already.

    The artifact is the body, or with a body in JSON the file that it names.
    """
    destination = Destination(changes, query.name, query.activate, query.visibility)
    receive = publish_source if media_type_of(request) == JSON else receive_upload
    publication = await receive(request, service, destination)
    return JsonReply(publication_document(publication), 201 if publication.created else 200)


@router.get("")
async def list_variants(
    query: Annotated[VariantsQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> Response:
    """List the tenant's variants by name, each with its newest versions, a page at a time.

    With `search`, only those whose names have this part, in letters of any case. `total` counts them all; it may count
    one too many that was deleted a moment ago.
    """
    page = await service.volume.run_list(
        partial(_list_page, service.registry, tenant.name, query), tenant.name
    )
    found = await _documents(service, page.variants, tenant.name)
    documents = zip((each.name for each in page.variants), found, strict=True)
    return page_reply("variants", documents, has_more=page.has_more, total=page.total)


@router.get("/{name}")
async def show_variant(
    name: str, query: Annotated[VersionsQuery, Query()], service: ServiceDep, tenant: TenantDep
) -> Response:
    """Show one variant: its versions with their reports and the level of each, a page at a time.

    `history` has its promotions, newest first, as far back as the registry keeps them; versions that were published
    with `activate` became active at their `created_at`.
    """
    shown = await service.volume.run_list(
        partial(_show_page, service.registry, tenant.name, name, query.after, query.limit), tenant.name
    )
    (document,) = await _documents(service, [shown], tenant.name)
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
        promote = partial(changes.promote, name, body.active, body.if_active)
        await service.volume.run_long(promote, changes.tenant.name)
    if body.visibility is not None:
        await service.volume.run_long(
            partial(changes.set_visibility, name, body.visibility), changes.tenant.name
        )
    listed = await service.volume.run_long(
        partial(_list_one, service.registry, changes.tenant.name, name), changes.tenant.name
    )
    (document,) = await _documents(service, [listed], changes.tenant.name)
    return document


@router.delete("/{name}")
async def delete(
    name: str, query: Annotated[VersionQuery, Query()], service: ServiceDep, changes: ChangesDep
) -> dict[str, Any]:
    """Delete a variant or a version. New requests are refused at once; running ones end normally."""
    try:
        deleted = await service.volume.run_long(
            partial(changes.delete, name, query.version), changes.tenant.name
        )
    finally:
        # Also after an error: a deletion that is late may be done, or be done later.
        service.stored.deleted(changes.tenant.name)
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
    """Allow eviction of a pinned version again."""
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
    outcome = service.load(action, record, limit)
    if note is not None:
        outcome = service.keep(_noted(service, outcome, record.tenant, note))
    done, _ = await asyncio.wait({outcome}, timeout=OUTCOME_S)
    if done:
        with counting_refusals(service, Tenant(record.tenant)):
            outcome.result()
    else:
        _log_failure(outcome, action, record)
    (state,) = await service.engine.residency_of((record.label,), record.tenant)
    return {"name": record.name, **_version_document(record), **_state_document(state)}


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


async def _documents(service: Service, listed: Sequence[ListedVariant], tenant: str) -> list[dict[str, Any]]:
    """Return the documents of variants, with the state of each version that is shown."""
    labels = [label for variant in listed for label in variant.labels]
    states = iter(await service.engine.residency_of(labels, tenant))
    return [
        {
            **variant.document,
            "versions": [{**version, **_state_document(next(states))} for version in variant.versions],
        }
        for variant in listed
    ]


def _state_document(state: DeltaState) -> dict[str, Any]:
    return {"level": state.level, "pinned": state.is_pinned, "num_requests": state.num_requests}


@dataclass(frozen=True, slots=True)
class ListedVariant:
    """A variant as documents show it, without the state of its versions in memory.

    It refers to no record, which has a digest of each 4 MiB of its artifact.

    Attributes:
        document: the fields beside `versions`.
        versions: the documents of the versions that are shown, the oldest first.
        labels: names these versions to the engine.
        has_more: the variant has versions behind the last one that is shown.
    """

    name: str
    document: dict[str, Any]
    versions: list[dict[str, Any]]
    labels: list[str]
    has_more: bool


@dataclass(frozen=True, slots=True)
class ListedPage:
    """A page of variants, whether there may be others behind it, and how many names the whole list has."""

    variants: list[ListedVariant]
    has_more: bool
    total: int


def _list_page(registry: Registry, tenant: str, query: VariantsQuery) -> ListedPage:
    """Return a page of a tenant's variants."""
    searched = query.search.casefold()
    found = [name for name in registry.names(tenant) if searched in name.casefold()]
    listed: list[ListedVariant] = []
    for index in range(bisect_right(found, query.after or ""), len(found)):
        if len(listed) == query.limit:
            return ListedPage(listed, True, len(found))
        try:
            listed.append(_list_one(registry, tenant, found[index]))
        except VariantNotFound:
            # It was deleted meanwhile.
            continue
        except RegistryError as error:
            log.error("variant %s/%s is left out: %s", tenant, found[index], error)
    return ListedPage(listed, False, len(found))


def _list_one(registry: Registry, tenant: str, name: str) -> ListedVariant:
    """Return a variant with its active version and its newest ones, without their reports.

    Raises:
        VariantNotFound: it has no live version.
    """
    variant = registry.summary(tenant, name)
    newest = variant.numbers[-NUM_NEWEST:]
    records = registry.versions(tenant, name, after=newest[0] - 1, limit=NUM_NEWEST)
    active = variant.active_record
    if active is not None and active.version < newest[0]:
        records = [active, *records]
    return _listed(variant, records, [_version_document(record) for record in records])


def _show_page(registry: Registry, tenant: str, name: str, after: int, limit: int) -> ListedVariant:
    """Return a variant with up to `limit` versions after a number, and the report of each.

    They are fewer if their reports are more than a page holds.

    Raises:
        VariantNotFound: it has no live version.
    """
    variant = registry.summary(tenant, name)
    records: list[VersionRecord] = []
    documents: list[dict[str, Any]] = []
    num_bytes = 0
    for record in _versions(registry, tenant, name, after, limit):
        shown = registry.report(record)
        num_bytes += len(shown)
        if records and num_bytes > MAX_PAGE_BYTES:
            break
        records.append(record)
        documents.append({**_version_document(record), "fidelity": msgspec.Raw(shown)})
    shown_variant = _listed(variant, records, documents)
    shown_variant.document["history"] = [
        {"version": each.version, "promoted_at": each.promoted_at, "key_id": each.promoted_by}
        for each in registry.promotions(tenant, name)
    ]
    return shown_variant


def _versions(registry: Registry, tenant: str, name: str, after: int, limit: int) -> Iterator[VersionRecord]:
    """Yield up to `limit` live versions after a number, and read few that are not asked for."""
    while limit > 0:
        found = registry.versions(tenant, name, after=after, limit=min(limit, READ_AHEAD))
        yield from found
        if len(found) < READ_AHEAD:
            return
        after, limit = found[-1].version, limit - len(found)


def _version_document(record: VersionRecord) -> dict[str, Any]:
    """Return a version without its report and its state in memory."""
    return {
        "version": record.version,
        "digest": f"sha256:{record.digest}",
        "size_bytes": record.size_bytes,
        "device_bytes": record.device_bytes,
        "method": record.method,
        "agreement": record.agreement,
        "kl": record.kl,
        "created_at": record.created_at,
        "activate": record.activate,
    }


def _listed(
    variant: VariantSummary, records: list[VersionRecord], documents: list[dict[str, Any]]
) -> ListedVariant:
    document = {
        "name": variant.name,
        "owner": variant.tenant,
        "visibility": variant.visibility,
        "active": variant.active,
        "previous": variant.previous,
        "num_versions": variant.num_versions,
    }
    labels = [record.label for record in records]
    has_more = bool(records) and records[-1].version < variant.numbers[-1]
    return ListedVariant(variant.name, document, documents, labels, has_more)
