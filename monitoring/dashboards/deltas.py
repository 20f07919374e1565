"""The dashboard of deltas: loads, cold starts, residency, variants, tenants and the registry."""

from __future__ import annotations

from monitoring.alerts.definitions import FAILED
from monitoring.dashboards.dashboard import (
    COPY_LIMIT,
    SCOPE,
    TENANT,
    VARIANT,
    Page,
    Section,
    copy_limit_variable,
    label_variable,
)
from monitoring.dashboards.panels import HALF, Query, lines, states
from monitoring.promql import observed, ratio, summed

# A panel shows at most so many variants.
MOST_VARIANTS = 20
BY_SOURCE, BY_STAGE = "source", "source, stage"


def most(expression: str) -> str:
    """Return the largest series of an expression."""
    return f"topk({MOST_VARIANTS}, {expression})"


def cold_share() -> str:
    """Return the share of requests whose delta was not in a slot."""
    warm = SCOPE.total("variant_lookups_total", 'result="device"')
    return f"1 - {ratio(warm, SCOPE.total('variant_lookups_total'))}"


def _resident(level: str) -> str:
    return SCOPE.series("variant_resident", f'level="{level}",{VARIANT}')


def _quantiles(name: str, by: str, legend: str) -> list[Query]:
    return [
        (observed(SCOPE.quantile(share, name, by=by)), f"{legend} p{share * 100:g}") for share in (0.5, 0.95)
    ]


