"""Label values that are known in advance, and the limit of those that are not."""

from __future__ import annotations

from server.tenants.limits.tenant_limits import FIELDS

SOURCES = ("store", "disk", "host")
STAGES = ("fetch", "read", "copy", "total")
LEVELS = ("device", "host")
LOOKUPS = ("device", "host", "disk")
# Of a request whose delta was not in a slot.
COLD_LOOKUPS = ("host", "disk")
KINDS = ("prompt", "generation")
WAIT_REASONS = ("capacity", "variant_load")
FINISH_REASONS = ("stop", "length", "cancelled", "error")
LOAD_FAILURES = ("corrupt", "missing", "error")
EVICTION_REASONS = ("capacity", "unload")
# A tenant over a limit is refused for the limit's name.
REJECTIONS = ("queue_full", "draining", "engine_restarted", "invalid", *FIELDS)
MEMORY_KINDS = ("base", "slots", "kv", "other")
UPLOAD_RESULTS = ("created", "duplicate", "rejected", "failed")

# The label `variant` of the base, and the value that further values of any label fold into.
BASE, OTHER = "base", "other"
MAX_LABEL_VALUES = 200


def variant_label(tenant: str, name: str) -> str:
    """Return the `variant` label of a variant. It contains a slash, which `BASE` and `OTHER` do not."""
    return f"{tenant}/{name}"
