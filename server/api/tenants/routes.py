"""`/me`: the caller, its limits and its usage. `/tenants`: every tenant and its limits, for administrators."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from server.api.bodies import json_body
from server.api.service import AuditorDep, CallerDep, Service, ServiceDep
from server.api.tenants.limits import num_pinned, stored_objects
from server.tenants.audit import Auditor, Change
from server.tenants.limits.tenant_limits import TenantLimits, plain

me_router = APIRouter()
router = APIRouter(prefix="/tenants")


@me_router.get("/me")
async def me(service: ServiceDep, caller: CallerDep) -> dict[str, Any]:
    """Show the caller's tenant, roles, key, limits and usage. Without keys there are no limits, and nothing counts."""
    tenant = caller.tenant.name
    counted = await service.limiter.usage(tenant)
    stored = await service.volume.run_long(partial(stored_objects, service.registry, tenant), tenant)
    return {
        "tenant": tenant,
        "roles": sorted(caller.roles),
        "key": await service.volume.run_long(partial(_key, service, tenant, caller.key_id), tenant),
        "limits": plain(TenantLimits() if counted is None else counted.limits),
        "usage": {
            "requests_last_minute": None if counted is None else counted.num_requests,
            "tokens_last_minute": None if counted is None else counted.num_tokens,
            "running": None if counted is None else counted.num_running,
            "uploads": None if counted is None else counted.num_uploads,
            "stored_bytes": sum(stored.values()),
            "pinned": num_pinned(service, tenant),
        },
    }


@router.get("")
async def list_tenants(service: ServiceDep) -> dict[str, Any]:
    """List every tenant that has a key, a variant or limits of its own, by name, and the limits of all others."""
    tenants = await service.volume.run_long(partial(_tenants, service), None)
    return {"tenants": tenants, "default_limits": plain(service.settings.default_limits)}


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


def _set_limits(service: Service, auditor: Auditor, name: str, limits: TenantLimits) -> None:
    service.limits.write(name, limits)
    auditor.write(Change("set_limits", name, limits=limits))


def _tenants(service: Service) -> list[dict[str, Any]]:
    """Return the document of each tenant. Reads files."""
    keys = Counter(record.tenant for record in service.keys.records().values())
    variants = Counter(variant.tenant for variant in service.registry.variants())
    own = service.limits.own()
    return [
        {
            "name": name,
            "limits": plain(own.get(name, service.settings.default_limits)),
            "has_own_limits": name in own,
            "num_keys": keys[name],
            "num_variants": variants[name],
        }
        for name in sorted({*keys, *variants, *own})
    ]


def _key(service: Service, tenant: str, key_id: str | None) -> dict[str, Any] | None:
    """Return the document of a tenant's key; None without one, as with `--auth none`."""
    record = service.keys.records(tenant).get(key_id) if key_id is not None else None
    if record is None:
        return None
    return {"id": key_id, "expires_at": record.expires_at}
