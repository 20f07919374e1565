"""Changes of a tenant's variants by one caller, and the audit log that tells of them and of keys.

One JSON line per change, in `REGISTRY/audit/audit-YYYY-MM-DD-KERNEL.jsonl`; each machine appends to a file of its own.

Appending is not atomic between the clients of a network file system; KERNEL is the id of a machine's running kernel.
In a bucket that name is a directory, with an object per change or request. A line never holds a key, a prompt or a
token. Files of past days may be moved away at any time.

Every method reads and writes files: call it on a thread. A change and its line are one call, so that a client that
leaves cannot come between them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Literal

import msgspec
from msgspec import Struct

from deltastore.errors import PeraxisError, PublicNameTaken
from deltastore.registry import Deleted, Publication, Registry
from deltastore.registry.records import ArtifactFacts, VersionRecord, Visibility
from deltastore.registry.storage import Storage, explained
from deltastore.registry.uploads import SealedUpload, kernel_id
from server.errors import Forbidden
from server.tenants.records import open_files
from server.tenants.tenant import Role, Tenant, TenantLimits

log = logging.getLogger(__name__)

DIRECTORY = "audit"
FILE_NAME = re.compile(r"audit-(\d{4}-\d{2}-\d{2})-[^/]+")
# The end of one file that `newest` reads, and the days that it looks at.
TAIL_BYTES = 64 << 10
MAX_DAYS = 7

Action = Literal[
    "publish", "promote", "delete", "pin", "unpin", "visibility", "create_key", "revoke_key", "set_limits"
]


class Change(Struct, frozen=True, omit_defaults=True):
    """One change, without its time and its author. Fields that do not apply are left out of its line."""

    action: Action
    tenant: str | None  # the owner of what was changed; None for a key whose record was damaged
    variant: str | None = None
    version: int | None = None  # None: the whole variant
    digest: str | None = None  # 64 hex digits
    visibility: Visibility | None = None
    subject_key_id: str | None = None  # of the key that was made or revoked
    roles: tuple[Role, ...] = ()
    limits: TenantLimits | None = None  # as they are now; null is unlimited


class RecordedChange(Change, frozen=True, kw_only=True):
    """One line of the log."""

    time: str  # UTC, ISO 8601
    key_id: str | None = None  # of its author
    request_id: str | None = None


_RECORDED = msgspec.json.Decoder(RecordedChange)


class AuditLog:
    """The log of a registry, which all its servers append to.

    Args:
        registry: its directory, or `s3://BUCKET/PREFIX`.
        storage: changes the files of a directory.
        must_exist: refuse to write while there is no registry in the directory, since its volume is gone then.
    """

    def __init__(
        self, registry: Path | str, storage: Storage | None = None, *, must_exist: bool = False
    ) -> None:
        self._files = open_files(registry, storage)
        self._directory = self._files.root / DIRECTORY
        self._must_exist = must_exist

    def append(self, lines: bytes, day: str) -> None:
        """Append whole lines in one write that is durable on return.

        Raises:
            StorageFull, RegistryError: the disk or the bucket failed, or the registry is gone.
        """
        with explained(self._directory):
            if self._must_exist:
                # The empty directory below a volume that was unmounted must not be written to.
                self._files.check_present()
            self._files.make_directory(self._directory)
            self._files.append(self._directory / f"audit-{day}-{kernel_id()}.jsonl", lines)

    def newest(self, limit: int) -> list[RecordedChange]:
        """Return up to `limit` of the last changes, newest first, from the ends of the files of the last days with any.

        Lines that cannot be read are left out, and changes of a day with very many of them on one machine may be, too.

        Raises:
            RegistryError: the disk or the bucket failed, or the registry is gone.
        """
        with explained(self._directory):
            self._files.check_present()
            by_day: dict[str, list[str]] = {}
            for name in self._files.names(self._directory):
                if (named := FILE_NAME.fullmatch(name)) is not None:
                    by_day.setdefault(named[1], []).append(name)
            found: list[RecordedChange] = []
            for day in sorted(by_day, reverse=True)[:MAX_DAYS]:
                for name in by_day[day]:
                    found += _parsed(self._last_lines(self._directory / name, limit))
                if len(found) >= limit:
                    break
        return sorted(found, key=lambda change: change.time, reverse=True)[:limit]

    def _last_lines(self, path: PurePath, limit: int) -> Sequence[bytes]:
        """Return the last lines of a file, of which the first may be cut; of a bucket's directory, its last objects."""
        try:
            if isinstance(path, Path):
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                    return file.read(TAIL_BYTES).splitlines()
            newest = [path / name for name in sorted(self._files.names(path))[-limit:]]
            return b"".join(self._files.each(self._files.read, newest)).splitlines()
        except FileNotFoundError:
            # It was moved away meanwhile.
            return ()


