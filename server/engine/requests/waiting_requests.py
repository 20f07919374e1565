"""Admitted requests that have had no step yet, by the delta they need. Engine thread only."""

from __future__ import annotations

from server.deltas.residency import Residency
from server.engine.requests.request_state import RequestState


class WaitingRequests:
    """Requests that wait for their first step; tells which of them wait for a load.

    Args:
        load_timeout_s: after which a request whose delta is not resident is late.
    """

    def __init__(self, residency: Residency, load_timeout_s: float) -> None:
        self._residency = residency
        self._load_timeout_s = load_timeout_s
        self._by_version: dict[str | None, dict[str, RequestState]] = {}  # by version, then request id

    @property
    def num_requests(self) -> int:
        return sum(map(len, self._by_version.values()))

    @property
    def num_loading(self) -> int:
        """Number of requests whose delta is not resident; O(variants that wait)."""
        return sum(len(self._by_version[version]) for version in self._not_resident())

    def add(self, state: RequestState) -> None:
        """Add an admitted request."""
        self._by_version.setdefault(state.request.version, {})[state.request.id] = state

    def remove(self, state: RequestState) -> None:
        """Remove a request whose first step begins, or that ends without one."""
        waiting = self._by_version[state.request.version]
        del waiting[state.request.id]
        if not waiting:
            del self._by_version[state.request.version]

    def load_ended(self, version: str, now: float) -> None:
        """Note when the delta of cold requests became resident, or its load failed."""
        for state in self._by_version.get(version, {}).values():
            if state.cold and state.loaded_at is None:
                state.loaded_at = now

    def late(self, now: float) -> list[RequestState]:
        """Return the requests whose delta was not loaded in time."""
        return [
            state
            for version in self._not_resident()
            for state in self._by_version[version].values()
            if now - state.submitted_at > self._load_timeout_s
        ]

    def _not_resident(self) -> list[str]:
        return [
            version
            for version in self._by_version
            if version is not None and not self._residency.is_resident(version)
        ]
