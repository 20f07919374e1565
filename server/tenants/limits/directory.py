"""`REGISTRY/tenants/limits/`: a JSON file per tenant that has limits of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from deltastore.errors import UsageError
from deltastore.registry.records import NAME, is_name
from server.errors import QueueFull
from server.tenants.directory import RecordDirectory
from server.tenants.limits.tenant_limits import TenantLimits
from server.tenants.opening import record_files
from server.volume.calls import RegistryCalls

# Between two looks at the records, which are read at most every 0.5 s, in a bucket every second.
WATCH_S = 0.25


class LimitsDirectory:
    """The limits of all tenants of a registry, as they were read last.

    Args:
        registry: its directory, or `s3://BUCKET/PREFIX`.
        default: limits of tenants without a file.
        calls: of a server, to which the registry's absence is a failure.
    """

    def __init__(
        self, registry: Path | str, default: TenantLimits, calls: RegistryCalls | None = None
    ) -> None:
        """Read the files; raise RegistryUnavailable if the disk fails."""
        self._default = default
        self._directory = RecordDirectory(record_files(registry, "limits"), TenantLimits, NAME, calls)
        self._given = self._directory.read()
        self._damaged = self._directory.damaged

    def of(self, tenant: str) -> TenantLimits:
        """Return a tenant's limits. Reads no file, so that a disk that hangs delays no request.

        Raises:
            QueueFull: its file is damaged, so that its limits are unknown.
        """
        if tenant in self._damaged:
            raise QueueFull(
                f"the limits of tenant {tenant!r} cannot be read: the operator must set them again"
            )
        return self._given.get(tenant, self._default)

    def own(self) -> Mapping[str, TenantLimits]:
        """Read the files that have changed, and return the limits of each tenant that has some of its own.

        Raises:
            RegistryUnavailable: the disk failed.
        """
        return self._directory.read()

    def write(self, tenant: str, limits: TenantLimits) -> None:
        """Replace a tenant's limits. They are durable on return, and every server sees them within a second.

        Raises:
            UsageError: no tenant may have this name.
            RegistryUnavailable, StorageFull: the disk failed; the limits are the old ones or the new ones.
        """
        if not is_name(tenant):
            raise UsageError(
                f"tenant name {tenant!r} is not allowed: take 1 to 64 letters, digits, '.', '_' or '-', "
                "the first of them a letter or a digit"
            )
        self._directory.write(tenant, limits)

    async def watch(self) -> None:
        """Read changed files until cancelled. While the disk fails, the last limits stand."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._given = await self._directory.current()
            self._damaged = self._directory.damaged
