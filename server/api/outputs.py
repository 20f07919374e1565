"""The outputs of one call's requests: engine events, their text up to a stop string, and tool calls taken out of it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import fastapi
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import ClientDisconnect

from server.errors import EndedEngine, EngineRestarted, QueueFull, RequestTimeout, VersionEndsEngines
from server.fairness import FairBudget
from server.grammar.answer_parser import AnswerParser, CallDelta, Parts
from server.grammar.field_values import ArgumentTypes
from server.grammar.grammar import Requested
from server.grammar.response_template import ParsedAnswer, TemplateAnswer, parsed_by_template
from server.grammar.service import MaskFeed
from server.metrics.metrics import FrontendMetrics
from server.protocol.engine_client import EngineLink
from server.protocol.messages import (
    DoneEvent,
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    PromptEvent,
    Timings,
    TokenEvent,
)
from server.protocol.request import Operation, Request, TracedRequest
from server.tenants.admission import Admission
from server.tenants.loop_ledger import timed_on_thread
from server.text.answer_form import AnswerForm
from server.text.detokenizer import IncrementalDetokenizer, NewText, NewTokens, Window
from server.text.service import VariantText
from server.text.tokenizer import TokenText

if TYPE_CHECKING:
    from server.tracing import RequestSpans

log = logging.getLogger(__name__)

# Tokens, and log-probabilities of tokens, that are kept for a client which does not read its stream.
MAX_UNREAD = 1 << 16
# With so many of them, or when a piece of the stream could not be sent for so long, the requests pause. A second, as
# for connections that may give way: a client that is late once does not lose its rows.
PAUSE_UNREAD = MAX_UNREAD // 4
STALLED_S = 1.0
# What a token that is not read takes in memory, and each log-probability beside it.
UNREAD_TOKEN_BYTES, UNREAD_LOGPROB_BYTES = 200, 120
# What a log-probability takes as text, until the reply is made.
LOGPROB_BYTES = 300
# What a character takes at most, and what a piece of text that a response template parses takes beside its characters.
CHARACTER_BYTES = 4
PIECE_BYTES = 120
# Errors of requests that no engine counts.
LOST = (EngineRestarted, EndedEngine, VersionEndsEngines)

T = TypeVar("T")


class Sending:
    """A block in which a piece of a stream is being sent, which ends when the client reads."""

    def __init__(self) -> None:
        self.since: float | None = None  # None outside of the block

    def __enter__(self) -> None:
        self.since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.since = None


class RequestEvents:
    """The engine's requests of one HTTP request, and their events. Event loop only.

    A request that fails ends the others. Always call `cancel` last; it does nothing to requests that have ended.

    While the client does not read, the requests pause in the engine, and the events that have come are counted.

    Args:
        tenant: of the call.
        unsent: bytes that clients have not read.
    """

    def __init__(
        self,
        engine: EngineLink,
        metrics: FrontendMetrics,
        http_request_id: str,
        tenant: str,
        unsent: FairBudget,
        spans: RequestSpans | None = None,
    ) -> None:
        self._http_request_id = http_request_id
        self._tenant = tenant
        self._unsent = unsent
        self._engine = engine
        self._metrics = metrics
        self._request_ids: list[str] = []
        self._feeds: list[MaskFeed] = []
        self._events: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()
        # Tokens and log-probabilities that were not taken, their bytes, and how many of these the budget counts.
        self._num_unread = self._unread_bytes = self._held_bytes = 0
        self._kept_bytes = 0  # that the budget counts until they are given back, or the end
        self.sending = Sending()
        self._num_open = 0
        self.admission = Admission()
        self._is_answered = self._is_paused = self._is_cancelled = False
        self._spans = spans
        # Requests whose span is not made yet, by their number.
        self._traced: dict[int, TracedRequest] = {}

    def admitted(self, admission: Admission) -> None:
        """Take note of the tenant's admission, which is released when the requests have ended. Call it before `submit`.

        Raises:
            ClientDisconnect: `cancel` was called; the admission is released.
        """
        self.admission = admission
        self._check_open()

    def new_request_id(self) -> str:
        """Return the id of one more request."""
        # The engine's log lines show the X-Request-Id; clients may send the same one twice, so it is not enough.
        return f"{self._http_request_id}-{secrets.token_hex(8)}"

    def submit(
        self, request: Request, masks: MaskFeed | None = None, operation: Operation = "text_completion"
    ) -> None:
        """Submit a request.

        Args:
            masks: of a constrained request.
            operation: its kind, for its span.

        Raises:
            ClientDisconnect: `cancel` was called.
            PeraxisError: as `EngineLink.submit` does.
        """
        if masks is not None:
            self._feeds.append(masks)
        self._check_open()
        on_event = partial(self._on_event, len(self._request_ids), request, time.monotonic())
        if masks is None:
            self._engine.submit(request, on_event)
        else:
            self._engine.submit(request, masks.before(on_event), masks.first_mask)
            masks.start(request, lambda error: on_event(ErrorEvent(error)))
        if self._spans is not None:
            self._traced[len(self._request_ids)] = TracedRequest(request, operation)
        self._request_ids.append(request.id)
        self._num_open += 1
        log.debug(
            "request %s of tenant %s: variant %s, %d prompt tokens, %d sequences of up to %d new ones",
            request.id,
            request.tenant,
            "base" if request.record is None else request.record.label,
            len(request.prompt_ids),
            request.sampling_params.n,
            request.sampling_params.max_new_tokens,
        )

    async def take(self) -> list[tuple[int, Event]]:
        """Wait for events and return all that have come, none of them an ErrorEvent; raise the error of one.

        Each stands behind the number of its request, in order of submission.
        """
        if not self._events:
            # The client has read all that came while they paused.
            self._set_paused(False)
        await self._arrived.wait()
        events, self._events = self._events, []
        self._arrived.clear()
        self._give_back_unread()
        _, last = events[-1]
        if isinstance(last, ErrorEvent):
            raise last.error
        return events

    def stop_sequence(self, number: int, index: int) -> None:
        """End one sequence of a request, whose text holds a stop string."""
        self._engine.stop_sequence(self._request_ids[number], index)

    def keep(self, num_bytes: int) -> None:
        """Count bytes that are kept for the call, or give back as many if negative; `cancel` gives back the rest.

        Raises:
            QueueFull: the tenant holds too many.
        """
        if self._is_cancelled or not num_bytes:
            return
        if num_bytes > 0:
            self._unsent.take(self._tenant, num_bytes)
        else:
            self._unsent.give_back(self._tenant, -num_bytes)
        self._kept_bytes += num_bytes

    def cancel(self) -> None:
        """Stop the engine's work for the requests; no effect on those that have ended. Nothing begins afterwards."""
        self._is_cancelled = True
        for request_id in self._request_ids:
            self._engine.cancel(request_id)
        for feed in self._feeds:
            feed.close()
        for number in list(self._traced):
            self._make_span(number, "cancelled")
        self.admission.release("answered" if self._is_answered else "vain")
        self._give_back_unread()
        self._unsent.give_back(self._tenant, self._kept_bytes)
        self._kept_bytes = 0

    def _check_open(self) -> None:
        # The cancellation of a task is lost if what it waits for has just ended, so that a call may be submitted
        # whose client has left. Without this it would count as running for ever.
        if self._is_cancelled:
            self.cancel()
            raise ClientDisconnect

    def _on_event(self, number: int, request: Request, submitted_at: float, event: Event) -> None:
        self._is_answered = True
        if self._spans is not None:
            self._trace(number, event)
        if isinstance(event, TokenEvent):
            self.admission.count(1)
            event = self._keep(event)
        elif isinstance(event, PromptEvent):
            event = self._keep_prompt(event)
        if isinstance(event, ErrorEvent):
            # The events before an error are not sent any more.
            self._events.clear()
            if isinstance(event.error, LOST):
                self._count_as_lost(request, submitted_at)
            self.admission.release("refused" if isinstance(event.error, QueueFull) else "answered")
            # No event follows, so that an error is the last one.
            self.cancel()
        elif isinstance(event, DoneEvent):
            self._num_open -= 1
            if not self._num_open:
                self.admission.release()
        self._events.append((number, event))
        self._arrived.set()

    def _keep(self, event: TokenEvent) -> Event:
        """Count a token that is not read yet; return it, or the error of a client that reads too late."""
        self._num_unread += 1 + len(event.top)
        self._unread_bytes += UNREAD_TOKEN_BYTES + len(event.top) * UNREAD_LOGPROB_BYTES
        since = self.sending.since
        if self._num_unread <= PAUSE_UNREAD and (since is None or time.monotonic() - since < STALLED_S):
            return event
        self._set_paused(True)
        has_room = self._unsent.has(self._tenant, self._unread_bytes - self._held_bytes)
        if not has_room or self._num_unread > MAX_UNREAD:
            return ErrorEvent(RequestTimeout("the stream was not read in time: read it as it arrives"))
        self._unsent.take(self._tenant, self._unread_bytes - self._held_bytes)
        self._held_bytes = self._unread_bytes
        return event

    def _keep_prompt(self, event: PromptEvent) -> Event:
        """Count a prompt's log-probabilities, which are kept until the reply ends; return them, or an error."""
        try:
            self.keep(LOGPROB_BYTES * sum(1 + len(token.top) for token in event.tokens))
        except QueueFull as error:
            return ErrorEvent(error)
        return event

    def _give_back_unread(self) -> None:
        if self._held_bytes:
            self._unsent.give_back(self._tenant, self._held_bytes)
        self._num_unread = self._unread_bytes = self._held_bytes = 0

    def _set_paused(self, is_paused: bool) -> None:
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            for request_id in self._request_ids:
                self._engine.set_paused(request_id, is_paused)

    def _trace(self, number: int, event: Event) -> None:
        traced = self._traced.get(number)
        if traced is None:
            return
        if isinstance(event, TokenEvent):
            traced.num_tokens[event.index] += 1
        elif isinstance(event, DoneEvent):
            self._make_span(number, event.timings)
        elif isinstance(event, ErrorEvent):
            self._make_span(number, type(event.error).__name__)

    def _make_span(self, number: int, outcome: Timings | str) -> None:
        """Record a request as answered, or as failed with a kind of error."""
        traced = self._traced.pop(number)
        assert self._spans is not None
        if isinstance(outcome, Timings):
            self._spans.finished(traced, outcome)
        else:
            self._spans.failed(traced, outcome)

    def _count_as_lost(self, request: Request, submitted_at: float) -> None:
        """Count a request that its engine cannot count any more."""
        owner = request.tenant if request.record is None else request.record.tenant
        self._metrics.finished(owner, request.name, "error", time.monotonic() - submitted_at)


def begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return a task of work whose client may leave before its outcome is known."""
    task = asyncio.ensure_future(work)
    # Its error is then no error of the server, and asyncio logs none.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def while_connected(request: fastapi.Request, work: Awaitable[T]) -> T:
    """Await `work`; cancel it and raise ClientDisconnect if the client disconnects first.

    The body of `request` must have been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_cancel_at_disconnect(request, working))
    try:
        return await working
    except BaseException:
        if watching.done():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


async def _cancel_at_disconnect(request: fastapi.Request, working: asyncio.Future[T]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    working.cancel()


class ScoredText(Struct, frozen=True):
    """One token as log-probabilities show it; the first one of a prompt has none."""

    token_id: int
    token: TokenText
    logprob: float | None


class TextToken(Struct, frozen=True):
    """One token and the text that became visible with it.

    `text` is empty while the token may be part of an incomplete character or of a stop string.
    """

    index: int  # of the sequence; of a prompt's token, of its prompt
    token_id: int
    text: str
    offset: int  # characters of the sequence, or of the prompt, before the token
    scored: ScoredText | None = None
    top: tuple[ScoredText, ...] = ()
    calls: tuple[CallDelta, ...] = ()  # of tools
    reasoning: str = ""  # before the answer


class SequenceEnd(Struct, frozen=True):
    """The end of one sequence; `text` was held back until now."""

    index: int
    reason: FinishReason
    text: str
    calls: tuple[CallDelta, ...] = ()  # of tools
    reasoning: str = ""  # before the answer


@dataclass(slots=True)
class _Sequence:
    """One sequence whose end has not been sent, and its events that are not decoded yet."""

    detokenizer: IncrementalDetokenizer
    num_chars: int = 0  # that were decoded
    tokens: list[TokenEvent] = field(default_factory=list)
    reason: FinishReason | None = None


class TextOutputs:
    """Turns the events of requests into text. Event loop only.

    The sequences of all requests are numbered in one row: those of the first request come first.

    Args:
        requests: all that were submitted to `events`, in this order, with the same variant and parameters, but for
            their lengths.
        shows_prompt_ends: where a prompt ends within a character, its reply repeats it without that, and the character
            is shown with the sequence.
        marks: special tokens by id that are shown, whether others are or not.
    """

    def __init__(
        self,
        events: RequestEvents,
        requests: Sequence[Request],
        text: VariantText,
        shows_prompt_ends: bool = False,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        self._params = params = requests[0].sampling_params
        # Tokens of each prompt whose log-probabilities were asked for; they come before the first new token.
        self.prompts: dict[int, tuple[TextToken, ...]] = {}
        self.timings: Timings | None = None  # of the request that ended last
        self.num_tokens = 0  # that were returned
        self.num_cached = 0  # tokens of prompts that the prefix cache had
        self._events = events
        self._requests = requests
        self._text = text
        self._n = params.n
        self._stop_token_ids = params.stop_token_ids
        self._num_open = len(requests)
        self._shown = shows_prompt_ends, marks
        # Those that have begun, because the others of a request can wait for minutes; None once the end was sent.
        self._sequences: dict[int, _Sequence | None] = {}

    async def take(self) -> list[TextToken | SequenceEnd]:
        """Return what has come since the last call, at least one output; nothing when all requests are done.

        Raises:
            PeraxisError: a request failed, or the variant's tokenizer did.
        """
        outputs: list[TextToken | SequenceEnd] = []
        while not outputs and self._num_open:
            outputs = await self._decoded(await self._events.take())
        self.num_tokens += _num_tokens(outputs)
        return outputs

    async def _decoded(self, events: list[tuple[int, Event]]) -> list[TextToken | SequenceEnd]:
        """Decode all new tokens in one call."""
        changed: dict[int, _Sequence] = {}
        for number, event in events:
            if isinstance(event, DoneEvent):
                self.timings = event.timings
                self.num_cached += event.num_cached
                self._num_open -= 1
            elif isinstance(event, PromptEvent):
                self.prompts[number] = await self._prompt(number, event)
            elif isinstance(event, TokenEvent | FinishEvent):
                index = number * self._n + event.index
                sequence = self._sequence(index)
                if sequence is None:
                    continue
                changed[index] = sequence
                if isinstance(event, TokenEvent):
                    sequence.tokens.append(event)
                else:
                    sequence.reason = event.reason
        if not changed:
            return []
        new = await self._text.decode_streams([self._new_tokens(sequence) for sequence in changed.values()])
        texts: dict[int, TokenText] = {}
        first: dict[int, TokenText] = {}
        if self._params.logprobs is not None:
            texts = await self._texts_of(token for each in changed.values() for token in each.tokens)
            first = await self._texts_of(
                (
                    each.tokens[decoded.begins]
                    for each, decoded in zip(changed.values(), new, strict=True)
                    if decoded.begins is not None
                ),
                begins=True,
            )
        return [
            output
            for (index, sequence), decoded in zip(changed.items(), new, strict=True)
            for output in self._outputs(index, sequence, decoded, texts, first)
        ]

    def _sequence(self, index: int) -> _Sequence | None:
        """Return a sequence, made with its first event; None if its end was sent."""
        if index not in self._sequences:
            prompt_ids = self._requests[index // self._n].prompt_ids
            self._sequences[index] = _Sequence(IncrementalDetokenizer(self._params, prompt_ids, *self._shown))
        return self._sequences[index]

    def _new_tokens(self, sequence: _Sequence) -> NewTokens:
        ids = [token.token_id for token in sequence.tokens]
        return sequence.detokenizer.push(ids, sequence.reason is not None)

    async def _texts_of(self, tokens: Iterable[TokenEvent], begins: bool = False) -> dict[int, TokenText]:
        """Return the own text of each token that log-probabilities name.

        Args:
            begins: as the text of prompt and answer begins with it.
        """
        ids = {
            token_id for token in tokens for token_id in (token.token_id, *(each for each, _ in token.top))
        }
        return dict(zip(ids, await self._text.token_texts(list(ids), begins), strict=True)) if ids else {}

    async def _prompt(self, number: int, event: PromptEvent) -> tuple[TextToken, ...]:
        """Return the tokens of a prompt; the first one has no log-probability."""
        ids = self._requests[number].prompt_ids
        tokens = [
            TokenEvent(number, ids[0]),
            *(TokenEvent(number, token.token_id, token.logprob, token.top) for token in event.tokens),
        ]
        new = NewTokens(Window(), tuple(ids), False, self._params.skip_special_tokens)
        (decoded,) = await self._text.decode_streams([new])
        texts = await self._texts_of(tokens)
        begins = () if decoded.begins is None else (tokens[decoded.begins],)
        first = await self._texts_of(begins, begins=True)
        # Tens of thousands of values take long to make, and other requests need the event loop.
        making = timed_on_thread(_prompt_tokens)
        return await asyncio.to_thread(making, number, tokens, decoded, texts, first)

    def _outputs(
        self,
        index: int,
        sequence: _Sequence,
        decoded: NewText,
        texts: dict[int, TokenText],
        first: dict[int, TokenText],
    ) -> Iterator[TextToken | SequenceEnd]:
        """Yield a sequence's tokens up to a stop string, and its end.

        Args:
            first: the texts at the position with which the text of prompt and answer begins.
        """
        visible = sequence.detokenizer.take(decoded)
        tokens, sequence.tokens = sequence.tokens, []
        # They end with the token that completed a stop string.
        for position, (token, text) in enumerate(zip(tokens, visible.texts, strict=False)):
            own = first if position == decoded.begins else texts
            yield _text_token(index, token, text, sequence.num_chars, own)
            sequence.num_chars += len(decoded.texts[position])
        if visible.stopped:
            yield SequenceEnd(index, "stop", visible.tail)
            if sequence.reason is None:
                self._end_early(index)
                return
        elif sequence.reason is not None:
            yield SequenceEnd(index, sequence.reason, visible.tail)
        else:
            return
        self._sequences[index] = None

    def _end_early(self, index: int) -> None:
        """End a sequence whose further text is not shown."""
        if self._sequences[index] is not None:
            self._sequences[index] = None
            self._events.stop_sequence(*divmod(index, self._n))


def _prompt_tokens(
    number: int,
    tokens: Sequence[TokenEvent],
    decoded: NewText,
    texts: dict[int, TokenText],
    first: dict[int, TokenText],
) -> tuple[TextToken, ...]:
    """Return the tokens of a prompt, given the own texts of all and of the one with which the text begins."""
    offset, shown = 0, []
    for position, (token, text) in enumerate(zip(tokens, decoded.texts, strict=True)):
        own = first if position == decoded.begins else texts
        shown.append(_text_token(number, token, text, offset, own))
        offset += len(text)
    return tuple(shown)


def _text_token(
    index: int, token: TokenEvent, text: str, offset: int, texts: dict[int, TokenText]
) -> TextToken:
    if token.token_id not in texts:
        return TextToken(index, token.token_id, text, offset)
    scored = ScoredText(token.token_id, texts[token.token_id], token.logprob)
    top = tuple(ScoredText(token_id, texts[token_id], logprob) for token_id, logprob in token.top)
    return TextToken(index, token.token_id, text, offset, scored, top)


def _num_tokens(outputs: Iterable[TextToken | SequenceEnd]) -> int:
    return sum(isinstance(output, TextToken) for output in outputs)


@dataclass(slots=True)
class _TemplateText:
    """The text of an answer that a response template parses, and the parts that were returned."""

    texts: list[str] = field(default_factory=list)  # with special tokens
    visible: list[str] = field(default_factory=list)
    is_cut: bool = False  # the last token does not end the answer
    shown: ParsedAnswer = field(default_factory=ParsedAnswer)


class AnswerOutputs(TextOutputs):
    """Outputs whose text is content alone; reasoning and calls of tools stand beside it.

    Args:
        form: how the answer is written.
        as_it_comes: parts that a response template finds are returned as soon as they are known, not at the end.
        types: of the arguments of `requested.tools`, where they were read before.
    """

    def __init__(
        self,
        events: RequestEvents,
        requests: Sequence[Request],
        text: VariantText,
        form: AnswerForm,
        requested: Requested,
        as_it_comes: bool,
        types: ArgumentTypes | None = None,
    ) -> None:
        self._by_template = form.response_prefix is not None and requested.form == "free"
        super().__init__(events, requests, text, marks=None if self._by_template else form.special)
        self._form = form
        self._requested = requested
        self._as_it_comes = as_it_comes or requested.is_single
        new_parser = partial(AnswerParser, form, requested, types or ArgumentTypes(requested.tools))
        self._parsers: defaultdict[int, AnswerParser] = defaultdict(new_parser)
        self._texts: defaultdict[int, _TemplateText] = defaultdict(_TemplateText)
        self._whole: set[int] = set()  # sequences whose answers have all their parts

    async def take(self) -> list[TextToken | SequenceEnd]:
        while outputs := await super().take():
            open_outputs = [output for output in outputs if output.index not in self._whole]
            if self._by_template:
                parsed = await self._parsed_by_template(open_outputs)
            else:
                parsed = self._parsed(open_outputs)
            # Those behind the only call are none of the answer.
            self.num_tokens += _num_tokens(parsed) - _num_tokens(outputs)
            if parsed:
                return parsed
        return []

    def _parsed(self, outputs: list[TextToken | SequenceEnd]) -> list[TextToken | SequenceEnd]:
        """Return outputs with the parts that have become certain with each, up to a sequence's only call."""
        found: list[TextToken | SequenceEnd] = []
        for output in outputs:
            if output.index not in self._whole:
                parser = self._parsers[output.index]
                num_held = parser.num_held
                parts = parser.push(output.text, isinstance(output, SequenceEnd))
                self._events.keep(CHARACTER_BYTES * (parser.num_held - num_held))
                found += self._with_parts(output, parts, parser.is_done)
        return found

    async def _parsed_by_template(
        self, outputs: list[TextToken | SequenceEnd]
    ) -> list[TextToken | SequenceEnd]:
        """Return outputs without text, but for the last one of each sequence, which has all that is new in it."""
        positions: dict[int, int] = {}
        for position, output in enumerate(outputs):
            own, text = self._texts[output.index], self._with_special(output)
            self._events.keep(PIECE_BYTES + CHARACTER_BYTES * (len(text) + len(output.text)))
            own.texts.append(text)
            own.visible.append(output.text)
            if isinstance(output, TextToken):
                own.is_cut = output.token_id not in self._stop_token_ids
            if self._as_it_comes or isinstance(output, SequenceEnd):
                positions[output.index] = position
        wholes = {index: isinstance(outputs[position], SequenceEnd) for index, position in positions.items()}
        answers = [self._answer(index, is_whole) for index, is_whole in wholes.items()]
        parsed = await parsed_by_template(self._text, answers, self._requested.tools) if answers else []
        new = dict(zip(positions.values(), parsed, strict=True))
        found: list[TextToken | SequenceEnd] = []
        for position, output in enumerate(outputs):
            parts, is_done, own = Parts(), False, self._texts[output.index]
            if position in new:
                answer = new[position].over(own.shown)
                parts, own.shown = answer.behind(own.shown), answer
                is_done = self._requested.is_single and bool(answer.calls)
            found += self._with_parts(output, parts, is_done)
        return found

    def _answer(self, index: int, is_whole: bool) -> TemplateAnswer:
        own, prefix = self._texts[index], self._form.response_prefix or ""
        texts = "".join(own.texts), "".join(own.visible)
        return TemplateAnswer(prefix, *texts, is_whole, self._requested.is_single, own.is_cut)

    def _with_special(self, output: TextToken | SequenceEnd) -> str:
        """Return the text of an output, with a special token that belongs to the markup."""
        if isinstance(output, SequenceEnd) or not self._params.skip_special_tokens:
            return output.text
        is_end = output.token_id in self._stop_token_ids
        return output.text + ("" if is_end else self._form.special.get(output.token_id, ""))

    def _with_parts(
        self, output: TextToken | SequenceEnd, parts: Parts, is_done: bool
    ) -> Iterator[TextToken | SequenceEnd]:
        """Yield an output with its parts; with the end of its sequence if no text is shown behind it."""
        yield replace(output, text=parts.content, reasoning=parts.reasoning, calls=parts.calls)
        if is_done or isinstance(output, SequenceEnd):
            self._whole.add(output.index)
            self._parsers.pop(output.index, None)
        if is_done and not isinstance(output, SequenceEnd):
            yield SequenceEnd(output.index, "stop", "")
            self._end_early(output.index)
