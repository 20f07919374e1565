"""Values of a registry and the rules of names: version records, a variant's state, results of counting and checking.

Must not touch files. A published record never changes; the state is the only part of a variant that does.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect, bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from deltastore.errors import ArtifactError, RegistryError, UsageError

# The base model's name, and the metrics' label for variants beyond the limit of labels.
RESERVED = ("base", "other")
MAX_FIDELITY_BYTES = 1 << 20
# Below it are the numbers of a report that a record keeps.
LARGEST = 1e300
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")

# Behind the variant's name in a report's; no name has it.
NAME_END = "~"
REPORT = re.compile(
    rf"({NAME.pattern.strip('^$')})~([1-9][0-9]{{0,17}})~([0-9a-f]{{64}})~([0-9]{{1,18}})~([0-9a-f]{{32}})\.json"
)

# A private variant is its tenant's alone; every tenant may use a public one.
Visibility = Literal["private", "public"]

T = TypeVar("T")
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Token = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
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
    max_positions: int | None = None  # tokens of its longest context; None where it is the base's


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
    activate: bool  # published to become the active version
    report: Token  # of the name of the fidelity report
    # The newest version below this one that was published to become active, above the `as_of` of the state that its
    # publisher read; 0 if there was none.
    active_before: Size = 0
    # What the report states for held-out text: the share of equal next tokens, and the divergence in nats per token.
    agreement: float | None = None
    kl: float | None = None
    stored_as: StoredAs | None = None  # the object's name in a bucket; in a directory its digest names it
    max_positions: Version | None = None  # tokens of its longest context; None where it is the base's
    format: Literal[3] = 3  # of the record; any other is refused

    @property
    def label(self) -> str:
        """The name of the version in messages: ``tenant/name@version``."""
        return f"{self.tenant}/{self.name}@{self.version}"

    @property
    def activated(self) -> int:
        """The newest version up to this one that was published to become active; as `active_before`."""
        return self.version if self.activate else self.active_before

    def to_json(self) -> bytes:
        """Encode the record as it is stored."""
        return _encode(asdict(self))


@dataclass(frozen=True, slots=True)
class ReportFile:
    """The name of a fidelity report, which alone tells what its version stores.

    There is one of every live version, and of publications that are under way or were cut short.
    """

    name: str
    version: int
    digest: str
    size_bytes: int
    token: str  # of one publication

    @property
    def file_name(self) -> str:
        return f"{self.name}~{self.version}~{self.digest}~{self.size_bytes}~{self.token}.json"

    @classmethod
    def of(cls, record: VersionRecord) -> ReportFile:
        return cls(record.name, record.version, record.digest, record.size_bytes, record.report)

    @classmethod
    def parse(cls, file_name: str) -> ReportFile | None:
        """Return the parts of a file's name; None if it is no report's."""
        if (found := REPORT.fullmatch(file_name)) is None:
            return None
        name, version, digest, size, token = found.groups()
        return cls(name, int(version), digest, int(size), token)


def report_to_json(report: Mapping[str, Any], name: str) -> bytes:
    """Encode the fidelity report of a variant's version, which is untrusted, as it is stored.

    Raises:
        ArtifactError: It is too long, or could not be read back.
    """
    try:
        raw = _encode(dict(report))
        _REPORT.validate_json(raw)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"the fidelity report of {name!r} cannot be stored: {error}") from error
    if len(raw) > MAX_FIDELITY_BYTES:
        raise ArtifactError(
            f"the fidelity report of {name!r} has {len(raw)} bytes: at most {MAX_FIDELITY_BYTES} are kept"
        )
    return raw


def held_out_number(report: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number that a report states for held-out text; None if it has none."""
    held_out = report.get("held_out")
    value = held_out.get(key) if isinstance(held_out, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # NaN is not.
    return float(value) if abs(value) < LARGEST else None


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
    # Runs of deleted versions, each with its first and last number, ascending, with live versions between them.
    deleted: tuple[tuple[Version, Version], ...] = ()
    deleted_through: Size = 0  # this version and all before it were deleted with the whole variant
    previous: Version | None = None  # the version that was active before `active`
    # Of the promotion that made this entry, by the promoting server's clock; None for entries that are no promotions,
    # and for those of servers that stored none.
    promoted_at: str | None = None  # UTC, ISO 8601
    promoted_by: str | None = None  # id of the key; None without keys
    format: Literal[3] = 3  # of the state

    def is_live(self, version: int) -> bool:
        """True for numbers that are not deleted, also for those that were never assigned."""
        run = bisect(self.deleted, version, key=lambda run: run[0]) - 1
        return version > self.deleted_through and (run < 0 or version > self.deleted[run][1])

    def num_live(self, newest: int) -> int:
        """Return how many of the versions up to `newest` are not deleted."""
        return newest - self.deleted_through - sum(last - first + 1 for first, last in self.deleted)

    def newest_known(self) -> int:
        """The highest version number that the state mentions; numbers up to it are never assigned again."""
        return max(self.as_of, self.deleted_through, *(last for _, last in self.deleted[-1:]))

    def without(self, version: int) -> VariantState:
        """Return the state after the deletion of one version more."""
        # Never merged into `deleted_through`, which ends the claim of a public name.
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.deleted, (version, version)]):
            if merged and first == merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        return replace(self, deleted=tuple(merged))

    def live_among(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of ascending numbers that are not deleted."""
        if not self.deleted and not self.deleted_through:
            return numbers
        kept: list[int] = []
        begin = bisect(numbers, self.deleted_through)
        for first, last in self.deleted:
            kept += numbers[begin : bisect_left(numbers, first, begin)]
            begin = bisect(numbers, last, begin)
        return (*kept, *numbers[begin:])

    def to_json(self, after: str = "") -> bytes:
        """Encode the state as the entry after the one of a digest."""
        return _encode(_entry(self, after))


class Promotion(NamedTuple):
    """A promotion that a variant's entries remember."""

    version: int
    promoted_at: str  # UTC, ISO 8601, by the clock of the server
    promoted_by: str | None  # id of the key; None without keys


@dataclass(frozen=True, slots=True)
class PublicClaim:
    """A tenant's claim of a name for its variant, which every tenant may use, or the end of a claim."""

    __pydantic_config__ = ConfigDict(strict=True)

    tenant: Annotated[str, Field(pattern=NAME.pattern)] | None  # None: the name is free
    # Number of the variant's state when the claim was made. The claim ends when the state has a higher number.
    deleted_through: Size
    format: Literal[3] = 3  # of the claim

    def to_json(self, after: str = "") -> bytes:
        """Encode the claim as the entry after the one of a digest."""
        return _encode(_entry(self, after))


_RECORD = TypeAdapter(VersionRecord)
_STATE = TypeAdapter(VariantState)
_CLAIM = TypeAdapter(PublicClaim)
_REPORT = TypeAdapter(dict[str, Any])
# Skips all values.
_OBJECT = msgspec.json.Decoder(msgspec.defstruct("JsonObject", []))


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


def check_report(raw: bytes, where: str) -> bytes:
    """Return a stored fidelity report, which stays JSON: its values would take up to a hundred times its memory.

    Raises:
        RegistryError: It is no JSON object.
    """
    try:
        _OBJECT.decode(raw)
    except msgspec.DecodeError as error:
        raise RegistryError(f"{where}: {error}") from error
    return raw


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
    return json.dumps(fields, allow_nan=False).encode() + b"\n"


def _parse(adapter: TypeAdapter[T], raw: bytes, where: str) -> T:
    try:
        return adapter.validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field_name = ".".join(str(part) for part in first["loc"]) or "the document"
        raise RegistryError(f"{where}: {field_name}: {first['msg']}") from error


class Usage(NamedTuple):
    """The registry's counts and sizes."""

    num_objects: int
    num_bytes: int  # of the objects
    free_bytes: int | None  # of the file system, for this user; a bucket has no such limit
    num_quarantined: int


@dataclass(frozen=True, slots=True)
class GcReport:
    """The garbage that a collection removed, or with `dry_run` found."""

    objects: tuple[str, ...]  # digests
    num_partials: int  # abandoned uploads
    num_leftovers: int  # files that a crash left behind or newer ones replace
    bytes_freed: int
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with a file, or with a file that is missing."""

    path: PurePath
    problem: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check."""

    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]  # harmless: gc or another upload resolves them
    num_objects: int
    num_versions: int

    @property
    def is_clean(self) -> bool:
        return not self.findings
