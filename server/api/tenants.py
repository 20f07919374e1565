"""`/me`: the caller, its limits and its usage. For administrators, `/tenants` and `/keys`: limits and keys of all."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from server.api.json_io import JsonReply, json_body, page_reply
from server.api.publishing import num_pinned
from server.api.schemas import KeyBody, KeysQuery, TenantPageQuery
from server.api.service import AuditorDep, CallerDep, Service, ServiceDep
from server.errors import InvalidRequest, QueueFull
from server.tenants.changes import Auditor, Change
from server.tenants.keys import KeyStore, NewKey, key_document
from server.tenants.tenant import TenantLimits, Usage, plain

me_router = APIRouter()
router = APIRouter(prefix="/tenants")
keys_router = APIRouter(prefix="/keys")


@me_router.get("/me")
async def me(service: ServiceDep, caller: CallerDep) -> dict[str, Any]:
    """Show the caller's tenant, roles, key, limits and usage. Without keys there are no limits, and nothing counts."""
    tenant = caller.tenant.name
    counted = await service.admissions.usage(tenant)
    found = await service.stored.now(tenant)
    return {
        "tenant": tenant,
        "roles": sorted(caller.roles),
        "key": await service.volume.run_long(partial(_key, service, tenant, caller.key_id), tenant),
        "limits": plain(TenantLimits() if counted is None else counted.limits),
        "usage": _usage(service, tenant, counted, found.num_bytes),
    }


@router.get("")
async def list_tenants(query: Annotated[TenantPageQuery, Query()], service: ServiceDep) -> Response:
    """List every tenant with a key, a variant or limits of its own, a page at a time, and the limits of all others.

    `usage` is as in `/me`; what cannot be counted now is null.
    """
    documents, has_more = await service.volume.run_list(partial(_tenants, service, query), None)
    counted = await asyncio.gather(*(_counted(service, each["name"]) for each in documents))
    for each, usage in zip(documents, counted, strict=True):
        each["usage"] = _usage(service, each["name"], usage, each.pop("stored_bytes"))
    return page_reply(
        "tenants",
        ((each["name"], each) for each in documents),
        has_more=has_more,
        default_limits=plain(service.settings.default_limits),
    )


@router.put("/{name}")
async def set_limits(
    name: str,
    body: Annotated[TenantLimits, Depends(json_body(TenantLimits))],
    service: ServiceDep,
    auditor: AuditorDep,
) -> dict[str, Any]:
    """Replace a tenant's limits; one that is left out is unlimited. Every server counts by them within a second."""
    await service.volume.run_long(partial(_set_limits, service, auditor, name, body), None)
    return {"name": name, "limits": plain(body), "has_own_limits": True}


@keys_router.post("")
async def create_key(
    body: Annotated[KeyBody, Depends(json_body(KeyBody))], service: ServiceDep, auditor: AuditorDep
) -> Response:
    """Make a key: 201 with its text, which is never shown again."""
    made = await service.volume.run_long(partial(_create_key, service.keys, auditor, body), None)
    reply = {"key": made.text, **key_document(made.id, made.record)}
    return JsonReply(reply, 201, headers={"Cache-Control": "no-store"})


@keys_router.get("")
async def list_keys(query: Annotated[KeysQuery, Query()], service: ServiceDep) -> Response:
    """List every key, or one tenant's, oldest first, without its text, a page at a time."""
    records = await service.volume.run_long(partial(service.keys.records, query.tenant), None)
    ids, begin = list(records), 0
    if query.after is not None:
        if query.after not in records:
            raise InvalidRequest(
                "after: there is no such key any more: list the keys from the first", "after"
            )
        begin = ids.index(query.after) + 1
    end = begin + query.limit
    documents = ((key_id, key_document(key_id, records[key_id])) for key_id in ids[begin:end])
    return page_reply("keys", documents, has_more=end < len(ids))


@keys_router.delete("/{key_id}")
async def revoke_key(key_id: str, service: ServiceDep, auditor: AuditorDep) -> dict[str, Any]:
    """Revoke a key. Every server on the registry refuses it within a second."""
    await service.volume.run_long(partial(service.keys.revoke, auditor, key_id), None)
    return {"id": key_id, "revoked": True}


async def _counted(service: Service, tenant: str) -> Usage | None:
    """Return what the server counts of a tenant; None if its limits cannot be read or nothing counts."""
    try:
        return await service.admissions.usage(tenant)
    except QueueFull:
        return None


def _usage(service: Service, tenant: str, counted: Usage | None, stored_bytes: int) -> dict[str, Any]:
    return {
        "requests_last_minute": None if counted is None else counted.num_requests,
        "tokens_last_minute": None if counted is None else counted.num_tokens,
        "running": None if counted is None else counted.num_running,
        "uploads": None if counted is None else counted.num_uploads,
        "stored_bytes": stored_bytes,
        "pinned": num_pinned(service, tenant),
    }


def _set_limits(service: Service, auditor: Auditor, name: str, limits: TenantLimits) -> None:
    service.limits.write(name, limits)
    auditor.write(Change("set_limits", name, limits=limits))


def _tenants(service: Service, query: TenantPageQuery) -> tuple[list[dict[str, Any]], bool]:
    """Return the documents of a page of tenants by name, and whether there are others behind them. Reads files."""
    keys = Counter(record.tenant for record in service.keys.records().values())
    own = service.limits.own()
    found = sorted({*keys, *own, *service.registry.tenants()})
    begin = bisect_right(found, query.after or "")
    end = begin + query.limit
    documents: list[dict[str, Any]] = []
    for name in found[begin:end]:
        stored = service.registry.stored(name)
        documents.append(
            {
                "name": name,
                "limits": plain(own.get(name, service.settings.default_limits)),
                "has_own_limits": name in own,
                "num_keys": keys[name],
                "num_variants": stored.num_variants,
                "num_versions": stored.num_versions,
                "stored_bytes": stored.num_bytes,
            }
        )
    return documents, end < len(found)


def _key(service: Service, tenant: str, key_id: str | None) -> dict[str, Any] | None:
    """Return the document of a tenant's key; None without one, as with `--auth none`."""
    record = service.keys.records(tenant).get(key_id) if key_id is not None else None
    if record is None:
        return None
    return {"id": key_id, "expires_at": record.expires_at}


def _create_key(keys: KeyStore, auditor: Auditor, body: KeyBody) -> NewKey:
    expires_at = None
    if body.expires_in_s is not None:
        expires_at = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=body.expires_in_s)
    return keys.create(auditor, body.tenant, body.roles, expires_at)
