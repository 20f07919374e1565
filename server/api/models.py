"""`/v1/models`: the base and every variant that the tenant may use, in the format of OpenAI's API."""

from __future__ import annotations

import logging
from bisect import bisect_right
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import Response

from deltastore.errors import RegistryError, VariantNotFound
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.api.compat.loaded_adapters import LoadedVersion, loaded_versions
from server.api.json_replies import page_reply
from server.api.schemas import BASE, MAX_PAGE_ENTRIES, Reference
from server.api.service import Service, ServiceDep, TenantDep

OWNER_OF_BASE = "peraxis"

# Other parameters are ignored: clients of OpenAI's API send some of their own.
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE_ENTRIES)]
After = Annotated[str | None, Query(max_length=64)]

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/models")


@router.get("")
async def list_models(
    service: ServiceDep, tenant: TenantDep, limit: Limit = MAX_PAGE_ENTRIES, after: After = None
) -> Response:
    """List the base, then the active version of each variant: loaded or not, or loaded with `--compat vllm-lora`.

    The list comes a page at a time, whose first is the largest one: OpenAI's client asks for no other.
    """
    cards = [_card(service, BASE, None)] if after is None else []
    last, has_more = "" if after in (None, BASE) else after, True
    while has_more and len(cards) < limit:
        num_wanted = limit - len(cards)
        records, last, has_more = await service.volume.run_long(
            partial(_usable, service.registry, tenant.name, last, num_wanted), tenant.name
        )
        if service.settings.compat == "vllm-lora":
            loaded = await loaded_versions(service, tenant, records)
            cards += [_loaded_card(service, each) for each in loaded]
        else:
            cards += [_card(service, record.name, record) for record in records]
    documents = ((card["id"], card) for card in cards)
    return page_reply("data", documents, has_more=has_more, object="list")


@router.get("/{model_id}")
async def show_model(model_id: str, service: ServiceDep, tenant: TenantDep) -> dict[str, Any]:
    """Show one model; ``NAME@VERSION`` names a version."""
    reference = Reference.parse(model_id)
    record = None
    if reference.name is not None:
        record = await service.resolutions.resolve(tenant.name, reference.name, reference.version)
    return _card(service, model_id, record)


def _usable(registry: Registry, tenant: str, after: str, limit: int) -> tuple[list[VersionRecord], str, bool]:
    """Return the active versions of up to `limit` variants by name, the last name read, and whether there are others.

    The tenant's own variants hide public ones of the same name. Reads files.
    """
    names = registry.usable_names(tenant)
    records: list[VersionRecord] = []
    for name in names[bisect_right(names, after) :]:
        if len(records) == limit:
            return records, after, True
        after = name
        try:
            found = registry.usable(tenant, name)
            if found is not None and found.active_record is not None:
                records.append(found.active_record)
        except VariantNotFound:
            # It was deleted meanwhile.
            continue
        except RegistryError as error:
            log.error("variant %s is left out: %s", name, error)
    return records, after, False


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
