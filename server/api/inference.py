"""The routes that generate: `/v1/chat/completions`, `/v1/completions` and `/generate`, and the JSON of each."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

import fastapi
from fastapi import APIRouter, Query
from fastapi.responses import Response

from server.api.generation import GenerationCall, ReplyFormat, Submission, WholeSequence, answer
from server.api.json_io import read_json, server_sent_event, unnamed_event
from server.api.outputs import ScoredText, SequenceEnd, TextToken
from server.api.schemas import ChatBody, CompletionBody, GenerateBody, GenerateQuery, Reference, UsageIn
from server.api.service import AnyService, TenantDep
from server.grammar.answer_parser import CallDelta, ToolCall
from server.protocol.messages import FinishReason
from server.tenants.tenant import Tenant

# OpenAI's API names the version that answered by a fingerprint; ours is this much of the digest.
FINGERPRINT_CHARS = 12
DONE = b"data: [DONE]\n\n"
# Mistral's templates refuse every other form of a call's id.
CALL_ID_CHARS, NUM_CALL_ID_CHARS = string.ascii_letters + string.digits, 9


class Documents:
    """Makes the documents of one reply.

    Args:
        prefix: begins the reply's id, as in OpenAI's API.
        model: as the client named it.
        usage_in: the events of a stream that have the number of tokens.
    """

    def __init__(self, submission: Submission, prefix: str, model: str, usage_in: UsageIn) -> None:
        record = submission.record
        self._outputs = submission.outputs
        # Added up once: with `continuous_usage_stats`, each event of a stream has it.
        self._num_prompt = submission.num_prompt_tokens
        self._usage_in = usage_in
        self._id = f"{prefix}-{submission.requests[0].id}"
        self._created = int(time.time())
        self._model = model
        self._fingerprint = None if record is None else record.digest[:FINGERPRINT_CHARS]

    def document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a document without `usage`."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "system_fingerprint": self._fingerprint,
        }

    def chunk(self, kind: str, choice: dict[str, Any]) -> bytes:
        """Return the event of one choice of a stream."""
        document = self.document(kind, [choice])
        if self._usage_in == "last":
            document["usage"] = None
        elif self._usage_in == "all":
            document["usage"] = self.usage(self._outputs.num_tokens)
        return unnamed_event(document)

    def last_chunks(self, kind: str, num_new_tokens: int) -> bytes:
        """Return the last events of a stream; the number of tokens is among them if the client asked for it."""
        if self._usage_in == "none":
            return DONE
        return unnamed_event({**self.document(kind, []), "usage": self.usage(num_new_tokens)}) + DONE

    def usage(self, num_new_tokens: int) -> dict[str, Any]:
        """Return the number of tokens; each prompt counts once, whatever `n` is."""
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num_new_tokens,
            "total_tokens": self._num_prompt + num_new_tokens,
            "prompt_tokens_details": {"cached_tokens": self._outputs.num_cached},
        }


def failed_chunks(error: dict[str, Any]) -> bytes:
    """Return the last events of a stream that failed."""
    return unnamed_event(error) + DONE


def completion_logprobs(tokens: Iterable[TextToken], num_chars: int = 0) -> dict[str, list[Any]]:
    """Return log-probabilities as `/v1/completions` has them; those of a prompt's first token are null.

    Args:
        num_chars: characters of the choice's text before that which the tokens' offsets count from.
    """
    shown = list(tokens)
    return {
        "tokens": [token.text if token.scored is None else _named(token.scored) for token in shown],
        "token_logprobs": [None if token.scored is None else token.scored.logprob for token in shown],
        "top_logprobs": [_top(token) for token in shown],
        "text_offset": [num_chars + token.offset for token in shown],
    }


def chat_logprobs(tokens: Iterable[TextToken]) -> dict[str, Any]:
    """Return log-probabilities as `/v1/chat/completions` has them."""
    content = [
        {**_openai_scored(token.scored), "top_logprobs": list(map(_openai_scored, token.top))}
        for token in tokens
        if token.scored is not None
    ]
    return {"content": content, "refusal": None}


def _top(token: TextToken) -> dict[str, float | None] | None:
    """Return the likeliest tokens and the token itself; others with the same text have vLLM's ``token_id:N`` for it."""
    own = token.scored
    if own is None or own.logprob is None:
        return None
    found = dict[str, float | None]()
    for scored in (*token.top, own):
        text = _named(scored)
        is_taken = text in found or text == _named(own)
        found[f"token_id:{scored.token_id}" if is_taken and scored.token_id != own.token_id else text] = (
            scored.logprob
        )
    return found


