"""Answers to questions where deltas are and who uses them, for versions and for deltas. Engine thread only.

Versions of several tenants may have the same bytes and so one level. Pins and requests are told of the asked version
alone, so that no tenant sees what others do with theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from deltastore.registry.records import VersionRecord
from server.deltas.residency import Residency
from server.protocol.messages import DeltaState, Resident, VersionRef


def states_of(
    residency: Residency, in_use: Iterable[VersionRecord], versions: tuple[VersionRef, ...]
) -> tuple[DeltaState, ...]:
    """Return the level of each version's delta, whether that version pins it, and how many requests it has.

    Args:
        in_use: the version of each admitted request.
    """
    counts = Counter(record.label for record in in_use)
    return tuple(
        DeltaState(
            residency.level_of(version.digest),
            residency.has_pin(version.digest, version.label),
            counts[version.label],
        )
        for version in versions
    )


def residents(residency: Residency, in_use: Iterable[VersionRecord]) -> tuple[Resident, ...]:
    """Return the deltas in memory with the pins and requests of all their versions, least recently used first."""
    counts = Counter(record.digest for record in in_use)
    return tuple(
        Resident(
            record.tenant,
            record.name,
            record.version,
            record.digest,
            record.device_bytes,
            DeltaState(
                residency.level_of(record.digest), residency.is_pinned(record.digest), counts[record.digest]
            ),
        )
        for record in residency.records()
    )
