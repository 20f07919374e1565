"""What the registry writes down about a variant: its version records and its state, as values and as JSON.

Pure: knows the rules of names and versions, and no files. A record never changes once it is published; the
state is the only thing of a variant that does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from deltastore.errors import ArtifactError, RegistryError, UsageError

PUBLIC = "public"  # the tenant whose variants everybody may use
RESERVED = ("base", "other")  # the base model, and the metrics' label for what is too much
MAX_FIDELITY_BYTES = 1 << 20  # every look at a version reads it
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

T = TypeVar("T")
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0)]
Version = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class ArtifactFacts:
    """What the one who checked an artifact found in it."""

    data_start: int  # bytes before the data section
    device_bytes: int  # bytes of the data section that a device needs
    base_fingerprint: str
    method: str
    fidelity: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One published version of a variant."""

    __pydantic_config__ = ConfigDict(strict=True)

    tenant: str
    name: str
    version: Version
    digest: Digest
    size_bytes: Size
    data_start: Size
    device_bytes: Size
    base_fingerprint: Digest
    chunk_sha256: tuple[Digest, ...]  # of each 4 MiB of the file; the last may be shorter
    created_at: str  # UTC, ISO 8601
    method: str
    fidelity: dict[str, Any]
    activate: bool  # published to become the active version
    format: Literal[1] = 1  # of the record; another one is refused, not guessed at

    def to_json(self) -> bytes:
        """The record as it is stored.

        Raises:
            ArtifactError: its fidelity report, which comes from a stranger, could not be read back.
        """
        try:
            size = len(_encode(self.fidelity))
            raw = _encode(asdict(self))
            _RECORD.validate_json(raw)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArtifactError(f"the fidelity report of {self.name!r} cannot be stored: {error}") from error
        if size > MAX_FIDELITY_BYTES:
            raise ArtifactError(
                f"the fidelity report of {self.name!r} has {size} bytes: at most {MAX_FIDELITY_BYTES} are kept"
            )
        return raw


@dataclass(frozen=True, slots=True)
class VariantState:
    """Which version was chosen, and which are gone.

    The active version is the newest one after `as_of` that was published to become active, else `active`; so
    a publication is one new file, and needs no second step here that a crash could fall before.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    active: Version | None = None
    as_of: Size = 0  # the newest version when the choice was made
    deleted: tuple[Version, ...] = ()
    deleted_through: Size = 0  # this version and all before it are deleted
    format: Literal[1] = 1  # of the state

    def is_live(self, version: int) -> bool:
        return version > self.deleted_through and version not in self.deleted

    def newest_known(self) -> int:
        """No version up to this one is ever given out again, whatever became of its record."""
        return max(self.as_of, self.deleted_through, *self.deleted, 0)

    def to_json(self) -> bytes:
        return _encode(asdict(self))


_RECORD = TypeAdapter(VersionRecord)
_STATE = TypeAdapter(VariantState)


def parse_record(raw: bytes, where: str) -> VersionRecord:
    """A stored record; RegistryError says what is wrong with it."""
    return _parse(_RECORD, raw, where)


def parse_state(raw: bytes, where: str) -> VariantState:
    """A stored state; RegistryError says what is wrong with it."""
    return _parse(_STATE, raw, where)


def is_name(text: str) -> bool:
    """Whether a tenant or a variant may be called so; no such name can leave its directory."""
    return NAME.fullmatch(text) is not None


def check_names(tenant: str, name: str) -> None:
    """UsageError unless a variant may be published under these."""
    for kind, text in (("tenant", tenant), ("variant", name)):
        if not is_name(text):
            raise UsageError(
                f"{kind} name {text!r} is not allowed: take 1 to 64 letters, digits, '.', '_' or '-', "
                "the first of them a letter or a digit"
            )
    if name in RESERVED:
        raise UsageError(f"variant name {name!r} is reserved: take another one")


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, indent=1, allow_nan=False).encode() + b"\n"


def _parse(adapter: TypeAdapter[T], raw: bytes, where: str) -> T:
    try:
        return adapter.validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise RegistryError(f"{where}: {place}: {first['msg']}") from error
