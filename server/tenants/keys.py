"""API keys: made once, stored hashed in `REGISTRY/tenants/keys/<id>.json`, looked up for every request.

A secret has 256 random bits, so its plain SHA-256 cannot be reversed by guessing: a slow hash such as scrypt would add
nothing but its time to each request.

Keys are made without a server, too: the first administrator's is, and the rights on the registry allow it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from deltastore.errors import UsageError
from deltastore.registry import Registry
from deltastore.registry.claims import check_place, is_bucket, is_registry
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.records import is_name
from deltastore.registry.storage import Storage
from server.errors import InvalidApiKey, KeyNotFound
from server.registry_calls import RegistryCalls
from server.tenants.changes import AuditLog, Auditor, Change
from server.tenants.records import RecordDirectory, record_files
from server.tenants.tenant import Caller, Role, Tenant

log = logging.getLogger(__name__)

KEY_ID = re.compile(r"[0-9a-f]{12}")
KEY = re.compile(rf"pxk_({KEY_ID.pattern})_([0-9a-f]{{64}})")
ID_BYTES, SECRET_BYTES = 6, 32
# Compared with the secret of an unknown key, so that its refusal takes as long as that of a known one.
NO_SECRET = "0" * 64
# Requests with unknown keys that wait for a reading at a time.
MAX_WAITING = 64

Moment = Annotated[datetime, Meta(tz=True)]


class KeyRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """One key as it is stored, without its secret."""

    tenant: str
    roles: Annotated[tuple[Role, ...], Meta(min_length=1)]
    secret_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    created_at: Moment
    expires_at: Moment | None = None

    def __post_init__(self) -> None:
        if not is_name(self.tenant):
            raise ValueError(f"{self.tenant!r} is not the name of a tenant")

    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made; `text` is what its owner sends, and is kept nowhere."""

    id: str
    text: str
    record: KeyRecord


