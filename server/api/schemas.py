"""What clients may send, and how names are written. Bounds that hold for every model; nothing of HTTP."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from deltastore.errors import VariantNotFound

MAX_MESSAGES = 4096
BASE = "base"  # how requests may call the base; no variant may be called so
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
VERSION = re.compile(r"[1-9][0-9]{0,8}")

Version = Annotated[int, Field(ge=1, lt=1_000_000_000)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Strict(BaseModel):
    """No unknown field, no silent conversion, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Query(BaseModel):
    """Query parameters, which are text and so converted; an unknown one is refused: a typo must not go unseen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GenerateQuery(Query):
    variant: str | None = None  # NAME or NAME@VERSION; the base without


class UploadQuery(Query):
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    activate: bool = True


class VersionQuery(Query):
    version: Version | None = None


class Message(Strict):
    """One turn of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str


class GenerateBody(Strict):
    """What to answer and how. What is not given is the variant's own default."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop: Annotated[list[StopString] | None, BeforeValidator(_as_list), Field(max_length=16)] = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> GenerateBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were given."""
        given = self.model_dump(exclude={"prompt", "messages", "stream", "stop"}, exclude_none=True)
        return given if self.stop is None else {**given, "stop": tuple(self.stop)}


class ActivateBody(Strict):
    active: Version


@dataclass(frozen=True, slots=True)
class Reference:
    """What a request calls by name: a variant, perhaps one version of it, or the base."""

    name: str | None  # None is the base
    version: int | None = None  # None is the active one

    @classmethod
    def parse(cls, text: str | None) -> Reference:
        """``NAME`` or ``NAME@VERSION``; VariantNotFound for no version. Whether the name exists is for the registry."""
        if text is None or text == BASE:
            return cls(None)
        name, at, version = text.partition("@")
        if not at:
            return cls(name)
        if not VERSION.fullmatch(version):
            raise VariantNotFound(f"{text!r}: a version is a number, as in NAME@2")
        return cls(name, int(version))
