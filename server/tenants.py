"""From a request's credentials to its tenant. Knows no variant, no limit and no HTTP route."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a request and of the variants that it may use and change."""

    name: str


# With `--auth none`, every request belongs to this tenant.
DEFAULT_TENANT = Tenant("default")
