"""Chooses the replica of a request by its expected delay.

The delay of a request on a replica has three parts, in seconds:

- its turn: requests that run slow each other, and those beyond the replica's capacity wait for one to end;
- the load of its variant, unless it is in a slot or being loaded, behind the loads that wait there already: from the
  host cache, or from disk. On a replica that has the bytes in neither, `eviction_s` is added if no slot is free, and
  an offset that grows with the replica's rank, which a hash of variant and replica gives.

So a hot variant spreads once the turn on its replicas costs more than a load elsewhere, and a cold one goes where a
slot is free. The offset is the same in every router, so that few replicas cache the bytes of one variant.

A call to the engine deployment carries a `Route` as its keyword argument `route`. Serve passes what a replica tells its
routers as a plain dict, so a `ReplicaReport` is one on that way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from math import log2
from typing import Any

from deltastore.errors import PeraxisError


@dataclass(frozen=True, slots=True)
class Costs:
    """Estimates that turn a replica's state into a delay, in seconds."""

    service_s: float = 2.0  # of a request that runs alone
    # A full batch prolongs a request by so many times `service_s`.
    full_batch_slowdown: float = 1.0
    load_from_host_s: float = 0.02
    load_from_disk_s: float = 0.3
    # More than any offset among a few replicas, so that new replicas take variants.
    eviction_s: float = 1.0
    # One more load from disk, which a variant's bytes on a further replica cost.
    affinity_s: float = 0.3


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The state of one replica at one moment. Variants are named by the labels of their versions."""

    replica: str
    capacity: int  # sequences that run at the same time
    num_slots: int
    num_open: int  # requests that run or wait
    num_loads: int  # variants whose requests wait for a load, one after another
    resident: frozenset[str]  # in a slot or being loaded
    in_host_cache: frozenset[str]


@dataclass(slots=True)
class _Replica:
    """A replica as this router knows it: its last report, and what the router did since."""

    report: ReplicaReport
    num_others: int  # open requests that other routers sent, at the last report
    num_own: int
    # Variants of requests that were sent since the last report.
    sent: set[str] = field(default_factory=set)

    def num_open(self) -> int:
        return self.num_others + self.num_own

    def holds(self, variant: str) -> bool:
        return variant in self.report.resident or variant in self.sent

    def num_loads(self) -> int:
        """Return the loads that are to come, with those that this router's requests have caused."""
        return self.report.num_loads + len(self.sent - self.report.resident)

    def num_free_slots(self) -> int:
        return self.report.num_slots - len(self.report.resident | self.sent)


class VariantRouter:
    """The replicas as one router knows them. Not thread-safe.

    Between two reports of a replica the router adds what it sent there itself, so that a burst of requests for one cold
    variant loads it once.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._replicas: dict[str, _Replica] = {}

    def observe(self, report: ReplicaReport) -> None:
        """Replace what is known of a replica."""
        known = self._replicas.get(report.replica)
        num_own = 0 if known is None else known.num_own
        self._replicas[report.replica] = _Replica(report, max(0, report.num_open - num_own), num_own)

    def keep_only(self, replicas: Collection[str]) -> None:
        """Forget every replica that is not among these."""
        self._replicas = {name: known for name, known in self._replicas.items() if name in replicas}

    def ranked(self, variant: str | None) -> list[str]:
        """Return all known replicas, the one with the least expected delay first.

        Args:
            variant: the label of the version; None is the base, which every replica holds.
        """
        delays = self.delays(variant)
        return sorted(delays, key=delays.__getitem__)

    def delays(self, variant: str | None) -> Mapping[str, float]:
        """Return the expected delay of a request on each replica, with its offset."""
        return {
            name: self._turn_s(known) + (self._load_s(known, variant) if variant else 0.0)
            for name, known in self._replicas.items()
        }

    def sent(self, replica: str, variant: str | None) -> None:
        """Count a request that was sent to a replica, until `ended`."""
        if known := self._replicas.get(replica):
            known.num_own += 1
            if variant:
                known.sent.add(variant)

    def expect(self, replica: str, variant: str) -> None:
        """Count a variant as held by a replica until its next report, because a request for it is on its way there."""
        if known := self._replicas.get(replica):
            known.sent.add(variant)

    def ended(self, replica: str) -> None:
        """Count the end of a request; a replica that is gone is ignored."""
        if known := self._replicas.get(replica):
            known.num_own = max(0, known.num_own - 1)

    def _turn_s(self, known: _Replica) -> float:
        costs, capacity, num_open = self._costs, known.report.capacity, known.num_open()
        slowdown = costs.full_batch_slowdown * min(num_open, capacity) / capacity
        num_ahead = max(0, num_open + 1 - capacity)
        return costs.service_s * (slowdown + (1 + costs.full_batch_slowdown) * num_ahead / capacity)

    def _load_s(self, known: _Replica, variant: str) -> float:
        if known.holds(variant):
            return 0.0
        costs = self._costs
        ahead_s = known.num_loads() * costs.load_from_disk_s
        if variant in known.report.in_host_cache:
            return ahead_s + costs.load_from_host_s
        eviction_s = 0.0 if known.num_free_slots() > 0 else costs.eviction_s
        rank = _hash(variant, known.report.replica) * len(self._replicas)
        return ahead_s + costs.load_from_disk_s + eviction_s + costs.affinity_s * log2(1 + rank)


def _hash(variant: str, replica: str) -> float:
    """Return a number in [0, 1) that variant and replica determine, on every machine alike."""
    digest = hashlib.blake2b(f"{variant}\0{replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


# Entries of a report that are counts; a replica without room for one sequence and one variant serves nothing.
LEAST = {"capacity": 1, "num_slots": 1, "num_open": 0, "num_loads": 0}
VERSIONS = ("resident", "in_host_cache")


class InvalidReport(PeraxisError):
    """A replica sent routing statistics that are no report: its version differs from the router's."""


class PinnedReplicaGone(PeraxisError):
    """The replica that a call must reach has ended."""


@dataclass(frozen=True, slots=True)
class Route:
    """The routing of one call.

    Args:
        version: the label of the version; None is the base.
        pinned_replica: the full id string of the replica that the call must reach, for later messages of a request.
    """

    version: str | None = None
    pinned_replica: str | None = None


def stats_from_report(report: ReplicaReport) -> dict[str, Any]:
    """Return the entries of a report as JSON has them, versions sorted."""
    return {**asdict(report), **{name: sorted(getattr(report, name)) for name in VERSIONS}}


def report_from_stats(stats: Mapping[str, Any]) -> ReplicaReport:
    """Return the report that `stats_from_report` gave; further entries are ignored.

    Raises:
        InvalidReport: an entry is missing, or is not what a report has.
    """
    replica = stats.get("replica")
    if not isinstance(replica, str) or not replica:
        raise InvalidReport(f"the routing statistics name no replica: {replica!r}")
    counts = {name: _count(stats, name, least) for name, least in LEAST.items()}
    resident, in_host_cache = (_versions(stats, name) for name in VERSIONS)
    return ReplicaReport(replica, **counts, resident=resident, in_host_cache=in_host_cache)


def _count(stats: Mapping[str, Any], name: str, least: int) -> int:
    value = stats.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidReport(
            f"replica {stats['replica']!r}: {name} must be an integer of at least {least}, got {value!r}"
        )
    return value


def _versions(stats: Mapping[str, Any], name: str) -> frozenset[str]:
    value = stats.get(name)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InvalidReport(
            f"replica {stats['replica']!r}: {name} must be a list of versions, got {value!r:.100}"
        )
    return frozenset(value)
