"""The bodies and query parameters of all calls, as msgspec and pydantic types, and how clients name models.

Bodies are msgspec's: unknown fields, silent conversions and NaN are refused. Bounds here hold for every model; the
engine checks those that depend on the model.

`fields.py` says what becomes of fields that the bodies of OpenAI's two calls lack.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, cast

import numpy as np
from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.json import Decoder
from msgspec.structs import force_setattr
from pydantic import BaseModel, ConfigDict, Field

from deltastore.errors import VariantNotFound
from deltastore.registry.records import NAME, Visibility
from server.api.conversations import (
    MAX_MESSAGES,
    RESERVED_VARIABLES,
    ContinuedField,
    Effort,
    Messages,
    Role,
    TemplateVariables,
    check_conversation,
)
from server.errors import InvalidRequest
from server.grammar.grammar import (
    Choices,
    GivenTools,
    Grammar,
    Pattern,
    Requested,
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
    requested,
)
from server.protocol.request import MAX_BIASED, TokenIds, token_ids_of
from server.tenants.tenant import Role as KeyRole
from server.text.chat_template import Conversation

SAMPLING_FIELDS = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "logprobs", "n",
)  # fmt: skip
# What a request asks of its output that says nothing of its form.
FREE = Requested()
BASE = "base"  # names the base in requests; reserved, so no variant has it
# The entries of a page of a list: the most that a client may ask for, and those that it gets if it does not say.
MAX_PAGE_ENTRIES, PAGE_ENTRIES = 1000, 100
MAX_EXPIRY_S = 100 * 366 * 86400
VERSION = re.compile(r"[1-9][0-9]{0,8}")

StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Probability = Annotated[float, Meta(gt=0, le=1)]
# Of OpenAI's and vLLM's clients: 0 keeps the likeliest token alone, and -1 keeps all.
ProbabilityOrZero = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=0, le=10_000_000)]
TopKOrAll = Annotated[int, Meta(ge=-1, le=10_000_000)]
MinProbability = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]
NumSequences = Annotated[int, Meta(ge=1, le=128)]


class Query(BaseModel):
    """Query parameters, converted from text; an unknown one is refused, so that a typo is reported."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TenantQuery(Query):
    # The tenant that an administrator acts for; `service.tenant_of` reads it.
    tenant: str | None = None


class PageQuery(Query):
    """A part of a list: `limit` entries behind the one whose id is `after`."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ENTRIES)] = PAGE_ENTRIES
    after: Annotated[str, Field(max_length=64)] | None = None  # None begins with the first


class TenantPageQuery(PageQuery, TenantQuery):
    """A part of a list, of a tenant that an administrator may name."""


class VariantsQuery(TenantPageQuery):
    """A part of the list of variants; `search` is a part of their names, in letters of any case."""

    search: Annotated[str, Field(max_length=64)] = ""


class VersionsQuery(TenantQuery):
    """A part of the list of a variant's versions; `after` is a version's number."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ENTRIES)] = PAGE_ENTRIES
    after: Annotated[int, Field(ge=0, lt=1_000_000_000)] = 0


class GenerateQuery(TenantQuery):
    variant: str | None = None  # NAME or NAME@VERSION; None is the base


class UploadQuery(TenantQuery):
    name: Annotated[str, Field(pattern=NAME.pattern)]
    activate: bool = True
    visibility: Visibility | None = None  # None leaves it as it is; a new variant is private


class SourceBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /variants` that publishes the artifact at an absolute path on the server."""

    source: Annotated[str, Meta(min_length=1, max_length=4096)]


class VersionQuery(TenantQuery):
    version: Annotated[int, Field(ge=1, lt=1_000_000_000)] | None = None


class ChangesQuery(Query):
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class KeysQuery(PageQuery):
    tenant: str | None = None  # None: the keys of all tenants


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Role
    content: str


class GenerateBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /generate`; fields that are not given take the variant's own defaults."""

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: MinProbability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: StopString | StopStrings | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    logprobs: NumLogprobs | None = None
    n: NumSequences = 1
    stream: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")

    def conversation(self) -> Conversation:
        """Return the conversation of a body that has messages."""
        messages = self.messages or []
        return Conversation([{"role": message.role, "content": message.content} for message in messages])

    def sampling_params(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that were given."""
        return sampling_of(self, SAMPLING_FIELDS, self.stop)


def sampling_of(body: Struct, names: tuple[str, ...], stop: str | list[str] | None) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a body sets: those of `names`, and stop strings."""
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    if stop is not None:
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return given


class VariantPatch(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `PATCH /variants/{name}`: one change."""

    active: Annotated[int, Meta(ge=1, lt=1_000_000_000)] | None = None
    # The version that must be active for the change; 0: none. Without it, whatever is active is replaced.
    if_active: Annotated[int, Meta(ge=0, lt=1_000_000_000)] | None = None
    visibility: Visibility | None = None

    def __post_init__(self) -> None:
        if (self.active is None) == (self.visibility is None):
            raise ValueError("give either active or visibility")
        if self.if_active is not None and self.active is None:
            raise ValueError("if_active goes with active: give both")


class KeyBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /keys`."""

    tenant: str
    roles: Annotated[tuple[KeyRole, ...], Meta(min_length=1, max_length=4)]
    expires_in_s: Annotated[int, Meta(ge=1, le=MAX_EXPIRY_S)] | None = None  # None: never


@dataclass(frozen=True, slots=True)
class Reference:
    """The model that a client names: a variant, one version of it, or the base."""

    name: str | None  # None is the base
    version: int | None = None  # None is the active version

    @classmethod
    def parse(cls, text: str | None) -> Reference:
        """Parse ``NAME`` or ``NAME@VERSION``, without looking the name up.

        Raises:
            VariantNotFound: the part behind ``@`` is no version number.
        """
        if text is None or text == BASE:
            return cls(None)
        name, at, version = text.partition("@")
        if not at:
            return cls(name)
        if not VERSION.fullmatch(version):
            raise VariantNotFound(f"{text!r}: a version is a number, as in NAME@2")
        return cls(name, int(version))


OPENAI_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "n", "frequency_penalty",
    "presence_penalty", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
ModelName = Annotated[str, Meta(min_length=1, max_length=200)]
NumTokens = Annotated[int, Meta(ge=0, le=10_000_000)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
MAX_TOKEN_ID = (1 << 31) - 1
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASED)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=128)]
BadWords = Annotated[list[Annotated[str, Meta(min_length=1, max_length=128)]], Meta(max_length=128)]


# Events of a stream with the number of tokens.
UsageIn = Literal["none", "last", "all"]


class StreamOptions(Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's


class OpenAIBody(Struct, frozen=True, kw_only=True, dict=True):
    """Fields that both routes have. Those of `SAMPLING_FIELDS` take the variant's defaults if they are not given.

    Those behind `response_format` are vLLM's, and so are `top_k`, `min_p` and `repetition_penalty`.

    A body makes what it requests of its output while it is parsed: with schemas and tools of the largest size that
    takes 0.1 s, which the event loop does not have.
    """

    model: ModelName
    max_tokens: NumTokens | None = None
    temperature: Temperature | None = None
    top_p: ProbabilityOrZero | None = None
    top_k: TopKOrAll | None = None
    min_p: MinProbability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    n: NumSequences | None = None
    stop: StopString | StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: NumTokens | None = None
    bad_words: BadWords | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def usage_in(self) -> UsageIn:
        """The events of a stream that have the number of tokens."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return "none"
        return "all" if options.continuous_usage_stats else "last"

    @cached_property
    def requested(self) -> Requested:
        """The form that the output must have; raises InvalidRequest if it cannot be had."""
        grammar = self.grammar()
        return FREE if grammar is None else requested(grammar)

    def grammar(self) -> Grammar | None:
        """Return the grammar of an answer; None if it is free.

        Raises:
            InvalidRequest: several fields ask for one, or a schema cannot be used.
        """
        older = {
            name: getattr(self, f"guided_{name}")
            for name in ("json", "regex", "choice", "grammar")
            if getattr(self, f"guided_{name}") is not None
        }
        formats: dict[str, Grammar | None] = {}
        if self.response_format is not None:
            formats["response_format"] = self.response_format.grammar()
        if self.structured_outputs is not None:
            formats["structured_outputs"] = self.structured_outputs.made("structured_outputs")
        for name, value in older.items():
            formats[f"guided_{name}"] = StructuredOutputs(**{name: value}).made(f"guided_{name}")
        asked = {name: grammar for name, grammar in formats.items() if grammar is not None}
        if len(asked) > 1:
            raise InvalidRequest(f"the call has {' and '.join(asked)}: give one of them", list(asked)[1])
        return next(iter(asked.values()), None)

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that were given, without lengths and log-probabilities."""
        given = sampling_of(self, OPENAI_SAMPLING_FIELDS, self.stop)
        if self.top_k == -1:
            given["top_k"] = 0
        if self.top_p == 0:
            given |= {"top_p": 1.0, "temperature": 0.0}
        if self.logit_bias:
            given["logit_bias"] = tuple(sorted(self.logit_bias.items()))
        if self.stop_token_ids:
            given["stop_token_ids"] = frozenset(self.stop_token_ids)
        if self.bad_words:
            given["bad_words"] = tuple(self.bad_words)
        return given


# Bound on the prompts of one call that are token ids; another one depends on the server's settings.
MAX_PROMPTS = 1024
# JSON of token ids that is parsed at once: other threads have the interpreter's lock between two of them.
PARSED_BYTES = 1 << 16
# Raw has no whitespace around a value.
FIRST_ITEM = re.compile(rb"\[[ \t\r\n]*(.)", re.DOTALL)
FLAT_ITEM = re.compile(rb"[ \t\r\n]*(\[[^\[\]]*\])[ \t\r\n]*([,\]])")
COMMA = re.compile(rb",")
IN_TOKEN_IDS = b"0123456789, \t\r\n"

TOKEN_ID: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
TOKEN_IDS: dict[str, Any] = {"type": "array", "items": TOKEN_ID}
PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        TOKEN_IDS,
        {"type": "array", "items": TOKEN_IDS},
    ]
}

