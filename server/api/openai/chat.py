"""`POST /v1/chat/completions`: the answer to a conversation, in the format of OpenAI's API.

The variant's own chat template makes the prompt.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import fastapi
from fastapi import APIRouter
from fastapi.responses import Response

from server.api.bodies import read_json
from server.api.openai.documents import Documents, chat_logprobs, failed_chunks
from server.api.openai.schemas import ChatBody
from server.api.outputs.text_outputs import SequenceEnd, TextToken
from server.api.replies import ReplyFormat, WholeSequence, answer
from server.api.schemas import Reference
from server.api.service import AnyService, TenantDep
from server.api.submission import GenerationCall, Submission
from server.grammar.tool_calls import CallDelta, ToolCall
from server.protocol.events import FinishReason
from server.tenants.tenant import Tenant
from server.text.conversation import Conversation

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(request: fastapi.Request, service: AnyService, tenant: TenantDep) -> Response:
    """Answer with the assistant's next message; without a length, it is as long as fits."""
    return await answer(request, service, tenant, partial(_call, request, tenant))


async def _call(
    request: fastapi.Request, tenant: Tenant, held: ExitStack
) -> tuple[GenerationCall, Callable[[Submission], ReplyFormat]]:
    body = await read_json(request, ChatBody, held)
    sampling = body.sampling()
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    if body.num_new_tokens is not None:
        sampling["max_new_tokens"] = body.num_new_tokens
    requested = body.requested()
    call = GenerationCall(
        tenant,
        Reference.parse(body.model),
        (Conversation(body.conversation(), tools=requested.tools),),
        sampling,
        bool(body.stream),
        default_new_tokens=None,
        length_field=body.length_field,
        requested=requested,
    )
    return call, partial(ChatReply, body.model, body.includes_usage, bool(body.logprobs))


class ChatReply:
    """The JSON of `POST /v1/chat/completions`. Keeps nothing of the size of the request's body."""

    def __init__(self, model: str, includes_usage: bool, has_logprobs: bool, submission: Submission) -> None:
        self._documents = Documents(submission, "chatcmpl", model, includes_usage)
        self._outputs = submission.outputs
        self._n = submission.sampling_params.n
        self._has_logprobs = has_logprobs
        self._calling: set[int] = set()  # choices with calls

    def whole(self, sequences: list[WholeSequence]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(sequence),
                "logprobs": chat_logprobs(sequence.tokens) if self._has_logprobs else None,
                "finish_reason": _reason(sequence.finish_reason, bool(sequence.calls)),
            }
            for index, sequence in enumerate(sequences)
        ]
        usage = self._documents.usage(self._outputs.num_tokens)
        return {**self._documents.document(KIND, choices), "usage": usage}

    def begin(self) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, delta) for index in range(self._n))

    def part(self, output: TextToken | SequenceEnd) -> bytes:
        delta: dict[str, Any] = {"content": output.text} if output.text else {}
        if output.calls:
            self._calling.add(output.index)
            delta["tool_calls"] = list(map(_call_delta, output.calls))
        if output.reasoning:
            delta["reasoning_content"] = output.reasoning
        if isinstance(output, SequenceEnd):
            reason = _reason(output.reason, output.index in self._calling)
            return self._chunk(output.index, delta, reason=reason)
        if self._has_logprobs:
            return self._chunk(output.index, delta, chat_logprobs((output,)))
        return self._chunk(output.index, delta) if delta else b""

    def end(self) -> bytes:
        return self._documents.last_chunks(CHUNK_KIND, self._outputs.num_tokens)

    def failed(self, error: dict[str, Any]) -> bytes:
        return failed_chunks(error)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._documents.chunk(CHUNK_KIND, choice)


def _message(sequence: WholeSequence) -> dict[str, Any]:
    calls = sequence.calls
    message = {"role": "assistant", "content": sequence.text or (None if calls else ""), "refusal": None}
    if sequence.reasoning:
        message["reasoning_content"] = sequence.reasoning
    return {**message, "tool_calls": list(map(_tool_call, calls))} if calls else message


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": _call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _call_delta(delta: CallDelta) -> dict[str, Any]:
    """Return what a stream adds to a call: its identity comes with the name."""
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {"index": delta.index, **_tool_call(ToolCall(delta.name, delta.arguments))}


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _reason(reason: FinishReason | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason == "stop" else reason
