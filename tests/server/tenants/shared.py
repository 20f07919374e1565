"""Admissions that are counted in the tests' process."""

from __future__ import annotations

from server.inline import LocalLink, LocalMetrics
from server.protocol.engine_client import EngineClient
from server.tenants.admission import Admissions
from server.tenants.tenant import TenantLimits


def admissions_of(limits: TenantLimits) -> Admissions:
    """Return admissions with a shared state of their own, by which every tenant has the same limits."""
    return Admissions(LocalLink(LocalMetrics(EngineClient("test")).shared_state(lambda tenant: limits)))
