"""`POST /tokenize` and `POST /detokenize`: a variant's tokenizer, in the shapes of vLLM's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.api.bodies import read_json
from server.api.json_replies import JsonReply
from server.api.openai.schemas import DetokenizeBody, TokenizeBody
from server.api.schemas import BASE, Reference
from server.api.service import Service, ServiceDep, TenantDep
from server.api.submission import resolved, version_headers
from server.errors import InvalidRequest
from server.tenants.tenant import Tenant
from server.text.conversation import Conversation
from server.text.variant_text import VariantText

router = APIRouter()

B = TypeVar("B", TokenizeBody, DetokenizeBody)


@router.post("/tokenize")
async def tokenize(request: Request, service: ServiceDep, tenant: TenantDep) -> Response:
    """Answer with the token ids of a prompt or a conversation, as a request for tokens would have them."""
    async with _read(request, service, tenant, TokenizeBody) as (body, text, headers):
        max_tokens = service.engine.facts.max_model_len
        if body.prompt is not None:
            ids = await text.encode(body.prompt, max_tokens, body.add_special_tokens is not False)
        else:
            conversation = Conversation(
                body.conversation(), body.add_generation_prompt, bool(body.add_special_tokens)
            )
            ids = await text.render_chat(conversation, max_tokens)
        strings = await text.token_strings(ids) if body.return_token_strs else None
    reply: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": max_tokens,
        "tokens": ids,
        "token_strs": strings,
    }
    return JsonReply(reply, headers=headers)


@router.post("/detokenize")
async def detokenize(request: Request, service: ServiceDep, tenant: TenantDep) -> Response:
    """Answer with the text of token ids, special tokens included."""
    async with _read(request, service, tenant, DetokenizeBody) as (body, text, headers):
        max_tokens = service.engine.facts.max_model_len
        if len(body.tokens) > max_tokens:
            raise InvalidRequest(
                f"there are {len(body.tokens)} tokens, more than the {max_tokens} that fit: send fewer",
                "tokens",
            )
        if max(body.tokens, default=0) >= text.num_embeddings:
            raise InvalidRequest(f"token ids must be from 0 to {text.num_embeddings - 1}", "tokens")
        prompt = await text.decode(body.tokens, skip_special_tokens=False)
    return JsonReply({"prompt": prompt}, headers=headers)


@asynccontextmanager
async def _read(
    request: Request, service: Service, tenant: Tenant, kind: type[B]
) -> AsyncIterator[tuple[B, VariantText, dict[str, str]]]:
    """Yield the body, the text of the model that it names, by default the base, and the headers of its version.

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
            yield body, await service.text.of(record, tenant.name), headers
    finally:
        admission.release()
