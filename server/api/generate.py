"""`POST /generate`: a prompt or a conversation in, one variant's tokens out, whole or as server-sent events."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

import fastapi
from fastapi import APIRouter, Query
from fastapi.responses import Response

from server.api.bodies import read_json
from server.api.json_replies import server_sent_event
from server.api.outputs.text_outputs import ScoredText, SequenceEnd, TextToken
from server.api.replies import WholeSequence, answer
from server.api.schemas import GenerateBody, GenerateQuery, Reference
from server.api.service import AnyService, TenantDep
from server.api.submission import GenerationCall, Submission
from server.tenants.tenant import Tenant
from server.text.conversation import Conversation

router = APIRouter()


@router.post("/generate")
async def generate(
    request: fastapi.Request,
    query: Annotated[GenerateQuery, Query()],
    service: AnyService,
    tenant: TenantDep,
) -> Response:
    """Answer with the tokens of `variant`, or of the base without one."""
    reference = Reference.parse(query.variant)
    return await answer(request, service, tenant, partial(_call, request, tenant, reference))


async def _call(
    request: fastapi.Request, tenant: Tenant, reference: Reference, held: ExitStack
) -> tuple[GenerationCall, type[GenerateReply]]:
    body = await read_json(request, GenerateBody, held)
    prompt = Conversation(body.conversation()) if body.prompt is None else body.prompt
    return GenerationCall(tenant, reference, (prompt,), body.sampling_params(), body.stream), GenerateReply


class GenerateReply:
    """The JSON of `POST /generate`. A stream has `token` events, a `finish` per sequence, then `done` or `error`."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._has_logprobs = submission.sampling_params.logprobs is not None

    def whole(self, sequences: list[WholeSequence]) -> dict[str, Any]:
        outputs = [
            {
                "text": sequence.text,
                "token_ids": [token.token_id for token in sequence.tokens],
                "finish_reason": sequence.finish_reason,
                **({"logprobs": list(map(_logprobs, sequence.tokens))} if self._has_logprobs else {}),
            }
            for sequence in sequences
        ]
        return {**self._identity(), "outputs": outputs, **self._totals()}

    def begin(self) -> bytes:
        return b""

    def part(self, output: TextToken | SequenceEnd) -> bytes:
        if isinstance(output, SequenceEnd):
            finish = {"index": output.index, "finish_reason": output.reason, "text": output.text}
            return server_sent_event("finish", finish)
        token: dict[str, Any] = {"index": output.index, "token_id": output.token_id, "text": output.text}
        if self._has_logprobs:
            token["logprobs"] = [_logprobs(output)]
        return server_sent_event("token", token)

    def end(self) -> bytes:
        return server_sent_event("done", {**self._identity(), **self._totals()})

    def failed(self, error: dict[str, Any]) -> bytes:
        return server_sent_event("error", error)

    def _identity(self) -> dict[str, Any]:
        """Return the fields that name the version; the base has no version and no digest."""
        record = self._submission.record
        if record is None:
            return {"variant": self._submission.variant, "version": None, "digest": None}
        digest = f"sha256:{record.digest}"
        return {"variant": self._submission.variant, "version": record.version, "digest": digest}

    def _totals(self) -> dict[str, Any]:
        outputs, num_prompt = self._submission.outputs, self._submission.num_prompt_tokens
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": outputs.num_tokens,
            "total_tokens": num_prompt + outputs.num_tokens,
        }
        return {"usage": usage, "timings": outputs.timings}


def _logprobs(token: TextToken) -> dict[str, Any]:
    scored = token.scored
    assert scored is not None
    return {**_scored(scored), "top": [_scored(each) for each in token.top]}


def _scored(scored: ScoredText) -> dict[str, Any]:
    return {"token_id": scored.token_id, "text": scored.text, "logprob": scored.logprob}
