"""`/v1/models`: the base and every variant that the tenant may use, in the format of OpenAI's API."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any

from fastapi import APIRouter

from deltastore.registry.records import VersionRecord
from server.api.compat.loaded_adapters import LoadedVersion, loaded_versions
from server.api.schemas import BASE, Reference
from server.api.service import Service, ServiceDep, TenantDep
from server.tenants.tenant import Tenant

OWNER_OF_BASE = "peraxis"

router = APIRouter(prefix="/v1/models")


@router.get("")
async def list_models(service: ServiceDep, tenant: TenantDep) -> dict[str, Any]:
    """List the base, then the active version of each variant: loaded or not, or loaded with `--compat vllm-lora`."""
    records = await service.volume.run_long(partial(_usable, service, tenant), tenant.name)
    if service.settings.compat == "vllm-lora":
        cards = [_loaded_card(service, loaded) for loaded in await loaded_versions(service, tenant, records)]
    else:
        cards = [_card(service, record.name, record) for record in records]
    return {"object": "list", "data": [_card(service, BASE, None), *cards]}


@router.get("/{model_id}")
async def show_model(model_id: str, service: ServiceDep, tenant: TenantDep) -> dict[str, Any]:
    """Show one model; ``NAME@VERSION`` names a version."""
    reference = Reference.parse(model_id)
    record = None
    if reference.name is not None:
        record = await service.resolutions.resolve(tenant.name, reference.name, reference.version)
    return _card(service, model_id, record)


def _usable(service: Service, tenant: Tenant) -> list[VersionRecord]:
    """Return the active version of each variant by name; the tenant's own variants hide public ones."""
    return [
        record
        for variant in service.registry.usable(tenant.name)
        for record in variant.versions
        if record.version == variant.active
    ]


def _loaded_card(service: Service, loaded: LoadedVersion) -> dict[str, Any]:
    """Return the card of a loaded variant with the `root` and `created` that controllers of vLLM expect."""
    card, adapter = _card(service, loaded.record.name, loaded.record), loaded.adapter
    if adapter is None:
        return {**card, "root": loaded.record.name}
    return {**card, "root": adapter.path, "created": int(adapter.loaded_at)}


def _card(service: Service, model_id: str, record: VersionRecord | None) -> dict[str, Any]:
    created = service.started_at if record is None else datetime.fromisoformat(record.created_at).timestamp()
    return {
        "id": model_id,
        "object": "model",
        "created": int(created),
        "owned_by": OWNER_OF_BASE if record is None else record.tenant,
        "root": service.engine.facts.base.id,
        "parent": None if record is None else BASE,
        "max_model_len": service.engine.facts.max_model_len,
    }
