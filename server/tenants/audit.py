"""The audit log: one JSON line per change of a variant or a key, in `REGISTRY/audit/audit-YYYY-MM-DD-KERNEL.jsonl`.

Owns the form of a line and its files. Must not know HTTP. A line never holds a key, a prompt or a token. Each machine
appends to a file of its own, because appending is not atomic between the clients of a network file system; KERNEL is
the id of its running kernel. In a bucket that name is a directory, with an object per change or request. Files of
past days may be moved away at any time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from deltastore.errors import PeraxisError
from deltastore.registry.records import Visibility
from deltastore.registry.storage import Storage, explained
from deltastore.registry.uploads import kernel_id
from server.tenants.limits.tenant_limits import TenantLimits
from server.tenants.opening import open_files
from server.tenants.tenant import Role

log = logging.getLogger(__name__)

DIRECTORY = "audit"

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