def _named(scored: ScoredText) -> str:
    """Return a token's text as OpenAI's completions have it: a part of a character by its bytes."""
    return scored.token.text if scored.token.raw is None else f"bytes:{scored.token.text}"


def _openai_scored(scored: ScoredText) -> dict[str, Any]:
    return {"token": scored.token.text, "logprob": scored.logprob, "bytes": list(scored.token.encoded)}


CHAT_KIND = "chat.completion"
CHAT_CHUNK_KIND = "chat.completion.chunk"

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(request: fastapi.Request, service: AnyService, tenant: TenantDep) -> Response:
    """Answer with the assistant's next message; without a length, it is as long as fits."""
    return await answer(request, service, tenant, partial(_chat_call, request, tenant))


async def _chat_call(
    request: fastapi.Request, tenant: Tenant, held: ExitStack
) -> tuple[GenerationCall, Callable[[Submission], ReplyFormat]]:
    body = await read_json(request, ChatBody, held)
    sampling = body.sampling()
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    if body.num_new_tokens is not None:
        sampling["max_new_tokens"] = body.num_new_tokens
    requested = body.requested
    call = GenerationCall(
        tenant,
        Reference.parse(body.model),
        (body.conversation(requested.tools),),
        sampling,
        bool(body.stream),
        default_new_tokens=None,
        length_field=body.length_field,
        requested=requested,
        has_parts=True,
    )
    return call, partial(
        ChatReply, body.model, body.usage_in, bool(body.logprobs), requested.called is not None
    )


class ChatReply:
    """The JSON of `POST /v1/chat/completions`. Keeps nothing of the size of the request's body.

    Args:
        is_named: the request names the function that is called; as in OpenAI's API, such an answer ends with ``stop``.
    """

    def __init__(
        self, model: str, usage_in: UsageIn, has_logprobs: bool, is_named: bool, submission: Submission
    ) -> None:
        self._documents = Documents(submission, "chatcmpl", model, usage_in)
        self._outputs = submission.outputs
        self._n = submission.sampling_params.n
        self._has_logprobs = has_logprobs
        self._is_named = is_named
        self._calling: set[int] = set()  # choices with calls

    def whole(self, sequences: list[WholeSequence]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(sequence),
                "logprobs": chat_logprobs(sequence.tokens) if self._has_logprobs else None,
                "finish_reason": self._reason(sequence.finish_reason, bool(sequence.calls)),
            }
            for index, sequence in enumerate(sequences)
        ]
        usage = self._documents.usage(self._outputs.num_tokens)
        return {**self._documents.document(CHAT_KIND, choices), "usage": usage}

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
            reason = self._reason(output.reason, output.index in self._calling)
            return self._chunk(output.index, delta, reason=reason)
        if self._has_logprobs:
            return self._chunk(output.index, delta, chat_logprobs((output,)))
        return self._chunk(output.index, delta) if delta else b""

    def end(self) -> bytes:
        return self._documents.last_chunks(CHAT_CHUNK_KIND, self._outputs.num_tokens)

    def failed(self, error: dict[str, Any]) -> bytes:
        return failed_chunks(error)

    def _reason(self, reason: FinishReason | None, has_calls: bool) -> str | None:
        return "tool_calls" if has_calls and reason == "stop" and not self._is_named else reason

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._documents.chunk(CHAT_CHUNK_KIND, choice)


def _message(sequence: WholeSequence) -> dict[str, Any]:
    calls = sequence.calls
    message = {"role": "assistant", "content": sequence.text or (None if calls else ""), "refusal": None}
    if reasoning := "".join(sequence.thoughts):
        message["reasoning_content"] = reasoning
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
    return "".join(secrets.choice(CALL_ID_CHARS) for _ in range(NUM_CALL_ID_CHARS))


COMPLETION_KIND = "text_completion"

completions_router = APIRouter()


@completions_router.post("/v1/completions")
async def complete(request: fastapi.Request, service: AnyService, tenant: TenantDep) -> Response:
    """Answer with the tokens that follow each prompt, or with log-probabilities of the prompts themselves."""
    return await answer(request, service, tenant, partial(_completion_call, request, tenant))


async def _completion_call(
    request: fastapi.Request, tenant: Tenant, held: ExitStack
) -> tuple[GenerationCall, Callable[[Submission], ReplyFormat]]:
    body = await read_json(request, CompletionBody, held)
    sampling = body.sampling()
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
        if body.echo:
            sampling["prompt_logprobs"] = body.logprobs
    if body.max_tokens is not None:
        # The engine generates at least one token; `CompletionReply` leaves it out.
        sampling["max_new_tokens"] = max(1, body.max_tokens)
    call = GenerationCall(
        tenant,
        Reference.parse(body.model),
        body.prompts(),
        sampling,
        bool(body.stream),
        length_field="max_tokens",
        echo=bool(body.echo),
        adds_special_tokens=body.add_special_tokens is not False,
        requested=body.requested,
    )
    has_logprobs, is_prompt_only = body.logprobs is not None, body.max_tokens == 0
    return call, partial(CompletionReply, body.model, body.usage_in, has_logprobs, is_prompt_only)


