"""Answers of the server, as far as commands read them. A field that only newer servers send is ignored.

Beside them, the tenant that calls act for, and the public variants of other tenants that it may use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from client.http import RemoteServer, ServerRefused, parsed, whole_list
from deltastore.errors import PeraxisError


class VersionReply(Struct, frozen=True):
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


class VariantReply(Struct, frozen=True):
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


class VariantsReply(Struct, frozen=True):
    """The answer of `GET /variants`."""

    variants: tuple[VariantReply, ...]


class StatusReply(Struct, frozen=True):
    """The state of a version after it was asked to be loaded, unloaded, pinned or unpinned."""

    name: str
    version: int
    level: str
    pinned: bool


class DeletedReply(Struct, frozen=True):
    """The answer of `DELETE /variants/{name}`."""

    name: str
    deleted: tuple[int, ...]


class UploadReply(Struct, frozen=True):
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


class MeReply(Struct, frozen=True):
    """The answer of `GET /me`; without keys on the server, `key` is None."""

    tenant: str
    roles: tuple[str, ...]
    key: MyKey | None = None


NOT_FOUND = 404
# The base's id among the models; no variant may have the name.
BASE = "base"
ADMIN = "admin"


class SharedVariant(Struct, frozen=True):
    """A variant that another tenant has made public; only its owner sees its versions."""

    name: str
    owner: str


class ModelReply(Struct, frozen=True):
    """One model of OpenAI's list."""

    id: str
    owned_by: str


class ModelsReply(Struct, frozen=True):
    """The answer of `GET /v1/models`."""

    data: tuple[ModelReply, ...]


def shared_variants(server: RemoteServer, own: Collection[str]) -> list[SharedVariant]:
    """Return the variants that the caller may use beside its own.

    Args:
        server: The server. One that is called without a key has one tenant, and is not asked.
        own: The names of the tenant's variants, which hide public ones of the same name.

    Raises:
        NoAnswer, ServerRefused: The call failed.
    """
    if server.address.key is None:
        return []
    models = parsed(whole_list(server, "/v1/models", "data"), ModelsReply).data
    return [SharedVariant(each.id, each.owned_by) for each in models if each.id not in {BASE, *own}]


def not_owned(server: RemoteServer, name: str, error: ServerRefused) -> ServerRefused:
    """Return the error of a variant that was not found; it names the owner if the variant is another tenant's."""
    if error.status != NOT_FOUND or server.address.key is None or name == BASE:
        return error
    try:
        found = parsed(server.call("GET", f"/v1/models/{quote(name, safe='')}"), ModelReply)
    except ServerRefused:
        return error
    message = (
        f"variant {name!r} is public and belongs to tenant {found.owned_by!r}, and only its owner sees its versions: "
        f"use it, as in `peraxis chat {name}`"
    )
    return ServerRefused(message, error.status, error.code)


def tenant_of(server: RemoteServer) -> str | None:
    """Return the tenant that calls act for; None if the server does not tell it."""
    me = None if server.address.tenant else _me(server)
    return server.address.tenant or (None if me is None else me.tenant)


def tenant_of_admin(server: RemoteServer) -> str | None:
    """Return the tenant that calls act for if the caller may act for several; else None."""
    me = None if server.address.tenant else _me(server)
    return server.address.tenant or (me.tenant if me is not None and ADMIN in me.roles else None)


def _me(server: RemoteServer) -> MeReply | None:
    if server.address.key is None:
        return None
    try:
        return parsed(server.call("GET", "/me"), MeReply)
    except PeraxisError:
        # The command itself has succeeded; the tenant only completes its output.
        return None
