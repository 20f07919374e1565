"""Every alert: the condition of each and its texts. `docs/deploy/runbook.md` has a section for each."""

from __future__ import annotations

from monitoring.alerts import thresholds as limits
from monitoring.alerts.alert import MATCHERS, Alert, Comparison, Threshold
from monitoring.promql import Scope, ratio, summed

# Labels of a service and of one of its servers.
JOB, INSTANCE = "namespace, job", "namespace, job, instance"
SERVICE = "{{ with $labels.namespace }}{{ . }}/{{ end }}{{ $labels.job }}"
SERVER = "{{ $labels.instance }}"
PERCENT = "{{ $value | humanizePercentage }}"
# Refusals that the client did not cause; "draining" is not among them because it is part of each rollout.
REFUSED = 'reason=~"queue_full|engine_restarted"'
FAILED = 'finish_reason="error"'

SCOPE = Scope(MATCHERS, "5m")


def above(value: str, threshold: Threshold) -> Comparison:
    return Comparison(value, ">", threshold.placeholder)


def _is_used(window: str, by: str) -> Comparison:
    """True while there are enough requests for a ratio of them."""
    return above(_requests(SCOPE.over(window), by), limits.MIN_REQUESTS_PER_SECOND)


def _requests(scope: Scope, by: str) -> str:
    """Return the requests per second that ended or were refused."""
    ended = scope.total("variant_requests_total", by=by)
    return f"({ended} + {scope.total('admission_rejections_total', REFUSED, by)})"


def _burn_rate(window: str) -> str:
    """Return the share of requests that failed or were refused, over the share that the SLO allows."""
    scope = SCOPE.over(window)
    failed = scope.total("variant_requests_total", FAILED, JOB)
    refused = scope.total("admission_rejections_total", REFUSED, JOB)
    return (
        f"{ratio(f'({failed} + {refused})', _requests(scope, JOB))} / (1 - {limits.SLO_TARGET.placeholder})"
    )


def _burns(long: str, short: str, threshold: Threshold) -> tuple[Comparison, ...]:
    """Compare a long window, for significance, and a short one, so that the alert ends soon after the errors."""
    return (above(_burn_rate(long), threshold), above(_burn_rate(short), threshold), _is_used(long, JOB))