_texts: Decoder[str | list[str]] = Decoder(cast(Any, str | list[str]))


def parse_prompts(json: Raw) -> list[str] | list[TokenIds]:
    """Return each prompt as a text or as token ids.

    Raises:
        InvalidRequest: it is none, or there are more than `MAX_PROMPTS` lists of token ids.
    """
    text = memoryview(json)
    first = FIRST_ITEM.match(text)
    if first is not None and first[1] not in (b'"', b"]"):
        return _parse_lists(text) if first[1] == b"[" else [parse_token_ids(text, "prompt")]
    try:
        texts = _texts.decode(text)
    except (DecodeError, UnicodeDecodeError) as error:
        raise _no_prompt() from error
    if not texts and isinstance(texts, list):
        raise _no_prompt()
    return [texts] if isinstance(texts, str) else texts


def _parse_lists(text: memoryview) -> list[TokenIds]:
    lists: list[TokenIds] = []
    end = 1
    while (found := FLAT_ITEM.match(text, end)) is not None:
        if len(lists) == MAX_PROMPTS:
            raise InvalidRequest(
                f"the call has more than {MAX_PROMPTS} prompts: send several calls", "prompt"
            )
        lists.append(parse_token_ids(text[slice(*found.span(1))], "prompt"))
        if found[2] == b"]":
            return lists
        end = found.end()
    raise _no_prompt()


def parse_token_ids(json: Raw | memoryview, param: str) -> TokenIds:
    """Return the token ids of a JSON array; raise InvalidRequest, with the request's field, if it is none of them."""
    text, ids = memoryview(json), token_ids_of(())
    begin, last = 1, len(text) - 1
    if bytes(text[:1]) != b"[":
        raise _no_token_ids(param)
    while begin < last:
        comma = COMMA.search(text, min(begin + PARSED_BYTES, last), last)
        end = last if comma is None else comma.start()
        part = bytes(text[begin:end])
        if part.isspace():
            # The array is empty; numpy makes a zero of it.
            break
        if part.translate(None, IN_TOKEN_IDS):
            raise _no_token_ids(param)
        # The JSON is valid, so that these are numbers behind commas; those that int64 cannot hold become its largest.
        found = np.fromstring(part, np.int64, sep=",")
        if found.max(initial=0) > MAX_TOKEN_ID:
            raise _no_token_ids(param)
        ids.frombytes(found.astype(np.int32).tobytes())
        begin = end + 1
    return ids


def _no_prompt() -> InvalidRequest:
    return InvalidRequest(
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists, and not empty",
        "prompt",
    )


