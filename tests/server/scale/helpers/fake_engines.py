"""A deployment that keeps slots as an engine does and has no model, so that the choices of a router can be seen."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextvars import Context
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from server.scale.routing import ReplicaReport, Route, stats_from_report
from tests.server.scale.helpers.routers import ROUTERS
from tests.server.scale.helpers.watched_router import WatchedRouter

Handle = DeploymentHandle[Any]
CAPACITY, NUM_SLOTS = 4, 4
STATS_PERIOD_S = 0.2


class FakeEngine:
    """Loads variants at once, into the slot that was used least recently."""

    def __init__(self) -> None:
        self._name = serve.get_replica_context().replica_id.to_full_id_str()
        self._slots: list[str] = []
        self._num_open = 0
        self._num_loads = 0
        self._released = asyncio.Event()
        self._frozen: dict[str, Any] = {}

    async def generate(self, route: Route, is_held: bool = False) -> AsyncIterator[str]:
        """Yield the replica's name, and again at the end, which waits for `release` if it is held."""
        self._num_open += 1
        try:
            if route.version is not None:
                self._load(route.version)
            yield self._name
            if is_held:
                await self._released.wait()
            yield self._name
        finally:
            self._num_open -= 1

    async def release(self) -> None:
        """End all calls that are held."""
        self._released.set()
        self._released = asyncio.Event()

    async def freeze(self) -> None:
        """Report the state of this moment from now on."""
        self._frozen = await self.record_routing_stats()

    async def state(self, route: Route) -> dict[str, Any]:
        return {"replica": self._name, "pid": os.getpid(), "loads": self._num_loads, "open": self._num_open}

    async def record_routing_stats(self) -> dict[str, Any]:
        return self._frozen or stats_from_report(
            ReplicaReport(
                self._name,
                capacity=CAPACITY,
                num_slots=NUM_SLOTS,
                num_open=self._num_open,
                num_loads=0,
                resident=frozenset(self._slots),
                in_host_cache=frozenset(),
            )
        )

    def _load(self, version: str) -> None:
        if version in self._slots:
            self._slots.remove(version)
        else:
            self._num_loads += 1
        self._slots = [*self._slots, version][-NUM_SLOTS:]


class FakeIngress:
    """Makes several calls from one request, as a call with several prompts does."""

    def __init__(self, engines: Handle) -> None:
        self._engines = engines

    async def ask(self, num_calls: int) -> list[str]:
        """Return the replica of each call."""
        return await asyncio.gather(*(self._one() for _ in range(num_calls)))

    async def _one(self) -> str:
        sent: Any = self._engines.options(stream=True).generate.remote(route=Route("v"))
        return str([name async for name in sent][-1])


# Two of them, until options say otherwise.
ENGINES: Any = serve.deployment(
    FakeEngine,
    num_replicas=2,
    max_ongoing_requests=64,
    ray_actor_options={"num_cpus": 0.1},
    graceful_shutdown_timeout_s=1,
    health_check_period_s=1,
    request_router_config={
        "request_router_class": WatchedRouter,
        "request_routing_stats_period_s": STATS_PERIOD_S,
    },
)


INGRESS: Any = serve.deployment(
    FakeIngress, ray_actor_options={"num_cpus": 0.1}, graceful_shutdown_timeout_s=1
)


def states(handle: Handle) -> dict[str, dict[str, Any]]:
    """Return the state of each replica by its name."""
    found = handle.broadcast("state", route=Route()).results(timeout_s=30)
    return {one["replica"]: one for one in found}


def num_known(handle: Handle) -> int:
    """Return the number of replicas whose reports have reached the newest router."""
    where(handle, None)
    return len(ROUTERS[-1].ranked(None))


def is_reported(handle: Handle, version: str) -> bool:
    """Return whether a report that names a version has reached the newest router."""
    where(handle, None)
    return any(version in stats["resident"] for stats in ROUTERS[-1].reports.values())


def where(handle: Handle, version: str | None) -> str:
    """Send one call to its end and return the replica that answered."""
    *_, name = generating(handle, version)
    return name


def generating(handle: Handle, version: str | None, *, is_held: bool = False) -> Iterator[str]:
    """Send one call, outside of any other request, and return its stream."""
    sent: Any = Context().run(
        handle.options(stream=True).generate.remote, route=Route(version), is_held=is_held
    )
    return iter(sent)
