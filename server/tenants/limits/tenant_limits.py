"""The limits of one tenant as a value: in files, in settings, in requests and between processes. Touches no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from pydantic import PlainSerializer, PlainValidator

# Every integer up to this is exact in JSON readers that use doubles.
LARGEST = (1 << 53) - 1

Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Natural = Annotated[int, Meta(ge=0, le=LARGEST)]


class TenantLimits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The most that a tenant may use of one server; None is unlimited."""

    requests_per_minute: Positive | None = None
    # Prompt tokens count when a request is admitted, generated tokens as they come. What it may still generate is
    # reserved, or a part of it if the client has not set a length.
    tokens_per_minute: Positive | None = None
    # Requests between their admission and their end, those whose prompts are being tokenized included.
    max_running: Positive | None = None
    max_uploads: Positive | None = None  # under way
    # Counts each artifact with a live version once, and uploads under way.
    max_stored_bytes: Natural | None = None
    max_variants: Natural | None = None  # with a live version
    max_versions: Positive | None = None  # live ones of one variant
    max_pinned: Natural | None = None  # versions


FIELDS = tuple(field.name for field in msgspec.structs.fields(TenantLimits))


def parse_limits(value: object) -> TenantLimits:
    """Return limits from a mapping, as TOML gives it, or from JSON text, as an environment variable gives it.

    Raises:
        ValueError: names the field at fault.
    """
    try:
        if isinstance(value, str | bytes):
            return msgspec.json.decode(value, type=TenantLimits)
        return msgspec.convert(value, TenantLimits)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def plain(limits: TenantLimits) -> dict[str, Any]:
    """Return the limits by name; None is unlimited."""
    return msgspec.structs.asdict(limits)


def as_toml(limits: TenantLimits) -> str:
    """Return the limits as a TOML inline table, without those that are unlimited."""
    given: Mapping[str, int] = {name: value for name, value in plain(limits).items() if value is not None}
    return "{" + ", ".join(f"{name} = {value}" for name, value in given.items()) + "}"


# A field of a pydantic model.
LimitsSetting = Annotated[TenantLimits, PlainValidator(parse_limits), PlainSerializer(plain)]
