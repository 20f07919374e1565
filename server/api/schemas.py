"""Bodies and query parameters of our own routes, and how clients name variants. Knows no HTTP and no engine.

Bounds here hold for every model; the engine checks those that depend on the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from deltastore.errors import VariantNotFound
from deltastore.registry.records import NAME

MAX_MESSAGES = 4096
BASE = "base"  # names the base in requests; reserved, so no variant has it
VERSION = re.compile(r"[1-9][0-9]{0,8}")

Version = Annotated[int, Field(ge=1, lt=1_000_000_000)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Field(max_length=16)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Strict(BaseModel):
    """A body without unknown fields, silent conversions or NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Query(BaseModel):
    """Query parameters, converted from text; an unknown one is refused, so that a typo is reported."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GenerateQuery(Query):
    variant: str | None = None  # NAME or NAME@VERSION; None is the base


class UploadQuery(Query):
    name: Annotated[str, Field(pattern=NAME.pattern)]
    activate: bool = True


class VersionQuery(Query):
    version: Version | None = None


class Message(Strict):
    """One message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str


class GenerateBody(Strict):
    """The body of `POST /generate`; fields that are not given take the variant's own defaults."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop: Annotated[StopStrings | None, BeforeValidator(_as_list)] = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> GenerateBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    def sampling_params(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that were given."""
        given = self.model_dump(exclude={"prompt", "messages", "stream", "stop"}, exclude_none=True)
        return given if self.stop is None else {**given, "stop": tuple(self.stop)}


class ActivateBody(Strict):
    active: Version


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
