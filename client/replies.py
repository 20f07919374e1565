"""Answers of the server, as far as this client reads them; `as_json` has each as the server sent it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from client.http import Reply

ADMIN = "admin"


class VersionReply(Reply, frozen=True):
    """One version of a variant."""

    version: int
    digest: str  # "sha256:" and 64 hex digits
    size_bytes: int
    device_bytes: int
    method: str
    created_at: str  # ISO 8601
    level: str
    pinned: bool
    num_requests: int
    fidelity: Mapping[str, Any] = {}

    @property
    def is_resident(self) -> bool:
        """True if memory holds the version, or requests wait for it."""
        return self.level != "disk" or self.num_requests > 0


class VariantReply(Reply, frozen=True):
    """A variant with its versions, the oldest first."""

    name: str
    active: int | None
    versions: tuple[VersionReply, ...]
    # More than `versions` in a list of variants, which shows the active version and the newest ones.
    num_versions: int = 0
    previous: int | None = None  # the version that was active before `active`
    visibility: str = "private"
    owner: str = "-"

    @property
    def active_version(self) -> VersionReply | None:
        return next((version for version in self.versions if version.version == self.active), None)


class StatusReply(Reply, frozen=True):
    """The state of a version after it was asked to be loaded, unloaded, pinned or unpinned."""

    name: str
    version: int
    level: str
    pinned: bool


class DeletedReply(Reply, frozen=True):
    """The answer of `DELETE /variants/{name}`."""

    name: str
    deleted: tuple[int, ...]


class UploadReply(Reply, frozen=True):
    """The answer of `POST /variants`."""

    name: str
    version: int
    digest: str
    size_bytes: int
    active: bool


class MyKey(Struct, frozen=True):
    """The key that the server has found in a call."""

    id: str
    expires_at: str | None = None


class MeReply(Reply, frozen=True):
    """The answer of `GET /me`; without keys on the server, `key` is None."""

    tenant: str
    roles: tuple[str, ...]
    key: MyKey | None = None
    # None is unlimited.
    limits: Mapping[str, int | None] = {}
    # None is not counted.
    usage: Mapping[str, int | None] = {}

    @property
    def is_admin(self) -> bool:
        return ADMIN in self.roles


class SharedVariant(Struct, frozen=True):
    """A variant that another tenant has made public; only its owner sees its versions."""

    name: str
    owner: str


class ModelReply(Reply, frozen=True):
    """One model of OpenAI's list."""

    id: str
    owned_by: str
    max_model_len: int | None = None  # tokens


class TokensReply(Reply, frozen=True):
    """The answer of `POST /tokenize`."""

    tokens: tuple[int, ...]
    count: int
    max_model_len: int
    token_strs: tuple[str, ...] | None = None


class TextReply(Reply, frozen=True):
    """The answer of `POST /detokenize`."""

    prompt: str


class KeyReply(Reply, frozen=True, kw_only=True):
    """A key without its text."""

    id: str
    tenant: str
    roles: tuple[str, ...]
    created_at: str  # ISO 8601
    expires_at: str | None = None


class CreatedKeyReply(KeyReply, frozen=True, kw_only=True):
    """The answer that has a key's text, which is kept nowhere."""

    key: str


class RevokedKeyReply(Reply, frozen=True):
    """The answer of `DELETE /keys/{key_id}`."""

    id: str


class TenantReply(Reply, frozen=True):
    """A tenant with the limits that hold for it; None is unlimited."""

    name: str
    limits: Mapping[str, int | None]
    # False: the limits are the server's default.
    has_own_limits: bool
    num_keys: int
    num_variants: int


class TenantsReply(Reply, frozen=True):
    """The answer of `GET /tenants`."""

    tenants: tuple[TenantReply, ...]
    default_limits: Mapping[str, int | None]

    def limits_of(self, name: str) -> Mapping[str, int | None]:
        """Return the limits that hold for a tenant, which the server need not know yet."""
        return next((each.limits for each in self.tenants if each.name == name), self.default_limits)


class LimitsReply(Reply, frozen=True):
    """The answer of `PUT /tenants/{name}`."""

    name: str
    limits: Mapping[str, int | None]


class ServerFacts(Struct, frozen=True):
    """The server's part of its statistics."""

    versions: Mapping[str, str] = {}
    base: str | None = None
    ready: bool = False


class StatsReply(Reply, frozen=True):
    """The answer of `GET /stats`; `as_json` has queues, slots, uploads and totals, too."""

    server: ServerFacts
