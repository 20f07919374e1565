"""The limits of what a tenant without its own may store, where the operator sets none. Reads the size of a volume."""

from __future__ import annotations

import logging
import os

import msgspec

from deltastore.errors import RegistryUnavailable
from deltastore.registry.place import is_bucket
from server.settings import Settings
from server.tenants.limits.tenant_limits import TenantLimits, plain

log = logging.getLogger(__name__)

MAX_VARIANTS = 10_000
MAX_VERSIONS = 1_000
# Share of the volume that a tenant's artifacts may fill.
VOLUME_PART = 0.5


def with_default_limits(settings: Settings) -> Settings:
    """Return the settings of a server with its default limits complete, and log them; without keys, as they are.

    The registry's directory must exist.

    Raises:
        RegistryUnavailable: the size of its volume cannot be read.
    """
    if settings.auth != "keys":
        return settings
    limits = completed(settings.default_limits, _volume_bytes(settings.registry))
    given = ", ".join(f"{name} {value}" for name, value in plain(limits).items() if value is not None)
    unlimited = [name for name, value in plain(limits).items() if value is None and name != "max_pinned"]
    if limits.max_pinned is None:
        given += ", max_pinned half of the slots"
    log.info(
        "limits of tenants without their own: %s; not limited: %s", given, ", ".join(unlimited) or "nothing"
    )
    return settings.model_copy(update={"default_limits": limits})


def completed(given: TenantLimits, volume_bytes: int | None) -> TenantLimits:
    """Return the limits that were given, and the defaults of those of storage that were not.

    Args:
        given: by the operator.
        volume_bytes: the size of the registry's volume; None if it has no size, as a bucket.
    """
    stored = None if volume_bytes is None else int(volume_bytes * VOLUME_PART)
    defaults = {"max_variants": MAX_VARIANTS, "max_versions": MAX_VERSIONS, "max_stored_bytes": stored}
    missing = {name: value for name, value in defaults.items() if getattr(given, name) is None}
    return msgspec.structs.replace(given, **missing)


def _volume_bytes(registry: str) -> int | None:
    if is_bucket(registry):
        return None
    try:
        volume = os.statvfs(registry)
    except OSError as error:
        raise RegistryUnavailable(f"{registry}: {error.strerror}: check its volume") from error
    return volume.f_blocks * volume.f_frsize
