"""One call that generates, from its admission to its last byte: admit, tokenize, submit, answer.

Every route that generates tokens goes through here. The tenant's limits are asked before the body is read, and
once more for a call with several prompts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import fastapi
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.api.errors import error_body
from server.api.json_io import JsonReply, parsed
from server.api.outputs import (
    CHARACTER_BYTES,
    LOGPROB_BYTES,
    AnswerOutputs,
    RequestEvents,
    SequenceEnd,
    TextOutputs,
    TextToken,
    begun,
    while_connected,
)
from server.api.schemas import BASE, Reference
from server.api.service import Service, http_request_id_of
from server.errors import ContextTooLong, InvalidRequest
from server.grammar.answer_grammar import in_form
from server.grammar.answer_parser import CallDelta, ToolCall, joined
from server.grammar.field_values import ArgumentTypes
from server.grammar.grammar import Requested
from server.protocol.messages import EngineFacts, FinishReason
from server.protocol.request import (
    PageHashes,
    Request,
    SamplingParams,
    TokenIds,
    current_request,
    token_ids_of,
)
from server.protocol.rules import NEUTRAL
from server.tenants.loop_ledger import timed_on_thread
from server.tenants.tenant import Rates, Tenant
from server.text.answer_form import AnswerForm
from server.text.chat_template import Conversation
from server.text.service import VariantText
from server.text.tokenizer import too_many_tokens

log = logging.getLogger(__name__)

# Bound on the sequences of one call. Each sequence has state in three processes, and all of them are answered together.
MAX_SEQUENCES = 1024
# Log-probabilities of prompts in one reply, those of the likeliest tokens included. The engine holds them, too.
MAX_PROMPT_LOGPROBS = 1 << 18
# Bound on the prompts that one reply repeats.
MAX_ECHO_CHARS = 16 << 20
# Log-probabilities that a whole reply may hold, those of the likeliest tokens included.
MAX_LOGPROBS = 1 << 18
# What each token takes in memory, beside its log-probabilities, until the reply is made.
TOKEN_BYTES = 250
# Tokens of a call's prompts above which they are checked and hashed beside the event loop: so many take 0.3 ms.
MAX_CHECKED_HERE = 1 << 12
# Characters of schemas above which the grammar of answers is made beside the event loop: so many take 1 ms.
MAX_FORMED_HERE = 1 << 10
# A comment, which clients of server-sent events pass over.
WAITING = b": waiting\n\n"
DEFAULT_NEW_TOKENS = SamplingParams().max_new_tokens

Prompt = str | TokenIds | Conversation


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A call of a route that generates, in terms that all of them share.

    Args:
        sampling: fields of `SamplingParams` that the client set; others take the variant's defaults.
        default_new_tokens: most new tokens when neither the client nor the variant's generation config sets them;
            None is as many as fit.
        length_field: the route's name of `max_new_tokens`, for errors.
        echo: the reply repeats the prompts.
        adds_special_tokens: those of the tokenizer are among a text's.
        requested: the form that the outputs must have, and the tools that they may call.
        has_parts: the reply tells reasoning and calls from content.
    """

    tenant: Tenant
    reference: Reference
    prompts: Sequence[Prompt]
    sampling: Mapping[str, Any]
    stream: bool
    default_new_tokens: int | None = DEFAULT_NEW_TOKENS
    length_field: str = "max_new_tokens"
    echo: bool = False
    adds_special_tokens: bool = True
    requested: Requested = field(default_factory=Requested)
    has_parts: bool = False

    @property
    def n(self) -> int:
        """Number of sequences of each prompt."""
        return int(self.sampling.get("n", 1))

    @property
    def max_new_tokens(self) -> int | None:
        """Most new tokens of a sequence, if the client set them."""
        return self.sampling.get("max_new_tokens")


