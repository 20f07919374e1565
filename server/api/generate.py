"""`POST /generate`: a prompt or a conversation in, one variant's tokens out, whole or as server-sent events."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from deltastore.errors import ArtifactError, PeraxisError, VariantNotFound, VariantQuarantined
from deltastore.registry.records import VersionRecord
from server.api.bodies import json_body
from server.api.errors import error_body, request_id_of
from server.api.running import EventStream, Running, while_connected
from server.api.schemas import BASE, GenerateBody, GenerateQuery, Reference
from server.api.service import AnyService, CallerDep, Service
from server.engine.request import DoneEvent, Event, FinishEvent, SamplingParams, TokenEvent
from server.engine.request import Request as EngineRequest
from server.engine.telemetry import REASONS
from server.tenants import Tenant
from server.text.tokenizer import VariantTokenizer

router = APIRouter()


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A parsed request: what to run, on which version and for whom."""

    tenant: str
    name: str | None  # None is the base
    record: VersionRecord | None
    tokenizer: VariantTokenizer
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams

    def request(self, on_event: Callable[[Event], None]) -> EngineRequest:
        """What the engine is given; `on_event` may be called on any thread."""
        return EngineRequest(
            id=secrets.token_hex(16),  # not the client's id, of which two requests may have the same
            tenant=self.tenant,
            name=self.name,
            record=self.record,
            tokenizer=self.tokenizer,
            prompt_ids=self.prompt_ids,
            on_event=on_event,
            sampling=self.sampling,
        )

    def identity(self) -> dict[str, Any]:
        """Whose tokens these are, as replies say it; the base has no version and no digest."""
        if self.record is None:
            return {"variant": BASE, "version": None, "digest": None}
        return {
            "variant": self.name,
            "version": self.record.version,
            "digest": f"sha256:{self.record.digest}",
        }

    def headers(self) -> dict[str, str]:
        identity = self.identity()
        headers = {"X-Peraxis-Variant": str(identity["variant"])}
        return headers if self.record is None else {**headers, "X-Peraxis-Digest": str(identity["digest"])}


@dataclass(slots=True)
class Output:
    """One of the `n` answers, as it grows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


@router.post("/generate")
async def generate(
    request: Request,
    query: Annotated[GenerateQuery, Query()],
    body: Annotated[GenerateBody, Depends(json_body(GenerateBody))],
    service: AnyService,
    caller: CallerDep,
) -> Response:
    """Answer with the tokens of `variant`, or of the base without one."""
    backend = service.backend
    prepared = await run_in_threadpool(_prepare, service, caller, Reference.parse(query.variant), body)
    try:
        running = Running(backend.engine, prepared.request)
    except PeraxisError as error:
        reason = REASONS.get(type(error), "invalid")
        service.metrics.tenant_rejections_total.labels(tenant=caller.name, reason=reason).inc()
        raise
    try:
        if not body.stream:
            reply = await while_connected(request, _gather(running, prepared))
            return JSONResponse(reply, headers=prepared.headers())
        # Until the first event an error still has its own status: a delta that cannot be loaded is no 200.
        first = await while_connected(request, running.next_event())
    except BaseException:
        running.cancel()
        raise
    events = _stream(running, prepared, first, request_id_of(request))
    headers = {**prepared.headers(), "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return EventStream(running, events, headers)


def _prepare(service: Service, caller: Tenant, reference: Reference, body: GenerateBody) -> Prepared:
    """Resolve, tokenize, fill in the variant's defaults. Reads files and may take a while: not for the event loop."""
    record = None
    if reference.name is not None:
        record = service.registry.resolve(caller.name, reference.name, reference.version)
    tokenizer = _tokenizer(service, record)
    if body.prompt is not None:
        ids = tokenizer.encode(body.prompt)
    else:
        ids = tokenizer.render_chat([message.model_dump() for message in body.messages or []])
    defaults = dict(tokenizer.generation_defaults)
    room = service.engine.max_model_len - len(
        ids
    )  # which a default must not exceed; what is asked may be refused
    wanted = defaults.get("max_new_tokens", SamplingParams().max_new_tokens)
    defaults["max_new_tokens"] = max(1, min(wanted, room))
    sampling = SamplingParams(**{**defaults, **body.sampling()}, stop_token_ids=tokenizer.eos_token_ids)
    return Prepared(caller.name, reference.name, record, tokenizer, tuple(ids), sampling)


