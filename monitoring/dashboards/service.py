"""The dashboard of a service: its load, latency, errors, batches and memory."""

from __future__ import annotations

from monitoring.alerts import thresholds as limits
from monitoring.alerts.definitions import FAILED, REFUSED
from monitoring.dashboards.dashboard import SCOPE, Page, Section
from monitoring.dashboards.deltas import cold_share
from monitoring.dashboards.panels import GREEN, HALF, RED, YELLOW, Query, distribution, lines, number
from monitoring.promql import ratio, summed


def quantiles(name: str, *shares: float) -> list[Query]:
    """Return quantiles of a histogram over all its labels."""
    return [(SCOPE.quantile(share, name), f"p{share * 100:g}") for share in shares]


def _requests() -> str:
    """Return the requests per second that ended or were refused."""
    return f"({SCOPE.total('variant_requests_total')} + {SCOPE.total('admission_rejections_total', REFUSED)})"


def _failed_share() -> str:
    failed = SCOPE.total("variant_requests_total", FAILED)
    return ratio(f"({failed} + {SCOPE.total('admission_rejections_total', REFUSED)})", _requests())


NOW = Section(
    "Now",
    (
        number(
            "Ready servers",
            "Servers that admit requests. Fewer than targets: look for PeraxisDown and PeraxisNotReady in the "
            "runbook.",
            "short",
            [(summed(SCOPE.series("ready")), "ready"), (f"count({SCOPE.up()})", "targets")],
            steps={None: RED, 1: GREEN},
        ),
        number(
            "Requests per second",
            "Requests that ended, whatever the reason. A fall to 0 while clients send: look at replies by "
            "status.",
            "reqps",
            [(SCOPE.total("variant_requests_total"), "requests")],
        ),
        number(
            "Generated tokens per second",
            "Tokens of all requests. Falls with a steady number of running requests: look at the step time.",
            "short",
            [(SCOPE.total("generation_tokens_total"), "tokens")],
        ),
        number(
            "Failed or refused",
            "Share of requests that ended with an error, or were refused with a full queue or without an engine. "
            "Above the SLO: see PeraxisErrorBudget in the runbook.",
            "percentunit",
            [(_failed_share(), "share")],
            steps={None: GREEN, 0.001: YELLOW, 0.01: RED},
        ),
        number(
            "First token, p95",
            "One request in twenty waits longer for its first token. If it rises: compare the time in queue with "
            "cold starts, which tell a full server from one with too few slots.",
            "s",
            [(SCOPE.quantile(0.95, "time_to_first_token_seconds"), "p95")],
            steps={None: GREEN, 1: YELLOW, float(limits.TTFT_SECONDS.default): RED},
        ),
        number(
            "Cold share",
            "Share of requests whose delta was not in a slot. If it rises: add slots (--max-gpu-deltas), pin hot "
            "variants, or route each variant to few replicas.",
            "percentunit",
            [(cold_share(), "share")],
            steps={None: GREEN, 0.1: YELLOW, 0.3: RED},
        ),
        number(
            "Running",
            "Requests that run. Near --max-num-seqs the others wait.",
            "short",
            [(summed(SCOPE.series("num_requests_running")), "running")],
        ),
        number(
            "Waiting",
            "Admitted requests that wait, for capacity or for their delta. Near --max-queue requests are "
            "refused: add replicas.",
            "short",
            [(summed(SCOPE.series("num_requests_waiting")), "waiting")],
        ),
        number(
            "KV cache used",
            "Used share of the fullest server's KV cache. At 1 requests wait or are preempted: raise "
            "--kv-cache-gb, or lower --max-gpu-deltas or --max-model-len.",
            "percentunit",
            [(f"max({SCOPE.series('kv_cache_usage_ratio')})", "used")],
            steps={None: GREEN, 0.9: YELLOW, 0.98: RED},
        ),
        number(
            "Slots in use",
            "Slots that hold a delta. All in use is normal; with a rising cold share there are too few.",
            "short",
            [(summed(SCOPE.series("slots_in_use")), "in use"), (summed(SCOPE.series("slots")), "all")],
        ),
        number(
            "Registry's free space",
            "Free bytes of the registry's file system. Before it is full: delete variants, then `peraxis "
            "registry gc`.",
            "bytes",
            [(f"min({SCOPE.series('registry_free_bytes')})", "free")],
            steps={None: RED, float(limits.DISK_FREE_BYTES.default): GREEN},
        ),
        number(
            "Quarantined artifacts",
            "Damaged artifacts, which are not served. Upload the same bytes again, and check the disk.",
            "short",
            [(f"max({SCOPE.series('registry_quarantined')})", "artifacts")],
            steps={None: GREEN, 1: RED},
        ),
    ),
)
LATENCY = Section(
    "Latency",
    (
        lines(
            "Time to first token",
            "From admission to the first token: queue, load and prefill. If only p99 rises: cold starts. If all "
            "rise: long prompts or a full server; see batches.",
            "s",
            quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
        ),
        lines(
            "Time between tokens",
            "Between two tokens of a request. It grows with the requests and the distinct variants of a step: "
            "lower --max-num-seqs or --max-batch-tokens, or add replicas.",
            "s",
            quantiles("inter_token_latency_seconds", 0.5, 0.95, 0.99),
        ),
        lines(
            "Whole request",
            "From admission to the last token. It follows the lengths of outputs: compare with tokens per "
            "request.",
            "s",
            quantiles("e2e_request_latency_seconds", 0.5, 0.95, 0.99),
        ),
        lines(
            "Time in queue",
            "From admission to the first step. Long while few requests run: they wait for loads. Long while many "
            "run: add replicas or raise --max-num-seqs.",
            "s",
            quantiles("request_queue_seconds", 0.5, 0.95),
        ),
        lines(
            "Queue by reason",
            "Admitted requests that wait for capacity (sequences and KV cache) or for the load of their delta. "
            "Capacity: add replicas. Loads: see the dashboard of deltas.",
            "short",
            [(summed(SCOPE.series("num_requests_waiting_by_reason"), "reason"), "{{reason}}")],
            stacked=True,
        ),
        lines(
            "Running and waiting",
            "Requests of each server. Uneven servers: the router does not spread the load, or variants are hot.",
            "short",
            [
                (summed(SCOPE.series("num_requests_running"), "instance"), "{{instance}} running"),
                (summed(SCOPE.series("num_requests_waiting"), "instance"), "{{instance}} waiting"),
            ],
        ),
    ),
)
REQUESTS = Section(
    "Requests",
    (
        lines(
            "Ended requests by reason",
            "stop and length are answers, cancelled are clients that left, error is the server's failure: search "
            "its log by X-Request-Id.",
            "reqps",
            [(SCOPE.total("variant_requests_total", by="finish_reason"), "{{finish_reason}}")],
            stacked=True,
        ),
        lines(
            "Replies by status",
            "HTTP replies. 503 comes from a full or restarting server, 429 from a tenant's limit, 4xx from "
            "clients; docs/serving.md lists the codes.",
            "reqps",
            [(SCOPE.total("http_requests_total", by="code"), "{{code}}")],
            stacked=True,
        ),
        lines(
            "Rejections by reason",
            "Requests that were not admitted. queue_full: add replicas. engine_restarted: read the engine's last "
            "log lines. Names of limits: the tenants' own, see the dashboard of deltas.",
            "reqps",
            [(SCOPE.total("admission_rejections_total", by="reason"), "{{reason}}")],
            stacked=True,
        ),
        lines(
            "Calls by route",
            "HTTP requests of each route. A route that polls too often shows here.",
            "reqps",
            [(SCOPE.total("http_requests_total", by="route"), "{{route}}")],
            width=HALF,
        ),
        lines(
            "Tokens per second",
            "Tokens processed and generated. Prompt tokens that crowd out generation: lower --max-batch-tokens.",
            "short",
            [
                (SCOPE.total("prompt_tokens_total"), "prompt"),
                (SCOPE.total("generation_tokens_total"), "generated"),
            ],
            width=HALF,
        ),
    ),
)
BATCHES = Section(
    "Batches",
    (
        distribution(
            "Distinct variants per step",
            "How many deltas a step mixes, the base not counted. Each adds its weights' traffic to a step; many "
            "with few requests each: route variants to fewer replicas.",
            "short",
            SCOPE.total("batch_distinct_variants_bucket", by="le"),
        ),
        lines(
            "Requests and variants per step",
            "Means. Requests near 1 with a queue: something holds admission back, see the queue by reason.",
            "short",
            [
                (SCOPE.mean("batch_requests"), "requests"),
                (SCOPE.mean("batch_distinct_variants"), "distinct variants"),
            ],
        ),
        lines(
            "Step time",
            "Time of one forward pass and sampling. It bounds the time between tokens. Steps of seconds: another "
            "process uses the device or the cores.",
            "s",
            quantiles("step_seconds", 0.5, 0.95, 0.99),
        ),
    ),
)
MEMORY = Section(
    "Memory and processes",
    (
        lines(
            "KV cache",
            "Used share of each server's pages. Steadily at 1 with waiting requests: see PeraxisKVFull in the "
            "runbook.",
            "percentunit",
            [(SCOPE.series("kv_cache_usage_ratio"), "{{instance}}")],
        ),
        lines(
            "Prefix-cache hits",
            "Share of looked-up prompt tokens whose keys and values were cached. Low with repeated prompts: the "
            "KV cache is too small, or requests of one variant go to many replicas.",
            "percentunit",
            [
                (
                    ratio(SCOPE.total("prefix_cache_hits_total"), SCOPE.total("prefix_cache_queries_total")),
                    "hits",
                )
            ],
        ),
        lines(
            "Preemptions",
            "Sequences whose pages were taken and that are computed again. Regular ones waste time: raise "
            "--kv-cache-gb or lower --max-num-seqs.",
            "cps",
            [(SCOPE.total("preemptions_total"), "sequences")],
        ),
        lines(
            "Device memory by use",
            "Bytes set aside at start-up. Slots and KV cache share what the base leaves.",
            "bytes",
            [(summed(SCOPE.series("device_memory_bytes"), "kind"), "{{kind}}")],
            stacked=True,
        ),
        lines(
            "Memory of processes",
            "Resident memory of all processes of each server. Steady growth over days is a leak: restart the "
            "server at a quiet time, and report it with its /stats.",
            "bytes",
            [(SCOPE.process("resident_memory_bytes"), "{{instance}}")],
        ),
        lines(
            "Processor cores",
            "Cores that all processes of each server use. At the container's limit, steps and loads slow down: "
            "raise it.",
            "short",
            [(f"rate({SCOPE.process('cpu_seconds_total')}[{SCOPE.window}])", "{{instance}}")],
        ),
    ),
)
SERVICE = Page(
    "peraxis-service",
    "Peraxis / Service",
    "Load, latency, errors, batches and memory of Peraxis servers. Deltas have a dashboard of their own.",
    (NOW, LATENCY, REQUESTS, BATCHES, MEMORY),
)