class KeyStore:
    """The keys of a registry. Another process's new key is known at once, its other changes within a second;
    in a bucket, within two.

    While the registry's volume fails, the keys that were read last stand, also those that were revoked meanwhile; those
    that expire do so. Methods raise RegistryUnavailable or StorageFull if the disk fails.

    Args:
        registry: its directory, or `s3://BUCKET/PREFIX`.
        storage: changes the files of a directory.
        calls: of a server, to which the registry's absence is a failure.
    """

    def __init__(
        self, registry: Path | str, storage: Storage | None = None, calls: RegistryCalls | None = None
    ) -> None:
        files = record_files(registry, "keys", storage)
        self._directory = RecordDirectory(files, KeyRecord, KEY_ID, calls)
        self._num_waiting = 0

    async def caller(self, text: str) -> Caller:
        """Return the caller that a key authenticates. Event loop only; a known key takes microseconds.

        An unknown one waits for the next reading, because another process may have just made it. When `MAX_WAITING`
        wait, it is refused from the last one.

        Raises:
            InvalidApiKey: the key is malformed, unknown, revoked or expired.
            RegistryUnavailable: the key is not among those that were read last, and the registry cannot be asked. It
                may be valid, so the client must not be told that it is not.
        """
        parts = KEY.fullmatch(text)
        key_id, secret = parts.groups() if parts else ("", "")
        record = _authentic((await self._directory.current()).get(key_id), secret)
        if record is None and parts:
            # Also for a known id, so that its refusal takes no less time.
            record = _authentic((await self._read_again()).get(key_id), secret)
        if record is None:
            raise InvalidApiKey("the API key is not valid here: check it, or ask the operator for a new one")
        if record.is_expired():
            raise InvalidApiKey(f"the API key {key_id} has expired: ask the operator for a new one")
        return Caller(Tenant(record.tenant), frozenset(record.roles), key_id)

    def known_tenant(self, text: str) -> str | None:
        """Return the tenant of a key that was valid at the last reading; None for any other. Waits for nothing."""
        parts = KEY.fullmatch(text)
        key_id, secret = parts.groups() if parts else ("", "")
        record = _authentic(self._directory.known.get(key_id), secret)
        return None if record is None or record.is_expired() else record.tenant

    async def _read_again(self) -> Mapping[str, KeyRecord]:
        if self._num_waiting >= MAX_WAITING:
            return self._directory.last_read()
        self._num_waiting += 1
        try:
            return await self._directory.latest()
        finally:
            self._num_waiting -= 1

    async def check_stands(self, key_id: str) -> None:
        """Check again a key that a call began with. Event loop only.

        Raises:
            InvalidApiKey: it was revoked or has expired since.
            RegistryUnavailable: the registry cannot be asked.
        """
        record = (await self._directory.latest()).get(key_id)
        if record is None or record.is_expired():
            raise InvalidApiKey(
                f"the API key {key_id} was revoked or has expired since the call began: nothing was changed"
            )

    def create(
        self, auditor: Auditor, tenant: str, roles: Collection[Role], expires_at: datetime | None = None
    ) -> NewKey:
        """Make and store a key, and audit it.

        Raises:
            UsageError: the tenant's name is not allowed, there is no role, or `expires_at` is past or has no time zone.
        """
        if not is_name(tenant):
            raise UsageError(
                f"tenant name {tenant!r} is not allowed: take 1 to 64 letters, digits, '.', '_' or '-', "
                "the first of them a letter or a digit"
            )
        if not roles:
            raise UsageError("a key needs a role: give inference, publish, metrics or admin")
        now = datetime.now(UTC)
        if expires_at is not None and (expires_at.tzinfo is None or expires_at <= now):
            raise UsageError(
                f"a key cannot expire at {expires_at.isoformat()}: give a moment to come, with its time zone"
            )
        key_id, secret = secrets.token_hex(ID_BYTES), secrets.token_hex(SECRET_BYTES)
        record = KeyRecord(
            tenant, tuple(sorted(set(roles))), _sha256(secret), now.replace(microsecond=0), expires_at
        )
        self._directory.write(key_id, record)
        auditor.write(Change("create_key", tenant, subject_key_id=key_id, roles=record.roles))
        return NewKey(key_id, f"pxk_{key_id}_{secret}", record)

    def revoke(self, auditor: Auditor, key_id: str) -> None:
        """Remove a key, and audit it; every server refuses it within a second.

        Raises:
            KeyNotFound: there is no such key.
        """
        # The file of a damaged record can be removed, too.
        record = self._directory.read().get(key_id)
        if not KEY_ID.fullmatch(key_id) or not self._directory.remove(key_id):
            # Anything else than an id may be a secret.
            named = f"key {key_id!r}" if KEY_ID.fullmatch(key_id) else "key of this id"
            raise KeyNotFound(f"there is no {named}: list the keys for their ids")
        auditor.write(Change("revoke_key", None if record is None else record.tenant, subject_key_id=key_id))

    def records(self, tenant: str | None = None) -> dict[str, KeyRecord]:
        """Return the keys by id, oldest first; with `tenant`, only that tenant's."""
        records = self._directory.read().items()
        found = [(key_id, record) for key_id, record in records if tenant in (None, record.tenant)]
        return dict(sorted(found, key=lambda item: (item[1].created_at, item[0])))


def warn_without_keys(registry: Path | str) -> None:
    """Log the command that makes a registry's first key, if it has none: until then each request is refused."""
    root = registry if is_bucket(str(registry)) else Path(registry).absolute()
    if not KeyStore(root).records():
        log.warning(
            "the registry has no API key: make one with "
            "`peraxis keys create --registry %s --tenant NAME --role admin`",
            root,
        )


def key_document(key_id: str, record: KeyRecord) -> dict[str, Any]:
    """Return a key as replies and `--json` show it, without its secret and its hash."""
    return {
        "id": key_id,
        "tenant": record.tenant,
        "roles": list(record.roles),
        "created_at": record.created_at.isoformat(),
        "expires_at": None if record.expires_at is None else record.expires_at.isoformat(),
    }


def _authentic(record: KeyRecord | None, secret: str) -> KeyRecord | None:
    """Return the record if the secret is its key's."""
    expected = NO_SECRET if record is None else record.secret_sha256
    return record if hmac.compare_digest(_sha256(secret), expected) else None


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


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
