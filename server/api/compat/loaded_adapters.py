"""The variants that `/v1/models` lists for controllers of vLLM, where being listed means loaded. Defines no route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltastore.registry.records import VersionRecord
from server.api.service import Service
from server.protocol.adapters import AdapterChange, LoadedAdapter
from server.tenants.tenant import Tenant


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """The active version of a loaded variant, and the load call that asked for it; None if requests did."""

    record: VersionRecord
    adapter: LoadedAdapter | None


async def adapters_of(service: Service, tenant: Tenant) -> dict[str, LoadedAdapter]:
    """Return what a tenant has loaded with vLLM's call and not unloaded since, by name."""
    adapters = await service.whole.adapters(AdapterChange(tenant.name))
    return {adapter.name: adapter for adapter in adapters}


async def loaded_versions(
    service: Service, tenant: Tenant, records: Sequence[VersionRecord]
) -> list[LoadedVersion]:
    """Return those of a tenant's versions that it has loaded, or that are in memory because requests need them.

    As in vLLM, a name that was loaded stays so until it is unloaded, also while its delta has left memory for others:
    controllers would load it again, and so drive out the next one.
    """
    adapters = await adapters_of(service, tenant)
    states = await service.engine.residency_of(records)
    return [
        LoadedVersion(record, adapters.get(record.name))
        for record, state in zip(records, states, strict=True)
        if record.name in adapters or state.level != "disk"
    ]