class CompletionReply:
    """The JSON of `POST /v1/completions`: the choices of the first prompt come first.

    Of the request's body it keeps the prompts, if the reply repeats them.
    """

    def __init__(
        self,
        model: str,
        usage_in: UsageIn,
        has_logprobs: bool,
        is_prompt_only: bool,
        submission: Submission,
    ) -> None:
        self._documents = Documents(submission, "cmpl", model, usage_in)
        self._outputs = submission.outputs
        self._n = submission.sampling_params.n
        self._echoes = submission.echoes
        self._has_logprobs = has_logprobs
        self._is_prompt_only = is_prompt_only
        self._unechoed = set(range(self._n * len(submission.echoes)))

    def whole(self, sequences: list[WholeSequence]) -> dict[str, Any]:
        choices = [self._whole_choice(index, sequence) for index, sequence in enumerate(sequences)]
        return {
            **self._documents.document(COMPLETION_KIND, choices),
            "usage": self._documents.usage(self._num_tokens),
        }

    def begin(self) -> bytes:
        return b""

    def part(self, output: TextToken | SequenceEnd) -> bytes:
        index, echo = output.index, b""
        if index in self._unechoed:
            self._unechoed.remove(index)
            echo = self._chunk(index, self._echo(index), self._prompt_tokens(index))
        if isinstance(output, SequenceEnd):
            text, reason = self._end(output.text, output.reason)
            return echo + self._chunk(index, text, reason=reason)
        if self._is_prompt_only or not (output.text or self._has_logprobs):
            return echo
        return echo + self._chunk(index, output.text, new=(output,))

    def end(self) -> bytes:
        return self._documents.last_chunks(COMPLETION_KIND, self._num_tokens)

    def failed(self, error: dict[str, Any]) -> bytes:
        return failed_chunks(error)

    @property
    def _num_tokens(self) -> int:
        return 0 if self._is_prompt_only else self._outputs.num_tokens

    def _echo(self, index: int) -> str:
        """Return the prompt of a choice if it is repeated."""
        return self._echoes[index // self._n] if self._echoes else ""

    def _prompt_tokens(self, index: int) -> Sequence[TextToken]:
        return self._outputs.prompts.get(index // self._n, ())

    def _end(self, text: str, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """Return the last text of a choice, and why it ends."""
        return ("", "length") if self._is_prompt_only else (text, reason)

    def _whole_choice(self, index: int, sequence: WholeSequence) -> dict[str, Any]:
        text, reason = self._end(sequence.text, sequence.finish_reason)
        prompt = self._prompt_tokens(index)
        new = () if self._is_prompt_only else sequence.tokens
        return self._choice(index, self._echo(index) + text, prompt, new, reason)

    def _chunk(
        self,
        index: int,
        text: str,
        prompt: Sequence[TextToken] = (),
        new: Sequence[TextToken] = (),
        reason: FinishReason | None = None,
    ) -> bytes:
        return self._documents.chunk(COMPLETION_KIND, self._choice(index, text, prompt, new, reason))

    def _choice(
        self,
        index: int,
        text: str,
        prompt: Sequence[TextToken],
        new: Sequence[TextToken],
        reason: FinishReason | None,
    ) -> dict[str, Any]:
        logprobs = None
        if self._has_logprobs and (prompt or new):
            before, after = completion_logprobs(prompt), completion_logprobs(new, len(self._echo(index)))
            logprobs = {name: values + after[name] for name, values in before.items()}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


generate_router = APIRouter()


@generate_router.post("/generate")
async def generate(
    request: fastapi.Request,
    query: Annotated[GenerateQuery, Query()],
    service: AnyService,
    tenant: TenantDep,
) -> Response:
    """Answer with the tokens of `variant`, or of the base without one."""
    reference = Reference.parse(query.variant)
    return await answer(request, service, tenant, partial(_generate_call, request, tenant, reference))


async def _generate_call(
    request: fastapi.Request, tenant: Tenant, reference: Reference, held: ExitStack
) -> tuple[GenerationCall, type[GenerateReply]]:
    body = await read_json(request, GenerateBody, held)
    prompt = body.conversation() if body.prompt is None else body.prompt
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
    token = scored.token
    return {
        "token_id": scored.token_id,
        "text": token.text,
        "bytes": list(token.encoded),
        "logprob": scored.logprob,
    }
