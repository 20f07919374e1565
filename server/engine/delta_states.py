"""Answers to questions where deltas are and who uses them, for versions and for deltas. Engine thread only.

Versions of several tenants may have the same bytes. Level, pins and requests are told of the asked version alone, so
that no tenant sees what others do with theirs: to a version that neither wants nor uses its delta, it is on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from deltastore.registry.records import VersionRecord
from server.deltas.residency import Residency
from server.protocol.messages import DeltaState, Level, Resident, VersionRef

# Deltas in one answer.
MAX_RESIDENTS = 4096


def states_of(
    residency: Residency, in_use: Iterable[VersionRecord], versions: tuple[VersionRef, ...]
) -> tuple[DeltaState, ...]:
    """Return the level of each version's delta if the version wants or uses it, its pin, and its number of requests.

    Args:
        in_use: the version of each admitted request.
    """
    counts = Counter(record.label for record in in_use)
    states = []
    for version in versions:
        is_own = residency.is_wanted(version.digest, version.label) or version.label in counts
        level: Level = residency.level_of(version.digest) if is_own else "disk"
        is_pinned = residency.has_pin(version.digest, version.label)
        states.append(DeltaState(level, is_pinned, counts[version.label]))
    return tuple(states)


def residents(residency: Residency, in_use: Iterable[VersionRecord]) -> tuple[Resident, ...]:
    """Return the versions that want a delta in memory, by the delta's last use, the least recent first.

    Of more than `MAX_RESIDENTS` deltas, those that were used last, so that the answer delays a step by a bounded time.
    Each delta has one at least; `Residency.wanting` bounds the number of all.
    """
    counts = Counter(record.label for record in in_use)
    return tuple(
        Resident(
            version.tenant,
            version.name,
            version.version,
            record.digest,
            record.device_bytes,
            DeltaState(
                residency.level_of(record.digest), residency.has_pin(record.digest, label), counts[label]
            ),
        )
        for record in residency.records()[-MAX_RESIDENTS:]
        for label, version in residency.wanting(record.digest).items()
    )
