"""`POST /generate`: a prompt or a conversation in, one variant's tokens out, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import fastapi
from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from deltastore.errors import PeraxisError
from server.api.bodies import json_body
from server.api.errors import error_body, http_request_id_of
from server.api.json_replies import JsonReply, server_sent_event
from server.api.request_events import EventStream, RequestEvents, while_connected
from server.api.schemas import BASE, GenerateBody, GenerateQuery, Reference
from server.api.service import AnyService, Service, TenantDep
from server.engine.events import DoneEvent, Event, FinishEvent, TokenEvent
from server.engine.request import Request
from server.sampling_params import SamplingParams
from server.tenants import Tenant
from server.text.tokenizer import VariantTokenizer

router = APIRouter()


@dataclass(slots=True)
class Output:
    """One of the request's `n` sequences in a whole reply, as it grows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


@router.post("/generate")
async def generate(
    request: fastapi.Request,
    query: Annotated[GenerateQuery, Query()],
    body: Annotated[GenerateBody, Depends(json_body(GenerateBody))],
    service: AnyService,
    tenant: TenantDep,
) -> Response:
    """Answer with the tokens of `variant`, or of the base without one."""
    http_request_id = http_request_id_of(request)
    events = RequestEvents(service.backend.engine, http_request_id)
    try:
        submitted = await run_in_threadpool(
            _submit, service, tenant, Reference.parse(query.variant), body, events
        )
        if not body.stream:
            reply = await while_connected(request, _gather(events, *submitted))
            return JsonReply(reply, headers=_headers(submitted[0]))
        # Wait for the first event: an error before it, such as a failed load, still gets its own status.
        first = await while_connected(request, events.next_event())
    except BaseException:
        events.cancel()
        raise
    content = _stream(events, *submitted, first, http_request_id)
    headers = {**_headers(submitted[0]), "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return EventStream(events, content, headers)


def _submit(
    service: Service, tenant: Tenant, reference: Reference, body: GenerateBody, events: RequestEvents
) -> tuple[Request, VariantTokenizer]:
    """Resolve the version, tokenize and submit. Reads files and may take long: not for the event loop."""
    record = None
    if reference.name is not None:
        record = service.registry.resolve(tenant.name, reference.name, reference.version)
    tokenizer = service.backend.tokenizers.of(record)
    prompt = body.prompt
    ids = tokenizer.render_chat(body.conversation()) if prompt is None else tokenizer.encode(prompt)
    params = _sampling_params(body, tokenizer, service.backend.engine.max_model_len - len(ids))
    request = Request(events.request_id, tenant.name, reference.name, record, tuple(ids), params)
    events.submit(request)
    return request, tokenizer


def _sampling_params(body: GenerateBody, tokenizer: VariantTokenizer, max_new_tokens: int) -> SamplingParams:
    """Return what the body asks for, with the variant's defaults; a default length is cut to `max_new_tokens`."""
    defaults = dict(tokenizer.generation_defaults)
    default_length = defaults.get("max_new_tokens", SamplingParams().max_new_tokens)
    defaults["max_new_tokens"] = max(1, min(default_length, max_new_tokens))
    return SamplingParams(**{**defaults, **body.sampling_params()}, stop_token_ids=tokenizer.eos_token_ids)


def _identity(request: Request) -> dict[str, Any]:
    """Return the fields of a reply that name the version; the base has no version and no digest."""
    if request.record is None:
        return {"variant": BASE, "version": None, "digest": None}
    digest = f"sha256:{request.record.digest}"
    return {"variant": request.name, "version": request.record.version, "digest": digest}


def _headers(request: Request) -> dict[str, str]:
    identity = _identity(request)
    headers = {"X-Peraxis-Variant": str(identity["variant"])}
    return headers if request.record is None else {**headers, "X-Peraxis-Digest": str(identity["digest"])}


async def _gather(events: RequestEvents, request: Request, tokenizer: VariantTokenizer) -> dict[str, Any]:
    """Return the whole reply, once the request is done."""
    outputs = [Output() for _ in range(request.sampling_params.n)]
    while not isinstance(event := await events.next_event(), DoneEvent):
        if isinstance(event, TokenEvent):
            outputs[event.index].text += event.text
            outputs[event.index].token_ids.append(event.token_id)
            outputs[event.index].logprobs += _logprobs(event, tokenizer)
        elif isinstance(event, FinishEvent):
            outputs[event.index].text += event.text
            outputs[event.index].finish_reason = event.reason
    shown = [
        {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            **({} if request.sampling_params.logprobs is None else {"logprobs": output.logprobs}),
        }
        for output in outputs
    ]
    return {**_identity(request), "outputs": shown, **_totals(event)}


async def _stream(
    events: RequestEvents, request: Request, tokenizer: VariantTokenizer, first: Event, http_request_id: str
) -> AsyncIterator[bytes]:
    """Yield `token` events, a `finish` per sequence, then `done` with the fields of a whole reply, or `error`."""
    event = first
    try:
        while not isinstance(event, DoneEvent):
            if isinstance(event, TokenEvent):
                token = {"index": event.index, "token_id": event.token_id, "text": event.text}
                if request.sampling_params.logprobs is not None:
                    token["logprobs"] = _logprobs(event, tokenizer)
                yield server_sent_event("token", token)
            elif isinstance(event, FinishEvent):
                finish = {"index": event.index, "finish_reason": event.reason, "text": event.text}
                yield server_sent_event("finish", finish)
            event = await events.next_event()
        yield server_sent_event("done", {**_identity(request), **_totals(event)})
    except PeraxisError as error:
        yield server_sent_event("error", error_body(error, http_request_id))


def _logprobs(event: TokenEvent, tokenizer: VariantTokenizer) -> list[dict[str, Any]]:
    """Return one entry for the token, or none if log-probabilities were not requested."""
    if event.logprob is None:
        return []
    top = [_scored(token_id, logprob, tokenizer) for token_id, logprob in event.top]
    return [{**_scored(event.token_id, event.logprob, tokenizer), "top": top}]


def _scored(token_id: int, logprob: float, tokenizer: VariantTokenizer) -> dict[str, Any]:
    return {"token_id": token_id, "text": tokenizer.decode([token_id]), "logprob": logprob}


def _totals(done: DoneEvent) -> dict[str, Any]:
    usage = {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.generation_tokens,
        "total_tokens": done.prompt_tokens + done.generation_tokens,
    }
    return {"usage": usage, "timings": asdict(done.timings)}
