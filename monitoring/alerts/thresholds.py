"""The thresholds of all alerts, with the defaults of Compose and of the chart."""

from __future__ import annotations

from monitoring.alerts.alert import Threshold

DOWN_FOR = Threshold("downFor", "2m", "A target has not answered a scrape for this long.")
NOT_READY_FOR = Threshold(
    "notReadyFor", "15m", "A server has not been ready for this long; longer than a base takes to load."
)
STALLED_FOR = Threshold("stalledFor", "3m", "Requests wait or run, and no step has ended, for this long.")
LOAD_STUCK_FOR = Threshold(
    "loadStuckFor", "2m", "Requests wait for deltas, and no load has ended, for this long."
)
EVICTIONS_PER_REQUEST = Threshold(
    "evictionsPerRequest", 0.3, "Deltas evicted from slots for want of space, per request to a variant."
)
SLOT_THRASH_FOR = Threshold("slotThrashFor", "15m", "There are more evictions per request for this long.")
COLD_START_SECONDS = Threshold(
    "coldStartSeconds", 5.0, "95th percentile of cold starts over 15 minutes, in seconds."
)
COLD_START_SLOW_FOR = Threshold("coldStartSlowFor", "10m", "Cold starts are slower for this long.")
TTFT_SECONDS = Threshold(
    "ttftSeconds", 2.0, "95th percentile of the time to the first token over 5 minutes, in seconds."
)
TTFT_HIGH_FOR = Threshold("ttftHighFor", "10m", "First tokens are later for this long.")
REJECTED_RATIO = Threshold(
    "rejectedRatio",
    0.05,
    "Share of requests refused with a full queue or without an engine, 0 to 1, over 5 minutes.",
)
REJECTING_FOR = Threshold("rejectingFor", "5m", "A larger share is refused for this long.")
KV_USAGE_RATIO = Threshold(
    "kvUsageRatio", 0.95, "Used share of the KV cache's pages, 0 to 1, while requests wait."
)
KV_FULL_FOR = Threshold("kvFullFor", "10m", "The KV cache is fuller for this long.")
VARIANT_ERROR_RATIO = Threshold(
    "variantErrorRatio",
    0.05,
    "Share of one variant's requests that end with an error, 0 to 1, over 10 minutes.",
)
VARIANT_ERRORS = Threshold("variantErrors", 5, "Fewest failed requests of one variant within 10 minutes.")
VARIANT_ERRORS_FOR = Threshold("variantErrorsFor", "2m", "A larger share fails for this long.")
LOAD_FAILURES = Threshold("loadFailures", 2, "Loads that may fail within 15 minutes, by reason.")
LOAD_FAILING_FOR = Threshold("loadFailingFor", "1m", "More loads fail for this long.")
REGISTRY_DOWN_FOR = Threshold(
    "registryDownFor", "2m", "A server has not been able to read its registry for this long."
)
UPLOAD_FAILURES = Threshold(
    "uploadFailures", 2, "Uploads that may fail on the server's side within 15 minutes."
)
UPLOADS_FAILING_FOR = Threshold("uploadsFailingFor", "1m", "More uploads fail for this long.")
DISK_FREE_BYTES = Threshold(
    "diskFreeBytes",
    20e9,
    "Free bytes of the registry's file system; more than one upload of `--max-upload-gb`.",
)
DISK_LOW_FOR = Threshold("diskLowFor", "5m", "Less is free for this long.")
QUARANTINED_OBJECTS = Threshold("quarantinedObjects", 0, "Quarantined artifacts that the registry may have.")
QUARANTINED_FOR = Threshold("quarantinedFor", "1m", "There are more for this long.")
SLO_TARGET = Threshold(
    "sloTarget", 0.999, "Share of requests that the service promises not to refuse or fail, below 1."
)
FAST_BURN = Threshold(
    "fastBurn",
    14.4,
    "Errors over those that the SLO allows, over 1 hour and 5 minutes: 2% of a month's in an hour.",
)
SLOW_BURN = Threshold(
    "slowBurn",
    6.0,
    "Errors over those that the SLO allows, over 6 hours and 30 minutes: 5% of a month's in 6 hours.",
)
ERROR_BUDGET_FOR = Threshold("errorBudgetFor", "2m", "Errors burn the budget faster for this long.")
MIN_REQUESTS_PER_SECOND = Threshold(
    "minRequestsPerSecond",
    0.05,
    "Requests per second below which a share of them says too little to alert on.",
)

THRESHOLDS: tuple[Threshold, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Threshold)
)