@dataclass(frozen=True, slots=True)
class Submission:
    """The requests of a call in the engine, one per prompt in its order, and their text."""

    requests: Sequence[Request]
    outputs: TextOutputs
    echoes: Sequence[str]  # the text of each prompt, if the reply repeats it
    rates: Rates  # of the tenant when the call was admitted

    @property
    def sampling_params(self) -> SamplingParams:
        """Those of the first request; others differ in `max_new_tokens` alone."""
        return self.requests[0].sampling_params

    @property
    def record(self) -> VersionRecord | None:
        """The version that answers; None is the base."""
        return self.requests[0].record

    @property
    def variant(self) -> str:
        """The variant's name as the client wrote it, without a version."""
        return self.requests[0].name or BASE

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)

    def headers(self) -> dict[str, str]:
        """Return the headers that name the version, and those of the tenant's limits."""
        return {**version_headers(self.variant, self.record), **self.rates.headers()}


@dataclass(slots=True)
class WholeSequence:
    """One sequence of a whole reply, as it grows."""

    texts: list[str] = field(default_factory=list)
    tokens: list[TextToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    deltas: list[CallDelta] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

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


class EventStream(StreamingResponse):
    """Server-sent events of requests; cancels them when the client disconnects, even before the first byte.

    Args:
        first: the first outputs of the requests, which the stream may begin without.
    """

    def __init__(
        self,
        events: RequestEvents,
        first: asyncio.Future[list[TextToken | SequenceEnd]],
        content: AsyncIterator[bytes],
        headers: dict[str, str],
    ) -> None:
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._request_events = events
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._request_events.cancel()
            self._first.cancel()


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
    events = RequestEvents(
        service.engine, service.metrics, http_request_id, tenant.name, service.unsent, service.spans
    )
    try:
        await admit(service, tenant, events)
        submission, replies, is_stream = await _submitted(request, service, read, events)
        if not is_stream:
            with service.unsent.growing(tenant.name) as hold:
                sequences = await while_connected(request, _gather(submission, hold))
                if submission.sampling_params.logprobs is None:
                    reply = _whole_reply(submission, replies, sequences)
                else:
                    # Log-probabilities make documents that take long to build, and other requests need the event loop.
                    making = timed_on_thread(_whole_reply)
                    reply = await run_in_threadpool(making, submission, replies, sequences)
            events.cancel()
            return reply
        first = begun(submission.outputs.take())
        # An error before the first output, such as a failed load, gets its own status, unless it is late.
        pause_s = service.settings.stream_keepalive
        try:
            await while_connected(request, asyncio.wait({first}, timeout=pause_s))
            if first.done():
                first.result()
        except BaseException:
            first.cancel()
            raise
    except BaseException:
        events.cancel()
        raise
    content = _stream(submission, replies, first, pause_s, http_request_id, events)
    headers = {**submission.headers(), "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return EventStream(events, first, content, headers)


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


async def admit(service: Service, tenant: Tenant, events: RequestEvents) -> None:
    """Count a request of a tenant before its body is read; it counts as running until its events end.

    Raises:
        Draining, QueueFull, EngineRestarted: the server does not admit requests now.
        RateLimited: the tenant is over a limit.
    """
    with _counting_refusals(service, tenant):
        service.check_ready()
        events.admitted(await service.admissions.admit_to_engine(tenant.name))


async def submit(service: Service, call: GenerationCall, events: RequestEvents) -> Submission:
    """Resolve the version, tokenize and check every prompt, then submit a request for each.

    Args:
        events: hold the tenant's admission.

    Raises:
        QueueFull, EngineRestarted: the server does not admit requests now.
        VariantNotFound, VariantQuarantined, BaseMismatch: the version cannot be served.
        RegistryUnavailable: the registry cannot be asked, and the version is not in memory.
        RateLimited: the tenant is over a limit.
        InvalidRequest: the call has too many sequences, a prompt is too long or cannot be tokenized, or the schema of
            its output cannot be used.
    """
    with _counting_refusals(service, call.tenant):
        _check_number(call, service.settings.max_prompts)
    record = await resolved(service, call.tenant, call.reference)
    with _counting_refusals(service, call.tenant):
        # Before the variant's files are read and texts are tokenized, which takes a worker's time.
        await events.admission.need(len(call.prompts))
        text = await service.text.of(record, call.tenant.name)
        max_tokens = service.engine.facts.max_model_len_of(record)
        prompts, echoes, form = await _tokenized(call, text, max_tokens)
        asked, types = await _formed(service, call, form)
        call = replace(call, requested=asked, sampling=await _ruled(call, text))
        making = partial(_requests, call, text, record, prompts, service.engine.facts, events)
        is_long = sum(map(len, prompts)) > MAX_CHECKED_HERE
        requests = await run_in_threadpool(timed_on_thread(making)) if is_long else making()
        _check_echoes(requests, echoes)
        events.admission.count(sum(map(len, prompts)))
        await _send(service, call, text, requests, events)
    outputs = (
        AnswerOutputs(events, requests, text, form, call.requested, call.stream, types)
        if call.requested.tools or (call.has_parts and form.has_parts)
        else TextOutputs(events, requests, text, call.echo and not isinstance(call.prompts[0], str))
    )
    return Submission(requests, outputs, echoes, events.admission.rates)


async def _tokenized(
    call: GenerationCall, text: VariantText, max_tokens: int
) -> tuple[list[TokenIds], list[str], AnswerForm]:
    """Return the token ids of each prompt, their texts if the reply repeats them, and the form of answers.

    Raises:
        InvalidRequest: a prompt is too long, with the new tokens that the call asks for, or cannot be tokenized.
    """
    prompts, echoes, form = [], [], AnswerForm()
    skips = call.sampling.get("skip_special_tokens", True)
    for prompt in call.prompts:
        # Short prompts are tokenized on the event loop, which others need between them.
        await asyncio.sleep(0)
        if isinstance(prompt, Conversation):
            chat = await text.render_chat(prompt, max_tokens)
            ids, form = token_ids_of(chat.ids), chat.form
        else:
            ids = await _encoded(text, prompt, max_tokens, call.adds_special_tokens)
        _check_length(call, len(ids), max_tokens)
        prompts.append(ids)
        if call.echo:
            echoes.append(prompt if isinstance(prompt, str) else await text.decode_prompt(list(ids), skips))
    return prompts, echoes, form


async def _formed(
    service: Service, call: GenerationCall, form: AnswerForm
) -> tuple[Requested, ArgumentTypes]:
    """Return what a call asks for as the prompt's template writes it, and the types of its tools' arguments.

    Raises:
        InvalidRequest: a grammar of the template's calls cannot be made.
        QueueFull: too many large calls of the tenant wait for that.
    """
    asked, types = call.requested, ArgumentTypes(call.requested.tools)
    names = asked.names if form.calls is not None and form.calls.kind == "fields" else ()

    def make() -> Requested:
        # Those of arguments that are written one by one are asked for while an answer comes.
        for name in names:
            types.of(name)
        return in_form(asked, form)

    if asked.grammar is None and not names:
        return asked, types
    num_chars = len(asked.tools) + (0 if asked.grammar is None else len(asked.grammar.text))
    if num_chars <= MAX_FORMED_HERE:
        return make(), types
    return await parsed(service.parsing, call.tenant.name, 0, make), types


async def _ruled(call: GenerationCall, text: VariantText) -> Mapping[str, Any]:
    """Return what the call sets of sampling; words that must not come are a rule beside the variant's own."""
    given = dict(call.sampling)
    if (words := given.pop("bad_words", None)) is not None:
        rules = text.generation.defaults.get("rules", NEUTRAL)
        given["rules"] = replace(rules, bad_words=await text.banned(words))
    return given


async def _send(
    service: Service,
    call: GenerationCall,
    text: VariantText,
    requests: Sequence[Request],
    events: RequestEvents,
) -> None:
    """Submit the requests to the engine, constrained by the call's grammar if it has one."""
    constraint = None
    if call.requested.grammar is not None:
        constraint = await service.grammars.open(text, call.requested.grammar)
    for request, prompt in zip(requests, call.prompts, strict=True):
        if service.settings.log_prompts:
            log.info("request %s: prompt %r", request.id, prompt)
        masks = None if constraint is None else constraint.feed()
        events.submit(request, masks, "chat" if isinstance(prompt, Conversation) else "text_completion")


async def resolved(service: Service, tenant: Tenant, reference: Reference) -> VersionRecord | None:
    """Return the version that a client names, or None for the base.

    Raises:
        VariantNotFound, VariantQuarantined, RegistryUnavailable: as `Resolutions.resolve` does.
        BaseMismatch: it was made from another base.
    """
    if reference.name is None:
        return None
    record = await service.resolutions.resolve(tenant.name, reference.name, reference.version)
    service.check_base(record)
    return record


def version_headers(variant: str, record: VersionRecord | None) -> dict[str, str]:
    """Return the headers that name a version."""
    headers = {"X-Peraxis-Variant": variant}
    if record is not None:
        headers |= {"X-Peraxis-Version": str(record.version), "X-Peraxis-Digest": f"sha256:{record.digest}"}
    return headers


@contextmanager
def _counting_refusals(service: Service, tenant: Tenant) -> Iterator[None]:
    """Count a call that is refused inside the block."""
    try:
        yield
    except PeraxisError as error:
        service.metrics.rejected(tenant.name, error)
        raise


def _check_number(call: GenerationCall, max_prompts: int) -> None:
    """Refuse a call of so many requests that the engine's queue could never hold them."""
    num_prompts, n = len(call.prompts), call.n
    if num_prompts > max_prompts or num_prompts * n > MAX_SEQUENCES:
        raise InvalidRequest(
            f"the call has {num_prompts} prompts with {n} sequences each, more than the {max_prompts} prompts and "
            f"{MAX_SEQUENCES} sequences of one call: send several calls",
            "prompt",
        )


def _check_echoes(requests: Sequence[Request], echoes: Sequence[str]) -> None:
    """Refuse a call whose prompts alone would make its reply too large."""
    params = requests[0].sampling_params
    if params.prompt_logprobs is not None:
        num_tokens = params.n * sum(len(request.prompt_ids) for request in requests)
        if num_tokens * (1 + params.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"the reply would hold more than {MAX_PROMPT_LOGPROBS} log-probabilities of prompts: send fewer",
                "logprobs",
            )
    if params.n * sum(map(len, echoes)) > MAX_ECHO_CHARS:
        raise InvalidRequest(
            f"the reply would repeat more than {MAX_ECHO_CHARS} characters: send fewer prompts", "echo"
        )


async def _encoded(
    text: VariantText, prompt: str | TokenIds, max_tokens: int, adds_special_tokens: bool
) -> TokenIds:
    if isinstance(prompt, str):
        return token_ids_of(await text.encode(prompt, max_tokens, adds_special_tokens))
    if len(prompt) > max_tokens:
        raise too_many_tokens(len(prompt), max_tokens, "prompt")
    return prompt


def _requests(
    call: GenerationCall,
    text: VariantText,
    record: VersionRecord | None,
    prompts: Sequence[TokenIds],
    facts: EngineFacts,
    events: RequestEvents,
) -> list[Request]:
    """Return a request for each prompt, with the hashes of its pages.

    Raises:
        InvalidRequest: the engine would refuse one.
    """
    context, size = current_request.get(), facts.page_tokens
    max_tokens = facts.max_model_len_of(record)
    traceparent = None if context is None else context.traceparent
    requests = []
    for ids in prompts:
        params = _sampling_params(call, text, len(ids), max_tokens)
        hashes = None if size is None else PageHashes.of(ids, size)
        request = Request(
            *(events.new_request_id(), call.tenant.name, call.reference.name, record, ids),
            *(text.num_embeddings, params, traceparent, hashes),
        )
        request.check(max_tokens)
        requests.append(request)
    return requests


def _check_length(call: GenerationCall, num_prompt: int, max_tokens: int) -> None:
    """Refuse a prompt that does not fit with the new tokens that the call asks for."""
    num_new, num_left = call.max_new_tokens, max_tokens - num_prompt
    if num_new is not None and num_new > num_left:
        raise ContextTooLong(
            f"{num_prompt} prompt tokens and {num_new} new ones are {num_prompt + num_new}, more than the "
            f"{max_tokens} that fit: shorten the prompt or lower {call.length_field}",
            call.length_field if num_left > 0 else "prompt",
        )


def _sampling_params(
    call: GenerationCall, text: VariantText, num_prompt: int, max_tokens: int
) -> SamplingParams:
    """Return what the call asks for, with the variant's defaults; a default length is cut to what fits.

    Raises:
        InvalidRequest: the prompt is as long as the variant's generation config lets a sequence become.
    """
    generation, num_left = text.generation, max_tokens - num_prompt
    given = {**generation.defaults, **call.sampling}
    if "max_new_tokens" not in call.sampling:
        default_new = given.get("max_new_tokens", call.default_new_tokens) or num_left
        if "max_new_tokens" not in given and generation.max_length is not None:
            default_new = generation.max_length - num_prompt
            if default_new < 1:
                raise ContextTooLong(
                    f"the prompt has {num_prompt} tokens, and the max_length of {text.label} is "
                    f"{generation.max_length}: shorten the prompt, or set {call.length_field}",
                    call.length_field,
                )
        given["max_new_tokens"] = max(1, min(default_new, num_left))
    given["stops_begin_in_prompt"] = "stop" not in call.sampling
    ends = frozenset() if given.pop("ignore_eos", False) else generation.eos_token_ids
    given["stop_token_ids"] = ends | given.get("stop_token_ids", frozenset())
    is_constrained = call.requested.grammar is not None
    return SamplingParams(**given, is_constrained=is_constrained)


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
    # Made with their first outputs, because those of a request can wait for minutes.
    sequences: defaultdict[int, WholeSequence] = defaultdict(WholeSequence)
    num_logprobs = num_held = num_tokens = num_chars = 0
    while taken := await outputs.take():
        for output in taken:
            sequence = sequences[output.index]
            sequence.texts.append(output.text)
            sequence.deltas += output.calls
            sequence.thoughts.append(output.reasoning)
            num_chars += len(output.text) + len(output.reasoning)
            num_chars += sum(len(call.arguments) for call in output.calls)
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
        num_bytes = num_logprobs * LOGPROB_BYTES + num_tokens * TOKEN_BYTES + num_chars * CHARACTER_BYTES
        hold(num_bytes - num_held)
        num_held = num_bytes
    return [sequences[index] for index in range(num_sequences)]


async def _made(
    submission: Submission, replies: ReplyFormat, outputs: list[TextToken | SequenceEnd]
) -> bytes:
    """Return the events of outputs; the first of a choice may have a prompt's 262,144 log-probabilities in it."""

    def make() -> bytes:
        return b"".join(map(replies.part, outputs))

    if submission.sampling_params.prompt_logprobs is None:
        return make()
    # As of whole replies.
    return await run_in_threadpool(timed_on_thread(make))


async def _stream(
    submission: Submission,
    replies: ReplyFormat,
    first: asyncio.Future[list[TextToken | SequenceEnd]],
    pause_s: float,
    http_request_id: str,
    events: RequestEvents,
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a call. What came at once leaves at once.

    Args:
        first: the first outputs; until they are there, comments tell that the server is.
    """
    try:
        while not first.done():
            with events.sending:
                yield WAITING
            await asyncio.wait({first}, timeout=pause_s)
        made = replies.begin() + await _made(submission, replies, first.result())
        with events.sending:
            yield made
        while taken := await submission.outputs.take():
            made = await _made(submission, replies, taken)
            with events.sending:
                yield made
        yield replies.end()
    except PeraxisError as error:
        yield replies.failed(error_body(error, http_request_id))