def _parsed(lines: Sequence[bytes]) -> list[RecordedChange]:
    found: list[RecordedChange] = []
    for line in lines:
        try:
            found.append(_RECORDED.decode(line))
        except msgspec.DecodeError:
            # It was cut short, or written by a later version.
            continue
    return found


@dataclass(frozen=True, slots=True)
class Auditor:
    """Writes the audit lines of one request, or of one command on the registry's own machine."""

    log: AuditLog
    key_id: str | None = None  # of the caller; None with `--auth none` and for a command
    request_id: str | None = None

    def write(self, *changes: Change) -> None:
        """Append one line per change. Call it after the change, on the same thread: nothing can come in between.

        The changes have happened, so a failing disk is no error of theirs: the lines then go to the server's log.
        """
        now = datetime.now(UTC)
        author = {
            "time": now.isoformat(timespec="milliseconds"), "key_id": self.key_id, "request_id": self.request_id
        }  # fmt: skip
        lines = [msgspec.json.encode({**author, **msgspec.to_builtins(change)}) + b"\n" for change in changes]
        if not lines:
            return
        try:
            self.log.append(b"".join(lines), now.date().isoformat())
        except PeraxisError as error:
            log.error("audit lines could not be written: %s: %s", error, b"".join(lines).decode())


@dataclass(frozen=True, slots=True)
class VariantChanges:
    """Changes in a registry. Methods raise what the registry's do."""

    registry: Registry
    tenant: Tenant
    auditor: Auditor
    # The caller may make variants public; with `--public-names admin`, only administrators may.
    may_make_public: bool

    def check_visibility(self, name: str, visibility: Visibility | None) -> None:
        """Check that the caller may give a variant a visibility; None leaves it as it is.

        Raises:
            Forbidden: Public names are for administrators.
            PublicNameTaken: Another tenant's variant of this name is public.
        """
        if visibility != "public":
            return
        if not self.may_make_public:
            raise Forbidden(
                f"only an administrator makes variants public on this server: publish {name!r} as private, "
                "and ask the operator to share it"
            )
        self.registry.check_name_free(self.tenant.name, name)

    def publish(
        self,
        sealed: SealedUpload,
        facts: ArtifactFacts,
        name: str,
        *,
        activate: bool,
        visibility: Visibility | None,
    ) -> Publication:
        """Publish a sealed upload as a variant's next version, then set the variant's visibility if one is given."""
        self.check_visibility(name, visibility)
        publication = self.registry.publish(
            sealed, facts, tenant=self.tenant.name, name=name, activate=activate
        )
        if publication.created:
            self.note("publish", publication.record)
        if visibility is not None:
            try:
                self.set_visibility(name, visibility)
            except PublicNameTaken as error:
                # Another tenant was first, after the check.
                version = publication.record.version
                is_active = "active" if publication.active_version == version else "not active"
                raise PublicNameTaken(
                    f"version {version} is published, private and {is_active}; {error}"
                ) from error
        return publication

    def promote(self, name: str, version: int, if_active: int | None = None) -> None:
        """Make a version the active one, if `if_active` is, 0 for none; with None, whatever is active."""
        record = self.registry.activate(
            self.tenant.name, name, version, if_active=if_active, key_id=self.auditor.key_id
        )
        self.note("promote", record)

    def set_visibility(self, name: str, visibility: Visibility) -> None:
        """Make a variant public or private; raises as `check_visibility` does, too."""
        self.check_visibility(name, visibility)
        self.registry.set_visibility(self.tenant.name, name, visibility)
        self.auditor.write(Change("visibility", self.tenant.name, variant=name, visibility=visibility))

    def delete(self, name: str, version: int | None) -> Deleted:
        """Delete a variant or one version."""
        deleted = self.registry.delete(self.tenant.name, name, version)
        digests = {record.version: record.digest for record in deleted.records}
        self.auditor.write(
            *(
                Change("delete", self.tenant.name, variant=name, version=number, digest=digests.get(number))
                for number in deleted.versions
            )
        )
        return deleted

    def note(self, action: Literal["publish", "promote", "pin", "unpin"], record: VersionRecord) -> None:
        """Write the audit line of a version that was changed."""
        self.auditor.write(
            Change(action, record.tenant, variant=record.name, version=record.version, digest=record.digest)
        )
