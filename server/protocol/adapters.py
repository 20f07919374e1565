"""Names that clients have loaded with vLLM's calls, as plain values, and the record of them that a server keeps.

vLLM lists an adapter from its load call to its unload call, also while it is in no memory. The supervisor keeps the
record, so that every HTTP process lists the same, and an engine that restarts changes nothing. Knows no registry.
"""

from __future__ import annotations

from msgspec import Struct


class LoadedAdapter(Struct, frozen=True, array_like=True):
    """A variant's name that was loaded and not unloaded since."""

    tenant: str
    name: str
    path: str  # as the client gave it
    loaded_at: float  # seconds since 1970


class AdapterChange(Struct, frozen=True):
    """A change of the record; without a field that is set, a question about it."""

    loaded: LoadedAdapter | None = None
    unloaded: tuple[str, str] | None = None  # tenant and name


class LoadedAdapters:
    """The record of one server. Not thread-safe."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], LoadedAdapter] = {}

    def apply(self, change: AdapterChange) -> tuple[LoadedAdapter, ...]:
        """Make a change and return all adapters, in the order in which they were first loaded."""
        if change.loaded is not None:
            self._by_name[change.loaded.tenant, change.loaded.name] = change.loaded
        if change.unloaded is not None:
            self._by_name.pop(change.unloaded, None)
        return tuple(self._by_name.values())