def _tokenizer(service: Service, record: VersionRecord | None) -> VariantTokenizer:
    """The version's tokenizer. An object that held one at upload and does not now is quarantined if it is corrupt."""
    try:
        return service.tokenizers.of(record)
    except ArtifactError as error:
        if record is None:
            raise
        path, where = service.registry.object_path(record.digest), f"{record.name}@{record.version}"
        if not path.exists():
            raise VariantNotFound(
                f"{where}: its object is gone from the registry: upload it again"
            ) from error
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest == record.digest:
            raise
        service.registry.quarantine(record.digest, str(error))
        raise VariantQuarantined(
            f"{where}: its object is corrupt and was quarantined: upload it again"
        ) from error


async def _gather(running: Running, prepared: Prepared) -> dict[str, Any]:
    """The whole reply, once the request is done."""
    outputs = [Output() for _ in range(prepared.sampling.n)]
    while not isinstance(event := await running.next_event(), DoneEvent):
        if isinstance(event, TokenEvent):
            outputs[event.index].text += event.text
            outputs[event.index].token_ids.append(event.token_id)
            outputs[event.index].logprobs += _logprobs(event, prepared)
        elif isinstance(event, FinishEvent):
            outputs[event.index].text += event.text
            outputs[event.index].finish_reason = event.reason
    shown = [
        {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            **({} if prepared.sampling.logprobs is None else {"logprobs": output.logprobs}),
        }
        for output in outputs
    ]
    return {**prepared.identity(), "outputs": shown, **_totals(event)}


async def _stream(
    running: Running, prepared: Prepared, first: Event, request_id: str
) -> AsyncIterator[bytes]:
    """Events `token`, `finish` for each answer, and in the end `done` with what a whole reply says, or `error`."""
    event = first
    try:
        while not isinstance(event, DoneEvent):
            if isinstance(event, TokenEvent):
                token = {"index": event.index, "token_id": event.token_id, "text": event.text}
                if prepared.sampling.logprobs is not None:
                    token["logprobs"] = _logprobs(event, prepared)
                yield _event("token", token)
            elif isinstance(event, FinishEvent):
                finish = {"index": event.index, "finish_reason": event.reason, "text": event.text}
                yield _event("finish", finish)
            event = await running.next_event()
        yield _event("done", {**prepared.identity(), **_totals(event)})
    except PeraxisError as error:
        yield _event("error", error_body(error, request_id))


def _logprobs(event: TokenEvent, prepared: Prepared) -> list[dict[str, Any]]:
    """One entry for the token, or none where nobody asked."""
    if event.logprob is None:
        return []
    top = [_scored(token_id, logprob, prepared) for token_id, logprob in event.top]
    return [{**_scored(event.token_id, event.logprob, prepared), "top": top}]


def _scored(token_id: int, logprob: float, prepared: Prepared) -> dict[str, Any]:
    return {"token_id": token_id, "text": prepared.tokenizer.decode([token_id]), "logprob": logprob}


def _totals(done: DoneEvent) -> dict[str, Any]:
    usage = {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.generation_tokens,
        "total_tokens": done.prompt_tokens + done.generation_tokens,
    }
    times = done.timings
    timings = {
        "queue_s": times.queue_s,
        "load_s": times.load_s,
        "cold": times.cold,
        "ttft_s": times.ttft_s,
        "total_s": times.total_s,
    }
    return {"usage": usage, "timings": timings}


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
