"""Bodies and query parameters of our own routes, and how clients name variants.

Bodies are msgspec's: unknown fields, silent conversions and NaN are refused. Bounds here hold for every model; the
engine checks those that depend on the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct
from pydantic import BaseModel, ConfigDict, Field

from deltastore.errors import VariantNotFound
from deltastore.registry.records import NAME, Visibility
from server.tenants.tenant import Role as KeyRole

MAX_MESSAGES = 4096
# Arrays, objects and strings of one JSON body, names of fields included: some 30 for each of 4096 messages.
MAX_VALUES = 1 << 17
SAMPLING_FIELDS = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "logprobs", "n",
)  # fmt: skip
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
    """The body of `POST /variants` that publishes from a source: a file of a hub, or an absolute path."""

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
