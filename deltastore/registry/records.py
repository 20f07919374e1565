"""Version records and the state of a variant, as values and as JSON, and the rules of names. Must not touch files.

A published record never changes; the state is the only part of a variant that does.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from deltastore.errors import ArtifactError, RegistryError, UsageError

# The tenant of older registries whose variants every tenant may use, without claims.
PUBLIC = "public"
# The base model's name, and the metrics' label for variants beyond the limit of labels.
RESERVED = ("base", "other")
# The report is read with every read of its version record.
MAX_FIDELITY_BYTES = 1 << 20
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")

# A private variant is its tenant's alone; every tenant may use a public one.
Visibility = Literal["private", "public"]

T = TypeVar("T")
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
StoredAs = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\.[0-9a-f]{32}$")]
Size = Annotated[int, Field(ge=0)]
Version = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class ArtifactFacts:
    """Facts about an artifact that its checks have read, to be stored in the version record."""

    data_start: int  # bytes before the data section
    device_bytes: int  # bytes of the device section
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
    stored_as: StoredAs | None = None  # the object's name in a bucket; in a directory its digest names it
    format: Literal[1] = 1  # of the record; any other is refused

    @property
    def label(self) -> str:
        """The name of the version in messages: ``tenant/name@version``."""
        return f"{self.tenant}/{self.name}@{self.version}"

    def to_json(self) -> bytes:
        """Encode the record as it is stored.

        Raises:
            ArtifactError: Its fidelity report, which is untrusted, is too long or could not be read back.
        """
        try:
            size = len(_encode(self.fidelity))
            fields = asdict(self)
            if self.stored_as is None:
                # Versions of Peraxis that know no buckets wrote records without it.
                del fields["stored_as"]
            raw = _encode(fields)
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
    """The chosen version of a variant and its deleted versions.

    The active version is the newest one after `as_of` whose record has `activate`, else `active`. So a publication is
    one new file and needs no second step that a crash could prevent. The version to roll back to is derived likewise,
    by `VariantDirectory.previous`.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    active: Version | None = None
    as_of: Size = 0  # the newest version when the choice was made
    deleted: tuple[Version, ...] = ()
    deleted_through: Size = 0  # this version and all before it are deleted
    previous: Version | None = None  # the version that was active before `active`
    format: Literal[1] = 1  # of the state

    def is_live(self, version: int) -> bool:
        return version > self.deleted_through and version not in self.deleted

    def newest_known(self) -> int:
        """The highest version number that the state mentions; numbers up to it are never assigned again."""
        return max(self.as_of, self.deleted_through, *self.deleted, 0)

    def to_json(self, after: str = "") -> bytes:
        """Encode the state as the entry after the one of a digest."""
        return _encode(_entry(self, after))


@dataclass(frozen=True, slots=True)
class PublicClaim:
    """A tenant's claim of a name for its variant, which every tenant may use, or the end of a claim."""

    __pydantic_config__ = ConfigDict(strict=True)

    tenant: Annotated[str, Field(pattern=NAME.pattern)] | None  # None: the name is free
    # Of the variant's state when the claim was made. The claim ends when the state has a higher number.
    deleted_through: Size
    format: Literal[1] = 1  # of the claim

    def to_json(self, after: str = "") -> bytes:
        """Encode the claim as the entry after the one of a digest."""
        return _encode(_entry(self, after))


_RECORD = TypeAdapter(VersionRecord)
_STATE = TypeAdapter(VariantState)
_CLAIM = TypeAdapter(PublicClaim)


def parse_record(raw: bytes, where: str) -> VersionRecord:
    """Parse a stored record.

    Raises:
        RegistryError: Its first defect.
    """
    return _parse(_RECORD, raw, where)


def parse_state(raw: bytes, where: str) -> VariantState:
    """Parse a stored state.

    Raises:
        RegistryError: Its first defect.
    """
    return _parse(_STATE, raw, where)


def parse_claim(raw: bytes, where: str) -> PublicClaim:
    """Parse a stored claim.

    Raises:
        RegistryError: Its first defect.
    """
    return _parse(_CLAIM, raw, where)


def is_name(text: str) -> bool:
    """True if a tenant or variant may have this name. No such name is a path out of its directory."""
    return NAME.fullmatch(text) is not None


def check_names(tenant: str, name: str) -> None:
    """Check that a variant may be published under these names.

    Raises:
        UsageError: A name has other characters than are allowed, or is reserved.
    """
    for kind, text in (("tenant", tenant), ("variant", name)):
        if not is_name(text):
            raise UsageError(
                f"{kind} name {text!r} is not allowed: take 1 to 64 letters, digits, '.', '_' or '-', "
                "the first of them a letter or a digit"
            )
    if name in RESERVED:
        raise UsageError(f"variant name {name!r} is reserved: take another one")


def _entry(value: VariantState | PublicClaim, after: str) -> dict[str, Any]:
    """Return a value as an entry, which differs from every other: its creator tells by its bytes that it made it."""
    return {**asdict(value), "after": after, "change": secrets.token_hex(8)}


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, indent=1, allow_nan=False).encode() + b"\n"


def _parse(adapter: TypeAdapter[T], raw: bytes, where: str) -> T:
    try:
        return adapter.validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field_name = ".".join(str(part) for part in first["loc"]) or "the document"
        raise RegistryError(f"{where}: {field_name}: {first['msg']}") from error
