"""Create, list and revoke the API keys of a registry without a server. The answers are those of the routes of `/keys`.

The first administrator's key is made so: the rights on the registry allow it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from deltastore.errors import UsageError
from deltastore.registry import Registry
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.place import check_place, is_bucket, is_registry
from server.tenants.audit import AuditLog, Auditor
from server.tenants.keys import KeyStore, key_document
from server.tenants.tenant import Role


class RegistryKeys:
    """The keys of a registry in a directory or a bucket. Each method returns a JSON document and raises as `KeyStore`.

    Args:
        location: The directory, or ``s3://BUCKET/PREFIX``.
    """

    def __init__(self, location: str) -> None:
        self._location = location

    def create(self, tenant: str, roles: Collection[Role], expires_in_s: int | None) -> bytes:
        """Make a key; an empty or missing directory or bucket becomes a registry first."""
        expires_at = None
        if expires_in_s is not None:
            expires_at = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=expires_in_s)
        place = self._place(is_made=True)
        made = KeyStore(place).create(_auditor(place), tenant, roles, expires_at)
        return _document({"key": made.text, **key_document(made.id, made.record)})

    def list(self, tenant: str | None) -> bytes:
        """Return the keys, or only a tenant's, without their text."""
        records = KeyStore(self._place()).records(tenant)
        return _document({"keys": [key_document(key_id, record) for key_id, record in records.items()]})

    def revoke(self, key_id: str) -> bytes:
        """Remove a key."""
        place = self._place()
        KeyStore(place).revoke(_auditor(place), key_id)
        return _document({"id": key_id, "revoked": True})

    def _place(self, *, is_made: bool = False) -> Path | str:
        """Return the directory or the bucket of the registry. With `is_made`, an empty or missing one becomes one."""
        if is_bucket(self._location):
            with tempfile.TemporaryDirectory(prefix="peraxis-keys-") as directory:
                # Keys need no object.
                Registry.open(self._location, ObjectCache(Path(directory), 0), is_made=is_made)
            return self._location
        path = Path(self._location)
        if not is_registry(path):
            if is_made:
                check_place(path)
            else:
                raise UsageError(
                    f"{path} is not a registry: give the directory that `peraxis serve --registry` is given"
                )
            print(f"{path} is a new registry", file=sys.stderr)
        return Registry(path).root


def _auditor(place: Path | str) -> Auditor:
    # A command has no request and no key.
    return Auditor(AuditLog(place))


def _document(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode()
