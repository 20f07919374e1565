"""Answers of the server, as far as commands read them. A field that only newer servers send is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct


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
