"""Values that the ingress, the request router and the engine replicas exchange.

A call to the engine deployment carries a `Route` as its keyword argument `route`. Serve passes what a replica tells its
routers as a plain dict, so a `ReplicaReport` is one on that way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deltastore.errors import PeraxisError
from server.scale.routing import ReplicaReport

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
