"""The versions that want a delta, and the bounded part of them that metrics and statistics list. Engine thread only.

Versions of several tenants may have the same bytes, and thousands of them may want one delta. A delta always has one
version listed, if any wants it; further ones are listed while there is room, so that a step's work stays bounded.
"""

from __future__ import annotations

from collections.abc import Mapping

from deltastore.registry.records import VersionRecord
from server.deltas.residency_metrics import ResidencyMetrics, WantingVersion
from server.metrics.labels import MAX_LABEL_VALUES


class WantedDeltas:
    """The versions that want each delta, by the delta's digest and the version's label."""

    def __init__(self, metrics: ResidencyMetrics) -> None:
        self._listed: dict[str, dict[str, WantingVersion]] = {}
        self._unlisted: dict[str, dict[str, WantingVersion]] = {}
        # Listed versions beyond the first of their delta.
        self._num_further = 0
        self._metrics = metrics

    def add(self, record: VersionRecord) -> None:
        """Note that a version wants its delta from now on."""
        digest = record.digest
        if self.is_wanted_by(digest, record.label):
            return
        listed = self._listed.setdefault(digest, {})
        version = WantingVersion(record.tenant, record.name, record.version)
        if listed and self._num_further >= MAX_LABEL_VALUES:
            self._unlisted.setdefault(digest, {})[record.label] = version
            return
        self._num_further += bool(listed)
        listed[record.label] = version
        self._metrics.wanted(digest, version)

    def remove(self, digest: str, label: str) -> None:
        """Note that a version no longer wants its delta. Another one is listed in its place."""
        listed, unlisted = self._listed.get(digest, {}), self._unlisted.get(digest, {})
        unlisted.pop(label, None)
        if (version := listed.pop(label, None)) is not None:
            self._metrics.unwanted(digest, version)
            if unlisted:
                label = next(iter(unlisted))
                listed[label] = unlisted.pop(label)
                self._metrics.wanted(digest, listed[label])
            elif listed:
                self._num_further -= 1
            else:
                del self._listed[digest]
        if not unlisted:
            self._unlisted.pop(digest, None)

    def forget(self, digest: str) -> None:
        """Note that no version wants a delta."""
        self._unlisted.pop(digest, None)
        listed = self._listed.pop(digest, {})
        self._num_further -= max(0, len(listed) - 1)
        for version in listed.values():
            self._metrics.unwanted(digest, version)

    def is_wanted_by(self, digest: str, label: str) -> bool:
        """Return whether the version of this label wants the delta."""
        return label in self._listed.get(digest, ()) or label in self._unlisted.get(digest, ())

    def is_wanted_besides(self, digest: str, label: str) -> bool:
        """Return whether a version other than that of this label wants the delta."""
        num_wanting = len(self._listed.get(digest, ())) + len(self._unlisted.get(digest, ()))
        return num_wanting > self.is_wanted_by(digest, label)

    def listed(self, digest: str) -> Mapping[str, WantingVersion]:
        """Return the listed versions that want a delta, by label."""
        return self._listed.get(digest, {})

    def digests(self) -> list[str]:
        """Return the deltas that a version wants."""
        return list(self._listed)
