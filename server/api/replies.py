"""Answer a call, whole or as server-sent events. Each route that generates gives its own JSON.

Owns the life of a call from its admission to its last byte.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import fastapi
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from deltastore.errors import PeraxisError
from server.api.errors import error_body, http_request_id_of
from server.api.json_replies import JsonReply
from server.api.outputs.request_events import EventStream, RequestEvents, while_connected
from server.api.outputs.text_outputs import SequenceEnd, TextToken
from server.api.service import Service
from server.api.submission import GenerationCall, Submission, admit, submit
from server.errors import InvalidRequest
from server.grammar.tool_calls import CallDelta, ToolCall, joined
from server.protocol.events import FinishReason
from server.tenants.tenant import Tenant

# Log-probabilities that a whole reply may hold, those of the likeliest tokens included.
MAX_LOGPROBS = 1 << 18
# What each of them, and each token, takes in memory until the reply is made.
LOGPROB_BYTES = 300
TOKEN_BYTES = 250


@dataclass(slots=True)
class WholeSequence:
    """One sequence of a whole reply, as it grows."""

    texts: list[str] = field(default_factory=list)
    tokens: list[TextToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    deltas: list[CallDelta] = field(default_factory=list)
    reasoning: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools."""
        return joined(self.deltas)


class ReplyFormat(Protocol):
    """The JSON of one route's reply to one call."""

    def whole(self, sequences: list[WholeSequence]) -> dict[str, Any]:
        """Return the document of a whole reply."""

    def begin(self) -> bytes:
        """Return the server-sent events before the first output, which is at hand."""

    def part(self, output: TextToken | SequenceEnd) -> bytes:
        """Return the events of one output; none for text that is held back."""

    def end(self) -> bytes:
        """Return the last events of a stream whose sequences have all ended."""

    def failed(self, error: dict[str, Any]) -> bytes:
        """Return the last events of a stream that failed.

        Args:
            error: the document that the error has as a reply of its own.
        """


async def answer(
    request: fastapi.Request,
    service: Service,
    tenant: Tenant,
    read: Callable[[ExitStack], Awaitable[tuple[GenerationCall, Callable[[Submission], ReplyFormat]]]],
) -> Response:
    """Read a call, submit it and answer it. The engine's work ends when the client leaves.

    Args:
        read: reads the body, and returns the call and the format of its reply; its argument holds what is reserved
            for the body, until the call is submitted.

    Raises:
        PeraxisError: as `read` and `submit` do, or because a request failed before the first byte of its reply.
    """
    http_request_id = http_request_id_of(request)
    events = RequestEvents(service.engine, service.metrics, http_request_id, service.spans)
    try:
        await admit(service, tenant, events)
        submission, replies, is_stream = await _submitted(request, service, read, events)
        if not is_stream:
            with service.unsent.growing(tenant.name) as hold:
                sequences = await while_connected(request, _gather(submission, hold))
                if submission.sampling_params.logprobs is None:
                    return _whole_reply(submission, replies, sequences)
                # Log-probabilities make documents that take long to build, and other requests need the event loop.
                return await run_in_threadpool(_whole_reply, submission, replies, sequences)
        # Wait for the first output: an error before it, such as a failed load, still gets its own status.
        first = await while_connected(request, submission.outputs.take())
    except BaseException:
        events.cancel()
        raise
    content = _stream(submission, replies, first, http_request_id)
    headers = {**submission.headers(), "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return EventStream(events, content, headers)


async def _submitted(
    request: fastapi.Request,
    service: Service,
    read: Callable[[ExitStack], Awaitable[tuple[GenerationCall, Callable[[Submission], ReplyFormat]]]],
    events: RequestEvents,
) -> tuple[Submission, ReplyFormat, bool]:
    """Read and submit a call. Return its submission, the format of its reply, and whether it is a stream.

    Afterwards nothing refers to the body and its prompts, which may be a thousand times as large as the answer.
    """
    with ExitStack() as held:
        call, format_of = await read(held)
        submission = await while_connected(request, submit(service, call, events))
        return submission, format_of(submission), call.stream


def _whole_reply(submission: Submission, replies: ReplyFormat, sequences: list[WholeSequence]) -> Response:
    return JsonReply(replies.whole(sequences), headers=submission.headers())


async def _gather(submission: Submission, hold: Callable[[int], None]) -> list[WholeSequence]:
    """Return all sequences, once they have ended.

    Args:
        hold: counts bytes; raises QueueFull if the tenant holds too many.

    Raises:
        InvalidRequest: the reply would hold too many log-probabilities.
    """
    outputs = submission.outputs
    num_sequences = len(submission.requests) * submission.sampling_params.n
    sequences = [WholeSequence() for _ in range(num_sequences)]
    num_logprobs = num_held = num_tokens = 0
    while taken := await outputs.take():
        for output in taken:
            sequence = sequences[output.index]
            sequence.texts.append(output.text)
            sequence.deltas += output.calls
            sequence.reasoning += output.reasoning
            if isinstance(output, SequenceEnd):
                sequence.finish_reason = output.reason
            else:
                sequence.tokens.append(output)
                num_tokens += 1
                num_logprobs += 0 if output.scored is None else 1 + len(output.top)
        if num_logprobs > MAX_LOGPROBS:
            raise InvalidRequest(
                f"the reply holds more than {MAX_LOGPROBS} log-probabilities: stream it, or ask for fewer",
                "logprobs",
            )
        num_bytes = num_logprobs * LOGPROB_BYTES + num_tokens * TOKEN_BYTES
        hold(num_bytes - num_held)
        num_held = num_bytes
    return sequences


async def _stream(
    submission: Submission, replies: ReplyFormat, first: list[TextToken | SequenceEnd], http_request_id: str
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a call. What came at once leaves at once."""
    try:
        yield replies.begin() + b"".join(map(replies.part, first))
        while taken := await submission.outputs.take():
            yield b"".join(map(replies.part, taken))
        yield replies.end()
    except PeraxisError as error:
        yield replies.failed(error_body(error, http_request_id))
