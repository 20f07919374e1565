"""Shared states for admissions: one that counts in the tests' process, and one that answers nothing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from server.inline import LocalMetrics
from server.protocol.engine_client import EngineClient
from server.shared_state import SharedState
from server.tenants.admission import Admissions
from server.tenants.tenant import TenantLimits


def admissions_of(limits: TenantLimits) -> Admissions:
    """Return admissions with a shared state of their own, by which every tenant has the same limits."""
    return Admissions(LocalMetrics(EngineClient("test")).shared_state(lambda tenant: limits), "test")


class SilentState:
    """A shared state that answers nothing, as a supervisor that hangs."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.told: list[tuple[Any, ...]] = []

    @property
    def shared(self) -> SharedState:
        return cast(SharedState, self)

    async def admit_requests(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        return await self.answer()

    async def answer(self) -> Any:
        await asyncio.Event().wait()

    def release(self, *arguments: Any) -> None:
        self.told.append(("release", *arguments))

    def count_tokens(self, *arguments: Any) -> None:
        self.told.append(("count_tokens", *arguments))
