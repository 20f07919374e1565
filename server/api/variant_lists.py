"""Pages of variants and of their versions, read from the registry. Every function reads files; knows no engine.

A record is dropped as soon as its document is made: it has a digest of each 4 MiB of its artifact.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from deltastore.errors import RegistryError, VariantNotFound
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.registry.variants import VariantSummary
from server.api.json_replies import MAX_PAGE_BYTES
from server.protocol.messages import VersionRef

log = logging.getLogger(__name__)

# The newest versions of a variant that a list of variants shows beside its active one.
NUM_NEWEST = 5
# Records that are read together.
READ_AHEAD = 20


@dataclass(frozen=True, slots=True)
class ListedVariant:
    """A variant as documents show it, without the state of its versions in memory.

    Attributes:
        document: the fields beside `versions`.
        versions: the documents of the versions that are shown, the oldest first.
        refs: names these versions to the engine.
        has_more: the variant has versions behind the last one that is shown.
    """

    name: str
    document: dict[str, Any]
    versions: list[dict[str, Any]]
    refs: list[VersionRef]
    has_more: bool


def list_page(registry: Registry, tenant: str, after: str, limit: int) -> tuple[list[ListedVariant], bool]:
    """Return up to `limit` of a tenant's variants whose names come after one, and whether there may be more."""
    found = registry.names(tenant)
    listed: list[ListedVariant] = []
    for index in range(bisect_right(found, after), len(found)):
        if len(listed) == limit:
            return listed, True
        try:
            listed.append(list_one(registry, tenant, found[index]))
        except VariantNotFound:
            # It was deleted meanwhile.
            continue
        except RegistryError as error:
            log.error("variant %s/%s is left out: %s", tenant, found[index], error)
    return listed, False


def list_one(registry: Registry, tenant: str, name: str) -> ListedVariant:
    """Return a variant with its active version and its newest ones, without their reports.

    Raises:
        VariantNotFound: it has no live version.
    """
    variant = registry.summary(tenant, name)
    newest = variant.numbers[-NUM_NEWEST:]
    records = registry.versions(tenant, name, after=newest[0] - 1, limit=NUM_NEWEST)
    active = variant.active_record
    if active is not None and active.version < newest[0]:
        records = [active, *records]
    return _listed(variant, records, [version_document(record) for record in records])


def show_page(registry: Registry, tenant: str, name: str, after: int, limit: int) -> ListedVariant:
    """Return a variant with up to `limit` versions after a number, and the report of each.

    They are fewer if their reports are more than a page holds.

    Raises:
        VariantNotFound: it has no live version.
    """
    variant = registry.summary(tenant, name)
    records: list[VersionRecord] = []
    documents: list[dict[str, Any]] = []
    num_bytes = 0
    for record in _versions(registry, tenant, name, after, limit):
        shown = registry.report(record)
        num_bytes += len(shown)
        if records and num_bytes > MAX_PAGE_BYTES:
            break
        records.append(record)
        documents.append({**version_document(record), "fidelity": msgspec.Raw(shown)})
    return _listed(variant, records, documents)


def _versions(registry: Registry, tenant: str, name: str, after: int, limit: int) -> Iterator[VersionRecord]:
    """Yield up to `limit` live versions after a number, and read few that are not asked for."""
    while limit > 0:
        found = registry.versions(tenant, name, after=after, limit=min(limit, READ_AHEAD))
        yield from found
        if len(found) < READ_AHEAD:
            return
        after, limit = found[-1].version, limit - len(found)


def version_document(record: VersionRecord) -> dict[str, Any]:
    """Return a version without its report and its state in memory."""
    return {
        "version": record.version,
        "digest": f"sha256:{record.digest}",
        "size_bytes": record.size_bytes,
        "device_bytes": record.device_bytes,
        "method": record.method,
        "agreement": record.agreement,
        "kl": record.kl,
        "created_at": record.created_at,
    }


def _listed(
    variant: VariantSummary, records: list[VersionRecord], documents: list[dict[str, Any]]
) -> ListedVariant:
    document = {
        "name": variant.name,
        "owner": variant.tenant,
        "visibility": variant.visibility,
        "active": variant.active,
        "previous": variant.previous,
        "num_versions": variant.num_versions,
    }
    refs = [VersionRef(record.label, record.digest) for record in records]
    has_more = bool(records) and records[-1].version < variant.numbers[-1]
    return ListedVariant(variant.name, document, documents, refs, has_more)
