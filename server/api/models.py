"""`/v1/models`, `/tokenize` and `/detokenize`: what a tenant may use, and its tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.api.generation import resolved, version_headers
from server.api.json_io import JsonReply, page_reply, read_json
from server.api.lora_adapters import adapters_of
from server.api.schemas import BASE, MAX_PAGE_ENTRIES, DetokenizeBody, Reference, TokenizeBody
from server.api.service import Service, ServiceDep, TenantDep
from server.protocol.request import check_token_ids
from server.shared_state import LoadedAdapter
from server.tenants.tenant import Tenant
from server.text.service import VariantText
from server.text.tokenizer import too_many_tokens

OWNER_OF_BASE = "peraxis"

# Names that are looked up together.
READ_AHEAD = 100
# The parts of the list. A page's `last_id` says in which one it ends: a name can leave one and come into the other.
OWN, PUBLIC = "own~", "public~"

# Other parameters are ignored: clients of OpenAI's API send some of their own.
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE_ENTRIES)]
After = Annotated[str, Query(max_length=80, pattern=f"^({OWN}|{PUBLIC})?[^~]*$")]

router = APIRouter(prefix="/v1/models")


@router.get("")
async def list_models(
    service: ServiceDep, tenant: TenantDep, limit: Limit = MAX_PAGE_ENTRIES, after: After = ""
) -> Response:
    """List the base, then the active version of each variant: loaded or not, or loaded with `--compat vllm-lora`.

    The tenant's own variants come before the public ones of others. The list comes a page at a time, whose first is the
    largest one: OpenAI's client asks for no other. The next page begins behind `last_id`, or behind a model's id.
    """
    cards = [] if after else [(BASE, _card(service, BASE, None))]
    behind = "" if after == BASE else after
    ids, has_more = await service.volume.run_list(
        partial(_usable_ids, service.registry, tenant.name, behind), tenant.name
    )
    last = None
    while ids and len(cards) < limit:
        some, ids = ids[:READ_AHEAD], ids[READ_AHEAD:]
        last = some[-1]
        id_of = {_name(each): each for each in some}
        records = await service.volume.run_list(
            partial(service.registry.active_records, tenant.name, list(id_of)), tenant.name
        )
        if service.settings.compat == "vllm-lora":
            loaded = await _loaded_cards(service, tenant, records)
            cards += [(id_of[card["id"]], card) for card in loaded]
        else:
            cards += [(id_of[record.name], _card(service, record.name, record)) for record in records]
    if len(cards) > limit:
        cards, last, has_more = cards[:limit], None, True
    return page_reply("data", cards, has_more=has_more or bool(ids), last_id=last, object="list")


@router.get("/{model_id}")
async def show_model(model_id: str, service: ServiceDep, tenant: TenantDep) -> dict[str, Any]:
    """Show one model; ``NAME@VERSION`` names a version."""
    reference = Reference.parse(model_id)
    record = None
    if reference.name is not None:
        record = await service.resolutions.resolve(tenant.name, reference.name, reference.version)
    return _card(service, model_id, record)


def _usable_ids(registry: Registry, tenant: str, behind: str) -> tuple[list[str], bool]:
    """Return what a tenant's requests may use behind an id of the list, each with its part, and whether there is more.

    Of the public names, which any tenant may have made, a page looks at no more than it has entries. Reads files.
    """
    name = _name(behind)
    own = registry.names(tenant)
    public = sorted(set(registry.public_names()).difference(own))
    if behind.startswith(PUBLIC) or (behind == name and name in public):
        own, public = [], public[bisect_right(public, name) :]
    else:
        own = own[bisect_right(own, name) :]
    found = [OWN + each for each in own] + [PUBLIC + each for each in public[:MAX_PAGE_ENTRIES]]
    return found, len(public) > MAX_PAGE_ENTRIES


def _name(list_id: str) -> str:
    return list_id.removeprefix(OWN).removeprefix(PUBLIC)


async def _loaded_cards(
    service: Service, tenant: Tenant, records: Sequence[VersionRecord]
) -> list[dict[str, Any]]:
    """Return the cards of the versions that a tenant has loaded, or that are in memory because requests need them.

    For controllers of vLLM, being listed means loaded. As in vLLM, a name that was loaded stays so until it is
    unloaded, also while its delta has left memory for others: controllers would load it again, and so drive out the
    next one.
    """
    adapters = await adapters_of(service, tenant)
    states = await service.engine.residency_of([record.label for record in records], tenant.name)
    return [
        _loaded_card(service, record, adapters.get(record.name))
        for record, state in zip(records, states, strict=True)
        if record.name in adapters or state.level != "disk"
    ]


def _loaded_card(service: Service, record: VersionRecord, adapter: LoadedAdapter | None) -> dict[str, Any]:
    """Return the card of a loaded variant with the `root` and `created` that controllers of vLLM expect.

    Args:
        adapter: the load call that asked for it; None if requests did.
    """
    card = _card(service, record.name, record)
    if adapter is None:
        return {**card, "root": record.name}
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
        "max_model_len": service.engine.facts.max_model_len_of(record),
    }


tokens_router = APIRouter()

B = TypeVar("B", TokenizeBody, DetokenizeBody)


@tokens_router.post("/tokenize")
async def tokenize(request: Request, service: ServiceDep, tenant: TenantDep) -> Response:
    """Answer with the token ids of a prompt or a conversation, as a request for tokens would have them."""
    async with _read(request, service, tenant, TokenizeBody) as (body, text, headers, max_tokens):
        if body.prompt is not None:
            ids = await text.encode(body.prompt, max_tokens, body.add_special_tokens is not False)
        else:
            ids = (await text.render_chat(body.conversation(), max_tokens)).ids
        strings = await text.token_strings(ids) if body.return_token_strs else None
    reply: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": max_tokens,
        "tokens": ids,
        "token_strs": strings,
    }
    return JsonReply(reply, headers=headers)


@tokens_router.post("/detokenize")
async def detokenize(request: Request, service: ServiceDep, tenant: TenantDep) -> Response:
    """Answer with the text of token ids, special tokens included."""
    async with _read(request, service, tenant, DetokenizeBody) as (body, text, headers, max_tokens):
        ids = body.token_ids()
        if len(ids) > max_tokens:
            raise too_many_tokens(len(ids), max_tokens, "tokens")
        check_token_ids(ids, text.num_embeddings, "tokens")
        prompt = await text.decode(list(ids), skip_special_tokens=False)
    return JsonReply({"prompt": prompt}, headers=headers)


@asynccontextmanager
async def _read(
    request: Request, service: Service, tenant: Tenant, kind: type[B]
) -> AsyncIterator[tuple[B, VariantText, dict[str, str], int]]:
    """Yield the body, the text of the model that it names, by default the base, its headers and its longest context.

    The call counts as one request of the tenant, before its body is read.
    """
    service.check_ready()
    admission = await service.admissions.admit(tenant.name)
    try:
        with ExitStack() as held:
            body = await read_json(request, kind, held)
            reference = Reference.parse(body.model)
            record = await resolved(service, tenant, reference)
            headers = version_headers(reference.name or BASE, record)
            max_tokens = service.engine.facts.max_model_len_of(record)
            yield body, await service.text.of(record, tenant.name), headers, max_tokens
    finally:
        admission.release()
