"""Chooses the engine replica of each call: `VariantRouter` behind Ray Serve's request-router interface.

Serve makes one router in each process that holds a handle of the engines' deployment, runs it on one event loop, and
gives it the replicas with their latest routing statistics.

Ray marks `RequestRouter`, `PendingRequest` and `RunningReplica` as public and alpha, so the extra `ray` allows 2.60
alone. Three members beyond the documented ones are used:

- `routing_context`: without it, Serve asks again without a pause when no replica is free;
- `_remove_pending_request_from_indices`: without it, Serve keeps a call that has failed;
- `_pending_requests_by_id`, where Serve finds the call to assign by an id that all calls of one HTTP request share.
  It never assigns the second of two that are pending together, so this router does.

Serve pickles the router's class together with this module, so nothing else may import from here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.scale.routing import (
    Costs,
    InvalidReport,
    PinnedReplicaGone,
    Route,
    VariantRouter,
    report_from_stats,
)

log = logging.getLogger(__name__)

# A variant that was sent to a replica counts as held there for this long, whatever a report says: the report may be
# older than the request, because Serve's controller collects it and passes it on later.
ON_ITS_WAY_S = 2.0


class VariantRequestRouter(RequestRouter):
    """Ranks the replicas for the `Route` that a call carries as its keyword argument `route`.

    A call without a route goes where the base is answered first. A replica without a report comes last, in the order of
    the calls that this router has open there. A pinned call goes to its replica, or fails with `PinnedReplicaGone`.
    """

    def initialize_state(self, **costs: float) -> None:
        """Take `Costs` by the names of its fields, from `request_router_kwargs`."""
        self._router = VariantRouter(Costs(**costs))
        self._seen: dict[str, Mapping[str, Any]] = {}
        self._open: Counter[str] = Counter()
        # By replica: variants that were sent, and until when they count as on their way.
        self._on_way: dict[str, dict[str, float]] = {}
        self._watched: set[asyncio.Future[RunningReplica]] = set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all candidates, each a rank of its own, the one with the least expected delay first."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        route = pending_request.kwargs.get("route") or Route()
        by_name = {one.replica_id.to_full_id_str(): one for one in candidate_replicas}
        if route.pinned_replica is not None:
            return self._pinned(route.pinned_replica, by_name, pending_request)
        self._refresh(by_name)
        ranked = [name for name in self.ranked(route.version) if name in by_name]
        unknown = sorted(by_name.keys() - set(ranked), key=lambda name: (self._open[name], name))
        order = [*ranked, *unknown]
        self._watch(pending_request, order[0], route.version)
        if self._is_shadowed(pending_request):
            pending_request.future.set_result(by_name[order[0]])
        return [[by_name[name]] for name in order]

    def ranked(self, version: str | None) -> list[str]:
        """Return the replicas that have reported, best first."""
        return self._router.ranked(version)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._keep_current()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._keep_current()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a call as open until `on_request_completed`, which Serve calls once for each."""
        super().on_send_request(replica_id)
        name = replica_id.to_full_id_str()
        self._open[name] += 1
        self._router.sent(name, None)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._end(replica_id.to_full_id_str())

    def _pinned(
        self, name: str, by_name: Mapping[str, RunningReplica], pending: PendingRequest
    ) -> list[list[RunningReplica]]:
        if name in by_name:
            return [[by_name[name]]]
        if not pending.future.done():
            pending.future.set_exception(
                PinnedReplicaGone(
                    f"replica {name!r} has ended, and its requests with it: send the request again"
                )
            )
            self._remove_pending_request_from_indices(pending)
        # Serve looks whether the future is done only where there is a candidate.
        return [list(by_name.values())]

    def _is_shadowed(self, pending: PendingRequest) -> bool:
        """Return whether Serve cannot find the call, because another of the same HTTP request has its id."""
        indexed = self._pending_requests_by_id.get(pending.metadata.internal_request_id)
        return indexed is not pending and not pending.future.done()

    def _refresh(self, by_name: Mapping[str, RunningReplica]) -> None:
        """Give the router each report that has changed.

        A report that has not changed is not given again: its open requests would be compared with own counts of now.
        """
        for name, replica in by_name.items():
            stats, seen = replica.routing_stats, self._seen.get(name)
            if not stats or stats is seen:
                continue
            self._seen[name] = stats
            if stats != seen:
                self._observe(name, stats, is_first=seen is None)

    def _observe(self, name: str, stats: Mapping[str, Any], is_first: bool) -> None:
        try:
            report = report_from_stats({**stats, "replica": name})
        except InvalidReport as error:
            log.warning("a report is ignored: %s", error)
            return
        self._router.observe(report)
        if is_first:
            for _ in range(self._open[name]):
                self._router.sent(name, None)
        now = time.monotonic()
        self._on_way[name] = {
            version: until for version, until in self._on_way.get(name, {}).items() if until > now
        }
        for version in self._on_way[name]:
            self._router.expect(name, version)

    def _watch(self, pending: PendingRequest, first: str, version: str | None) -> None:
        """Count a call where it will probably go, until Serve has sent it: Serve chooses for a whole burst at once."""
        if pending.future in self._watched:
            return
        self._watched.add(pending.future)
        self._open[first] += 1
        self._router.sent(first, version)
        pending.future.add_done_callback(partial(self._assigned, first, version))

    def _assigned(self, first: str, version: str | None, future: asyncio.Future[RunningReplica]) -> None:
        self._watched.discard(future)
        self._end(first)
        if version is None or future.cancelled() or future.exception() is not None:
            return
        name = future.result().replica_id.to_full_id_str()
        self._on_way.setdefault(name, {})[version] = time.monotonic() + ON_ITS_WAY_S
        self._router.expect(name, version)

    def _end(self, name: str) -> None:
        if self._open[name] > 0:
            self._open[name] -= 1
            self._router.ended(name)

    def _keep_current(self) -> None:
        names = {replica_id.to_full_id_str() for replica_id in self.curr_replicas}
        self._router.keep_only(names)
        for gone in self._seen.keys() - names:
            del self._seen[gone]
        for gone in self._open.keys() - names:
            del self._open[gone]
        for gone in self._on_way.keys() - names:
            del self._on_way[gone]
