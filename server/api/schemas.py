"""The bodies and query parameters of all calls, as msgspec and pydantic types, and how clients name models.

Bodies are msgspec's: unknown fields, silent conversions and NaN are refused. Bounds here hold for every model; the
engine checks those that depend on the model.

On OpenAI's routes a field that its API lacks is ignored, as its clients expect. A field of the API that would change
the output and that this server lacks is refused by name, unless its value asks for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import DecodeError, Meta, Struct
from msgspec.json import decode
from pydantic import BaseModel, ConfigDict, Field

from deltastore.errors import VariantNotFound
from deltastore.registry.records import NAME, Visibility
from server.errors import InvalidRequest
from server.grammar.grammar import Requested, ResponseFormat, ToolChoice, Tools, requested
from server.tenants.tenant import Role as KeyRole

MAX_MESSAGES = 4096
# Arrays, objects and strings of one JSON body, names of fields included: some 30 for each of 4096 messages.
MAX_VALUES = 1 << 17
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

Role = Annotated[str, Meta(min_length=1, max_length=64)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Probability = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=0, le=10_000_000)]
MinProbability = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]
NumSequences = Annotated[int, Meta(ge=1, le=128)]


def num_values(text: bytes | bytearray) -> int:
    """Return the number of arrays, objects and strings in JSON, those without an end included.

    Takes the time of a few copies. Beyond `MAX_VALUES` strings, the others are not counted.
    """
    # Without escapes, each quote begins or ends a string.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = (plain.count(b'"') + 1) // 2
    if num_strings > MAX_VALUES:
        return num_strings
    outside = b"".join(plain.split(b'"')[::2])
    return num_strings + outside.count(b"[") + outside.count(b"{")


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

    def conversation(self) -> list[dict[str, str]]:
        """Return the messages in the form that chat templates take."""
        return [{"role": message.role, "content": message.content} for message in self.messages or []]

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
    visibility: Visibility | None = None

    def __post_init__(self) -> None:
        if (self.active is None) == (self.visibility is None):
            raise ValueError("give either active or visibility")


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


OPENAI_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "n")
# Values of refused fields that ask for nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}

ModelName = Annotated[str, Meta(min_length=1, max_length=200)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
NumTokens = Annotated[int, Meta(ge=0, le=10_000_000)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StreamOptions(Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool | None = None


class OpenAIBody(Struct, frozen=True, kw_only=True):
    """Fields that both routes have. Those of `SAMPLING_FIELDS` take the variant's defaults if they are not given.

    `top_k`, `min_p` and `repetition_penalty` are vLLM's.
    """

    model: ModelName
    max_tokens: NumTokens | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: MinProbability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    n: NumSequences | None = None
    stop: StopString | StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None

    def __post_init__(self) -> None:
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise InvalidRequest(f"{name} is not supported by this server: leave it out", name)

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the number of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def requested(self) -> Requested:
        """Return the form that the output must have; raises InvalidRequest if it cannot be had."""
        return FREE if self.response_format is None else requested(self.response_format)

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that were given, without lengths and log-probabilities."""
        return sampling_of(self, OPENAI_SAMPLING_FIELDS, self.stop)


class CompletionBody(OpenAIBody, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: Any = None
    suffix: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of is not supported by this server: leave it out", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1 without echo", "max_tokens")
        if isinstance(self.prompt, list) and len(set(map(type, self.prompt))) != 1:
            raise InvalidRequest(
                "prompt must be a text, a list of texts, a list of token ids or a list of such lists, and not empty",
                "prompt",
            )

    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Return each prompt as a text or as token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return (prompt,)
        prompts: Sequence[str | Sequence[int]] = prompt
        return prompts


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """One part of a message's content."""

    text: str


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str


class MessageCall(Struct, frozen=True):
    """A call of a tool in an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates take it: its arguments are an object, if the model wrote one."""
        try:
            arguments: Any = decode(self.function.arguments)
        except (DecodeError, RecursionError):
            arguments = self.function.arguments
        return {
            "id": self.id,
            "type": self.type,
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ChatMessage(Struct, frozen=True):
    """One message of a conversation."""

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None

    def __post_init__(self) -> None:
        if self.function_call:
            raise InvalidRequest(
                "function_call in messages is not supported by this server: use tool_calls", "messages"
            )

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it. Parts of its content are lines, as in vLLM."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


def _for_templates(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates take.

    Raises:
        InvalidRequest: the arguments of calls, which are JSON in JSON, have too many values.
    """
    arguments = (call.function.arguments for message in messages for call in message.tool_calls or ())
    if sum(num_values(each.encode()) for each in arguments) > MAX_VALUES:
        raise InvalidRequest(
            f"messages: the arguments of tool calls have more than {MAX_VALUES} arrays, objects and strings: "
            "leave messages out",
            "messages",
        )
    return [message.for_template() for message in messages]


class ChatBody(OpenAIBody, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    tool_choice: ToolChoice | None = None
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None
    verbosity: Any = None
    web_search_options: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.num_new_tokens == 0:
            raise InvalidRequest(f"{self.length_field} must be at least 1", self.length_field)

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages in the form that chat templates take; raises as `_for_templates`."""
        return _for_templates(self.messages)

    def requested(self) -> Requested:
        if (self.response_format, self.tools, self.tool_choice) == (None, None, None):
            return FREE
        return requested(self.response_format, self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def num_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def length_field(self) -> str:
        """The client's field of `num_new_tokens`; `max_completion_tokens` replaced `max_tokens` in OpenAI's API."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class TokenizeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /tokenize`. By default a prompt has special tokens and a conversation only its template's."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages in the form that chat templates take; raises as `_for_templates`."""
        return _for_templates(self.messages or ())


class DetokenizeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: ModelName | None = None