AVAILABILITY = (
    Alert(
        "Down",
        "critical",
        (
            (Comparison(SCOPE.up(), "<", "1"),),
            # Service discovery finds no target at all.
            ((Comparison(f"count({SCOPE.up()}) or vector(0)", "<", "1")),),
        ),
        limits.DOWN_FOR,
        "A Peraxis server does not answer Prometheus",
        "{{ with $labels.instance }}{{ . }} does not answer{{ else }}No target is found{{ end }}.",
    ),
    Alert(
        "NotReady",
        "critical",
        ((Comparison(f"min by ({INSTANCE}) ({SCOPE.series('ready')})", "<", "1"),),),
        limits.NOT_READY_FOR,
        "A Peraxis server is alive and admits no requests",
        f"{SERVER} answers and is not ready: its base is loading, its engine restarts, or it drains.",
    ),
    Alert(
        "Stalled",
        "critical",
        (
            (
                Comparison(
                    summed(
                        f"{SCOPE.series('num_requests_running')} + {SCOPE.series('num_requests_waiting')}",
                        INSTANCE,
                    ),
                    ">",
                    "0",
                ),
                Comparison(SCOPE.over("2m").total("step_seconds_count", by=INSTANCE), "<=", "0"),
            ),
        ),
        limits.STALLED_FOR,
        "A Peraxis engine has requests and makes no steps",
        f"{{{{ $value }}}} requests of {SERVER} run or wait, and no step has ended.",
    ),
    Alert(
        "ErrorBudget",
        "critical",
        (_burns("1h", "5m", limits.FAST_BURN), _burns("6h", "30m", limits.SLOW_BURN)),
        limits.ERROR_BUDGET_FOR,
        "Peraxis fails or refuses more requests than its SLO allows",
        f"{SERVICE} burns its error budget at {{{{ $value | humanize }}}} times the rate that lasts a month.",
    ),
)
DELTAS = (
    Alert(
        "LoadStuck",
        "warning",
        (
            (
                Comparison(
                    summed(SCOPE.series("num_requests_waiting_by_reason", 'reason="variant_load"'), INSTANCE),
                    ">",
                    "0",
                ),
                Comparison(
                    SCOPE.over("2m").total("variant_load_seconds_count", 'stage="total"', INSTANCE), "<=", "0"
                ),
            ),
        ),
        limits.LOAD_STUCK_FOR,
        "Requests wait for deltas and no load ends",
        f"{{{{ $value }}}} requests of {SERVER} wait for a delta, and no load has ended.",
    ),
    Alert(
        "SlotThrash",
        "warning",
        (
            (
                above(
                    ratio(
                        SCOPE.over("10m").total(
                            "variant_evictions_total", 'level="device",reason="capacity"', INSTANCE
                        ),
                        SCOPE.over("10m").total("variant_lookups_total", by=INSTANCE),
                    ),
                    limits.EVICTIONS_PER_REQUEST,
                ),
                above(
                    SCOPE.over("10m").total("variant_lookups_total", by=INSTANCE),
                    limits.MIN_REQUESTS_PER_SECOND,
                ),
            ),
        ),
        limits.SLOT_THRASH_FOR,
        "Variants in use do not fit into the slots",
        f'{SERVER} evicts {{{{ $value | printf "%.2f" }}}} deltas per request.',
    ),
    Alert(
        "ColdStartSlow",
        "warning",
        (
            (
                above(
                    SCOPE.over("15m").quantile(0.95, "cold_start_seconds", by=JOB), limits.COLD_START_SECONDS
                ),
            ),
        ),
        limits.COLD_START_SLOW_FOR,
        "Cold starts are slow",
        f"One cold start in twenty of {SERVICE} takes over {{{{ $value | humanizeDuration }}}}.",
    ),
    Alert(
        "LoadFailing",
        "warning",
        (
            (
                above(
                    summed(SCOPE.over("15m").increase("variant_load_failures_total"), f"{INSTANCE}, reason"),
                    limits.LOAD_FAILURES,
                ),
            ),
        ),
        limits.LOAD_FAILING_FOR,
        "Deltas fail to load",
        f"{{{{ $value | humanize }}}} loads of {SERVER} have failed in 15 minutes: {{{{ $labels.reason }}}}.",
    ),
)
REQUESTS = (
    Alert(
        "TTFTHigh",
        "warning",
        ((above(SCOPE.quantile(0.95, "time_to_first_token_seconds", by=JOB), limits.TTFT_SECONDS),),),
        limits.TTFT_HIGH_FOR,
        "First tokens are late",
        f"One first token in twenty of {SERVICE} takes over {{{{ $value | humanizeDuration }}}}.",
    ),
    Alert(
        "Rejecting",
        "warning",
        (
            (
                above(
                    ratio(SCOPE.total("admission_rejections_total", REFUSED, JOB), _requests(SCOPE, JOB)),
                    limits.REJECTED_RATIO,
                ),
                _is_used("5m", JOB),
            ),
        ),
        limits.REJECTING_FOR,
        "Peraxis refuses requests that tenants may make",
        f"{SERVICE} refuses {PERCENT} of its requests.",
    ),
    Alert(
        "KVFull",
        "warning",
        (
            (
                above(f"max by ({INSTANCE}) ({SCOPE.series('kv_cache_usage_ratio')})", limits.KV_USAGE_RATIO),
                Comparison(
                    summed(SCOPE.series("num_requests_waiting_by_reason", 'reason="capacity"'), INSTANCE),
                    ">",
                    "0",
                ),
            ),
        ),
        limits.KV_FULL_FOR,
        "The KV cache is full and requests wait",
        f"{PERCENT} of {SERVER}'s KV cache is in use.",
    ),
    Alert(
        "VariantErrors",
        "warning",
        (
            (
                above(
                    ratio(
                        SCOPE.over("10m").total("variant_requests_total", FAILED, f"{JOB}, variant"),
                        SCOPE.over("10m").total("variant_requests_total", by=f"{JOB}, variant"),
                    ),
                    limits.VARIANT_ERROR_RATIO,
                ),
                Comparison(
                    summed(SCOPE.over("10m").increase("variant_requests_total", FAILED), f"{JOB}, variant"),
                    ">=",
                    limits.VARIANT_ERRORS.placeholder,
                ),
            ),
        ),
        limits.VARIANT_ERRORS_FOR,
        "Requests of one variant fail",
        f"{PERCENT} of the requests to {{{{ $labels.variant }}}} end with an error.",
    ),
)
REGISTRY = (
    Alert(
        "RegistryDown",
        "critical",
        ((Comparison(f"min by ({INSTANCE}) ({SCOPE.series('registry_up')})", "<", "1"),),),
        limits.REGISTRY_DOWN_FOR,
        "A Peraxis server cannot read its registry",
        f"{SERVER} cannot read its registry.",
    ),
    Alert(
        "UploadsFailing",
        "warning",
        (
            (
                above(
                    summed(SCOPE.over("15m").increase("uploads_total", 'result="failed"'), JOB),
                    limits.UPLOAD_FAILURES,
                ),
            ),
        ),
        limits.UPLOADS_FAILING_FOR,
        "Uploads fail on the server's side",
        f"{{{{ $value | humanize }}}} uploads to {SERVICE} have failed in 15 minutes.",
    ),
    Alert(
        "DiskLow",
        "warning",
        (
            (
                Comparison(
                    f"min by ({INSTANCE}) ({SCOPE.series('registry_free_bytes')})",
                    "<",
                    limits.DISK_FREE_BYTES.placeholder,
                ),
            ),
        ),
        limits.DISK_LOW_FOR,
        "The registry's disk is nearly full",
        f"The registry of {SERVER} has {{{{ $value | humanize1024 }}}}B left.",
    ),
    Alert(
        "Quarantined",
        "warning",
        ((above(f"max by ({JOB}) ({SCOPE.series('registry_quarantined')})", limits.QUARANTINED_OBJECTS),),),
        limits.QUARANTINED_FOR,
        "The registry has damaged artifacts",
        f"{{{{ $value }}}} artifacts of {SERVICE}'s registry are quarantined.",
    ),
)
ALERTS: tuple[Alert, ...] = (*AVAILABILITY, *DELTAS, *REQUESTS, *REGISTRY)
