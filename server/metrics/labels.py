"""Label values that are known in advance, and the limits of those that are not."""

from __future__ import annotations

from server.fair_budget import FairBudget
from server.tenants.limits.tenant_limits import FIELDS

SOURCES = ("store", "disk", "host")
STAGES = ("fetch", "read", "copy", "total")
LEVELS = ("device", "host")
LOOKUPS = ("device", "host", "disk")
# Levels of a delta that was not in a slot when its request came.
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


class VariantLabels:
    """The `variant` labels that are taken, of which each tenant has a share.

    A tenant may have as many as are left free: one alone has `MAX_LABEL_VALUES`, and the next one always finds some.
    The caller sees to it that one thread uses it at a time.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._budget = FairBudget(2 * MAX_LABEL_VALUES, "labels of variants")

    def take(self, label: str) -> bool:
        """Take a label if it is not taken; return False if its tenant may have no more."""
        if label not in self._taken:
            tenant = _tenant_of(label)
            if not self._budget.has(tenant, 1):
                return False
            self._budget.take(tenant, 1)
            self._taken.add(label)
        return True

    def give_back(self, label: str) -> None:
        """Let another variant have a label; no effect if it is not taken."""
        if label in self._taken:
            self._taken.remove(label)
            self._budget.give_back(_tenant_of(label), 1)


def _tenant_of(label: str) -> str:
    return label.partition("/")[0]
