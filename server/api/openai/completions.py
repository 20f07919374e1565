"""`POST /v1/completions`: the tokens that follow prompts, in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import fastapi
from fastapi import APIRouter
from fastapi.responses import Response

from server.api.bodies import read_json
from server.api.openai.documents import Documents, completion_logprobs, failed_chunks
from server.api.openai.schemas import CompletionBody
from server.api.outputs.text_outputs import SequenceEnd, TextToken
from server.api.replies import ReplyFormat, WholeSequence, answer
from server.api.schemas import Reference
from server.api.service import AnyService, TenantDep
from server.api.submission import GenerationCall, Submission
from server.protocol.events import FinishReason
from server.tenants.tenant import Tenant

KIND = "text_completion"

router = APIRouter()


@router.post("/v1/completions")
async def complete(request: fastapi.Request, service: AnyService, tenant: TenantDep) -> Response:
    """Answer with the tokens that follow each prompt, or with log-probabilities of the prompts themselves."""
    return await answer(request, service, tenant, partial(_call, request, tenant))


async def _call(
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
        requested=body.requested(),
    )
    has_logprobs, is_prompt_only = body.logprobs is not None, body.max_tokens == 0
    return call, partial(CompletionReply, body.model, body.includes_usage, has_logprobs, is_prompt_only)


class CompletionReply:
    """The JSON of `POST /v1/completions`: the choices of the first prompt come first.

    Of the request's body it keeps the prompts, if the reply repeats them.
    """

    def __init__(
        self,
        model: str,
        includes_usage: bool,
        has_logprobs: bool,
        is_prompt_only: bool,
        submission: Submission,
    ) -> None:
        self._documents = Documents(submission, "cmpl", model, includes_usage)
        self._outputs = submission.outputs
        self._n = submission.sampling_params.n
        self._echoes = submission.echoes
        self._has_logprobs = has_logprobs
        self._is_prompt_only = is_prompt_only
        self._unechoed = set(range(self._n * len(submission.echoes)))

    def whole(self, sequences: list[WholeSequence]) -> dict[str, Any]:
        choices = [self._whole_choice(index, sequence) for index, sequence in enumerate(sequences)]
        return {**self._documents.document(KIND, choices), "usage": self._documents.usage(self._num_tokens)}

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
        return self._documents.last_chunks(KIND, self._num_tokens)

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
        return self._documents.chunk(KIND, self._choice(index, text, prompt, new, reason))

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