LOADS = Section(
    "Loads",
    (
        lines(
            "Load time by source and stage",
            "Time to bring a delta into a slot: fetch is the download of an object without a local copy, read is "
            "from disk to host memory with its digests verified, copy what of the copy into the slot is not "
            "overlapped, total the sum. A slow read: a slow or shared disk, raise --load-threads or the host "
            "cache. A slow copy: the bus is busy.",
            "s",
            _quantiles("variant_load_seconds", BY_STAGE, "{{source}} {{stage}}"),
            width=HALF,
        ),
        lines(
            "Bytes per second of a load",
            "Bytes of a delta over the time of its load, by source, against what the host can copy. From disk "
            "far below the disk's rate: check the volume. From the host cache far below the copy limit: host "
            "memory is not pinned, or other copies run.",
            "Bps",
            [
                (
                    ratio(
                        SCOPE.total("variant_load_bytes_total", by=BY_SOURCE),
                        SCOPE.total("variant_load_seconds_sum", 'stage="total"', BY_SOURCE),
                    ),
                    "{{source}}",
                ),
                (f"vector(${COPY_LIMIT})", "copy limit"),
            ],
            width=HALF,
        ),
        lines(
            "Loads by source",
            "Deltas loaded per second. Many from disk that were resident shortly before: enlarge the host cache.",
            "cps",
            [(SCOPE.total("variant_load_seconds_count", 'stage="total"', BY_SOURCE), "{{source}}")],
            stacked=True,
            width=HALF,
        ),
        lines(
            "Failed loads by reason",
            "corrupt: the artifact is damaged and quarantined. missing: its object is gone from the registry. "
            "error: the disk failed. See PeraxisLoadFailing in the runbook.",
            "cps",
            [(SCOPE.total("variant_load_failures_total", by="reason"), "{{reason}}")],
            stacked=True,
            width=HALF,
        ),
    ),
)
COLD_STARTS = Section(
    "Cold starts",
    (
        lines(
            "Cold starts",
            "From admission of a request whose delta was not in a slot to its first token, by where the delta "
            "was. Far above the load time: requests wait for a slot, so add slots.",
            "s",
            _quantiles("cold_start_seconds", BY_SOURCE, "{{source}}"),
        ),
        lines(
            "Lookups by level",
            "Requests by where their delta was at admission: device is in a slot.",
            "reqps",
            [(SCOPE.total("variant_lookups_total", by="result"), "{{result}}")],
            stacked=True,
        ),
        lines(
            "Cold share",
            "Share of requests whose delta was not in a slot. If it rises: add slots, pin hot variants, or route "
            "each variant to few replicas.",
            "percentunit",
            [(cold_share(), "cold")],
        ),
    ),
)
RESIDENCY = Section(
    "Residency",
    (
        states(
            "Residency timeline",
            "Where the chosen variants are: in a slot of a server, in the host cache, or on disk where nothing "
            "is drawn. Short stripes of the same variant again and again are thrashing: pin it, or add slots.",
            [
                (
                    f"max by (variant) ({_resident('device')} * 2 or {_resident('host')})",
                    "{{variant}}",
                )
            ],
            {"2": ("slot", "green"), "1": ("host cache", "blue")},
        ),
        lines(
            "Slots",
            "Slots of all servers. Pinned slots are never evicted: with most of them pinned, the others thrash.",
            "short",
            [
                (summed(SCOPE.series("slots_in_use")), "in use"),
                (summed(SCOPE.series("slots_pinned")), "pinned"),
                (summed(SCOPE.series("slots")), "all"),
            ],
        ),
        lines(
            "Deltas in memory",
            "Deltas in slots and in host caches.",
            "short",
            [(summed(SCOPE.series("variants_resident"), "level"), "{{level}}")],
        ),
        lines(
            "Host cache",
            "Bytes of deltas in host memory, and the limit. Full with many loads from disk: raise "
            "--max-host-cache-gb.",
            "bytes",
            [
                (summed(SCOPE.series("host_cache_bytes")), "used"),
                (summed(SCOPE.series("host_cache_limit_bytes")), "limit"),
            ],
        ),
        lines(
            "Evictions",
            "Deltas that left a level: capacity made room for others, unload was asked for.",
            "cps",
            [(SCOPE.total("variant_evictions_total", by="level, reason"), "{{level}} {{reason}}")],
            width=HALF,
        ),
        lines(
            "Churn",
            "Evictions from slots per request. Above 0.3 slots thrash, and most requests wait for a load: see "
            "PeraxisSlotThrash in the runbook.",
            "short",
            [
                (
                    ratio(
                        SCOPE.total("variant_evictions_total", 'level="device",reason="capacity"'),
                        SCOPE.total("variant_lookups_total"),
                    ),
                    "evictions per request",
                )
            ],
            width=HALF,
        ),
    ),
)
VARIANTS = Section(
    "Variants",
    (
        lines(
            "Tokens per second by variant",
            f"The {MOST_VARIANTS} busiest of the chosen variants, prompt and generated tokens. Pin the ones that are "
            "always there.",
            "short",
            [(most(SCOPE.total("variant_tokens_total", VARIANT, "variant")), "{{variant}}")],
            width=HALF,
            stacked=True,
        ),
        lines(
            "Requests per second by variant",
            f"Ended requests of the {MOST_VARIANTS} busiest of the chosen variants.",
            "reqps",
            [(most(SCOPE.total("variant_requests_total", VARIANT, "variant")), "{{variant}}")],
            width=HALF,
            stacked=True,
        ),
        lines(
            "Failed share by variant",
            "Share of a variant's requests that ended with an error. One variant alone: its artifact or "
            "tokenizer, roll it back. All of them: the server.",
            "percentunit",
            [
                (
                    most(
                        ratio(
                            SCOPE.total("variant_requests_total", f"{VARIANT},{FAILED}", "variant"),
                            SCOPE.total("variant_requests_total", VARIANT, "variant"),
                        )
                    ),
                    "{{variant}}",
                )
            ],
            width=HALF,
        ),
        lines(
            "Active version",
            "The version that requests without a version get. A step is a promotion or a rollback, which the "
            "annotations show on every panel.",
            "short",
            [(f"max by (variant) ({SCOPE.series('variant_active_version', VARIANT)})", "{{variant}}")],
            width=HALF,
        ),
    ),
)
TENANTS = Section(
    "Tenants",
    (
        lines(
            "Tokens per second by tenant",
            "Tokens of the chosen tenants' requests, prompt and generated. One tenant takes most: give it limits "
            "with `PUT /tenants/NAME`.",
            "short",
            [(SCOPE.total("tenant_tokens_total", TENANT, "tenant, kind"), "{{tenant}} {{kind}}")],
            stacked=True,
        ),
        lines(
            "Replies by tenant and status",
            "HTTP replies to the chosen tenants. Many 401 or 403: a wrong or revoked key.",
            "reqps",
            [(SCOPE.total("tenant_requests_total", TENANT, "tenant, code"), "{{tenant}} {{code}}")],
        ),
        lines(
            "Rejections by tenant",
            "Requests that were not admitted. A name of a limit: the tenant is over it, raise it or ask the "
            "tenant to slow down. invalid: its client sends wrong requests.",
            "reqps",
            [(SCOPE.total("tenant_rejections_total", TENANT, "tenant, reason"), "{{tenant}} {{reason}}")],
        ),
    ),
)
REGISTRY = Section(
    "Registry",
    (
        lines(
            "Uploads by outcome",
            "created and duplicate are successes, rejected is the client's fault, failed the server's: see "
            "PeraxisUploadsFailing in the runbook.",
            "cps",
            [(SCOPE.total("uploads_total", by="result"), "{{result}}")],
            stacked=True,
        ),
        lines(
            "Bytes received per second",
            "Bytes of artifacts. Slow uploads with a free network: the registry's disk.",
            "Bps",
            [(SCOPE.total("upload_bytes_total"), "received")],
        ),
        lines(
            "Artifacts",
            "Artifacts in the registry, and damaged ones. Objects without a version go with `peraxis registry "
            "gc`.",
            "short",
            [
                (f"max({SCOPE.series('registry_objects')})", "stored"),
                (f"max({SCOPE.series('registry_quarantined')})", "quarantined"),
            ],
        ),
        lines(
            "Registry's size",
            "Bytes of the registry's artifacts. Servers that share a registry count the same ones.",
            "bytes",
            [(f"max({SCOPE.series('registry_bytes')})", "artifacts")],
        ),
        lines(
            "Registry's free space",
            "Free bytes of each server's registry. Below the largest upload: see PeraxisDiskLow in the runbook.",
            "bytes",
            [(SCOPE.series("registry_free_bytes"), "{{instance}}")],
        ),
        lines(
            "Servers that read the registry",
            "Fewer than targets: a volume or mount does not answer, see PeraxisRegistryDown in the runbook. The "
            "other panels of this row then have gaps.",
            "short",
            [(summed(SCOPE.series("registry_up")), "servers"), (f"count({SCOPE.up()})", "targets")],
        ),
    ),
)
DELTAS = Page(
    "peraxis-deltas",
    "Peraxis / Deltas",
    "Loads, cold starts, residency, variants, tenants and the registry of Peraxis servers.",
    (LOADS, COLD_STARTS, RESIDENCY, VARIANTS, TENANTS, REGISTRY),
    (
        label_variable(
            "variant",
            SCOPE.series("variant_requests_total"),
            "Variant",
            "Variants as tenant/name; base is the base.",
        ),
        label_variable(
            "tenant", SCOPE.series("tenant_requests_total"), "Tenant", "Tenants that have sent requests."
        ),
        copy_limit_variable(),
    ),
)