def _no_token_ids(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: token ids must be a list of integers from 0 to {MAX_TOKEN_ID}", param)


class CompletionBody(OpenAIBody, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    # Parsed when the body is; `prompts` returns them.
    prompt: Annotated[Raw, Meta(extra_json_schema=PROMPT)]
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool | None = None  # vLLM's
    best_of: Any = None

    def __post_init__(self) -> None:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of is not supported by this server: leave it out", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1 without echo", "max_tokens")
        force_setattr(self, "prompt", parse_prompts(self.prompt))
        _ = self.requested

    def prompts(self) -> Sequence[str | TokenIds]:
        """Return each prompt as a text or as token ids."""
        return cast("Sequence[str | TokenIds]", self.prompt)


def _check_chat(body: ChatBody | TokenizeBody) -> None:
    """Refuse messages, tools or fields of a template that cannot be used.

    Raises:
        InvalidRequest: they contradict each other, or have too many values or too deep ones.
        ValidationError: a message or a tool has a field of another type.
    """
    check_conversation(body.messages, body.tools)
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message leaves the last message open, and add_generation_prompt opens one behind it: "
            "set one of them",
            "continue_final_message",
        )
    if reserved := RESERVED_VARIABLES & (body.chat_template_kwargs or {}).keys():
        raise InvalidRequest(
            f"chat_template_kwargs: {min(reserved)} is set by the server: leave it out",
            "chat_template_kwargs",
        )


def _conversation(body: ChatBody | TokenizeBody, tools: bytes) -> Conversation:
    """Return the conversation of a body that has messages; `tools` are those that its template is shown."""
    continued = body.continue_final_message or False
    adds_prompt = body.add_generation_prompt
    return Conversation(
        body.messages or [],
        not continued if adds_prompt is None else adds_prompt,
        bool(body.add_special_tokens),
        tools,
        body.chat_template,
        body.chat_template_kwargs or {},
        body.reasoning_effort,
        continued,
    )


class ChatBody(OpenAIBody, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tool_choice: ToolChoice | None = None
    tools: GivenTools | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None  # a name
    chat_template_kwargs: TemplateVariables | None = None
    continue_final_message: bool | ContinuedField | None = None
    reasoning_effort: Effort | None = None

    def __post_init__(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.num_new_tokens == 0:
            raise InvalidRequest(f"{self.length_field} must be at least 1", self.length_field)
        _check_chat(self)
        _ = self.requested

    def conversation(self, tools: bytes) -> Conversation:
        """Return the conversation; `tools` are those that its template is shown."""
        return _conversation(self, tools)

    @cached_property
    def requested(self) -> Requested:
        grammar = self.grammar()
        if (grammar, self.tools, self.tool_choice) == (None, None, None):
            return FREE
        return requested(grammar, self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def num_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def length_field(self) -> str:
        """The client's field of `num_new_tokens`; `max_completion_tokens` replaced `max_tokens` in OpenAI's API."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class TokenizeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The body of `POST /tokenize`: a prompt, or a conversation with the fields by which chats render it.

    By default a prompt has special tokens and a conversation only its template's.
    """

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None  # a name
    chat_template_kwargs: TemplateVariables | None = None
    continue_final_message: bool | ContinuedField | None = None
    reasoning_effort: Effort | None = None
    tool_choice: ToolChoice | None = None
    tools: GivenTools | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is None:
            for name in (
                "chat_template",
                "chat_template_kwargs",
                "continue_final_message",
                "reasoning_effort",
                "tools",
            ):
                if getattr(self, name):
                    raise InvalidRequest(f"{name} needs messages: leave it out", name)
        _check_chat(self)
        # As in `OpenAIBody`.
        _ = self.shown_tools

    @cached_property
    def shown_tools(self) -> bytes:
        """The tools that the template is shown; raises InvalidRequest if they cannot be used."""
        return requested(None, self.tools, self.tool_choice).tools

    def conversation(self) -> Conversation:
        """Return the conversation."""
        return _conversation(self, self.shown_tools)


class DetokenizeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /detokenize`."""

    # Parsed when the body is; `token_ids` returns them.
    tokens: Annotated[Raw, Meta(extra_json_schema=TOKEN_IDS)]
    model: ModelName | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "tokens", parse_token_ids(self.tokens, "tokens"))

    def token_ids(self) -> TokenIds:
        return cast("TokenIds", self.tokens)
