"""`/keys`: make, list and revoke API keys of any tenant. A key is in one reply only, that of its making."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from server.api.bodies import json_body
from server.api.json_replies import JsonReply, page_reply
from server.api.schemas import KeyBody, KeysQuery
from server.api.service import AuditorDep, ServiceDep
from server.errors import InvalidRequest
from server.tenants.audit import Auditor
from server.tenants.keys import KeyStore, NewKey, key_document

router = APIRouter(prefix="/keys")


@router.post("")
async def create_key(
    body: Annotated[KeyBody, Depends(json_body(KeyBody))], service: ServiceDep, auditor: AuditorDep
) -> Response:
    """Make a key: 201 with its text, which is never shown again."""
    made = await service.volume.run_long(partial(_create, service.keys, auditor, body), None)
    reply = {"key": made.text, **key_document(made.id, made.record)}
    return JsonReply(reply, 201, headers={"Cache-Control": "no-store"})


@router.get("")
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


@router.delete("/{key_id}")
async def revoke_key(key_id: str, service: ServiceDep, auditor: AuditorDep) -> dict[str, Any]:
    """Revoke a key. Every server on the registry refuses it within a second."""
    await service.volume.run_long(partial(service.keys.revoke, auditor, key_id), None)
    return {"id": key_id, "revoked": True}


def _create(keys: KeyStore, auditor: Auditor, body: KeyBody) -> NewKey:
    expires_at = None
    if body.expires_in_s is not None:
        expires_at = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=body.expires_in_s)
    return keys.create(auditor, body.tenant, body.roles, expires_at)
