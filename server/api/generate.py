"""`POST /generate`: a prompt or a conversation in, one variant's tokens out, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from server.api.text_outputs import ScoredText, SequenceEnd, TextOutputs, TextToken
from server.protocol.request import Request
from server.protocol.sampling_params import SamplingParams
from server.tenants import Tenant
from server.text.variant_text import VariantText

router = APIRouter()


@dataclass(slots=True)
class Output:
    """One of the request's `n` sequences in a whole reply, as it grows."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request in the engine, and its outputs."""

    request: Request
    outputs: TextOutputs


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
    events = RequestEvents(service.engine, service.metrics, http_request_id)
    try:
        submitting = _submit(service, tenant, Reference.parse(query.variant), body, events)
        submitted = await while_connected(request, submitting)
        if not body.stream:
            reply = await while_connected(request, _gather(submitted))
            return JsonReply(reply, headers=_headers(submitted.request))
        # Wait for the first output: an error before it, such as a failed load, still gets its own status.
        first = await while_connected(request, submitted.outputs.take())
    except BaseException:
        events.cancel()
        raise
    content = _stream(submitted, first, http_request_id)
    headers = {**_headers(submitted.request), "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return EventStream(events, content, headers)


async def _submit(
    service: Service, tenant: Tenant, reference: Reference, body: GenerateBody, events: RequestEvents
) -> Submitted:
    """Resolve the version, tokenize and submit."""
    with _counting_refusals(service, tenant):
        service.check_ready()
    record = None
    if reference.name is not None:
        record = await run_in_threadpool(
            service.registry.resolve, tenant.name, reference.name, reference.version
        )
    with _counting_refusals(service, tenant):
        text = await service.text.of(record, tenant.name)
        max_tokens = service.engine.facts.max_model_len
        if body.prompt is None:
            ids = await text.render_chat(body.conversation(), max_tokens)
        else:
            ids = await text.encode(body.prompt, max_tokens)
        params = _sampling_params(body, text, max_tokens - len(ids))
        request = Request(
            events.request_id, tenant.name, reference.name, record, tuple(ids), text.num_embeddings, params
        )
        events.submit(request)
    return Submitted(request, TextOutputs(events, request, text))


@contextmanager
def _counting_refusals(service: Service, tenant: Tenant) -> Iterator[None]:
    """Count a request that is refused inside the block."""
    try:
        yield
    except PeraxisError as error:
        service.metrics.rejected(tenant.name, error)
        raise


def _sampling_params(body: GenerateBody, text: VariantText, max_new_tokens: int) -> SamplingParams:
    """Return what the body asks for, with the variant's defaults; a default length is cut to `max_new_tokens`."""
    defaults = dict(text.generation_defaults)
    default_length = defaults.get("max_new_tokens", SamplingParams().max_new_tokens)
    defaults["max_new_tokens"] = max(1, min(default_length, max_new_tokens))
    return SamplingParams(**{**defaults, **body.sampling_params()}, stop_token_ids=text.eos_token_ids)


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


async def _gather(submitted: Submitted) -> dict[str, Any]:
    """Return the whole reply, once the request is done."""
    params = submitted.request.sampling_params
    outputs = [Output() for _ in range(params.n)]
    while taken := await submitted.outputs.take():
        for output in taken:
            whole = outputs[output.index]
            whole.text.append(output.text)
            if isinstance(output, SequenceEnd):
                whole.finish_reason = output.reason
            else:
                whole.token_ids.append(output.token_id)
                if output.scored is not None:
                    whole.logprobs.append(_logprobs(output, output.scored))
    shown = [
        {
            "text": "".join(whole.text),
            "token_ids": whole.token_ids,
            "finish_reason": whole.finish_reason,
            **({} if params.logprobs is None else {"logprobs": whole.logprobs}),
        }
        for whole in outputs
    ]
    return {**_identity(submitted.request), "outputs": shown, **_totals(submitted)}


async def _stream(
    submitted: Submitted, first: list[TextToken | SequenceEnd], http_request_id: str
) -> AsyncIterator[bytes]:
    """Yield `token` events, a `finish` per sequence, then `done` with the fields of a whole reply, or `error`."""
    taken = first
    try:
        while taken:
            # What came at once leaves at once.
            yield b"".join(map(_shown, taken))
            taken = await submitted.outputs.take()
        yield server_sent_event("done", {**_identity(submitted.request), **_totals(submitted)})
    except PeraxisError as error:
        yield server_sent_event("error", error_body(error, http_request_id))


def _shown(output: TextToken | SequenceEnd) -> bytes:
    if isinstance(output, SequenceEnd):
        finish = {"index": output.index, "finish_reason": output.reason, "text": output.text}
        return server_sent_event("finish", finish)
    token: dict[str, Any] = {"index": output.index, "token_id": output.token_id, "text": output.text}
    if output.scored is not None:
        token["logprobs"] = [_logprobs(output, output.scored)]
    return server_sent_event("token", token)


def _logprobs(token: TextToken, scored: ScoredText) -> dict[str, Any]:
    return {**_scored(scored), "top": [_scored(each) for each in token.top]}


def _scored(scored: ScoredText) -> dict[str, Any]:
    return {"token_id": scored.token_id, "text": scored.text, "logprob": scored.logprob}


def _totals(submitted: Submitted) -> dict[str, Any]:
    num_prompt, num_new = len(submitted.request.prompt_ids), submitted.outputs.num_tokens
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }
    return {"usage": usage, "timings": submitted.outputs.timings}
