"""Choose between tracing and none, so that OpenTelemetry is imported only where it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.tracing.exporting import OtlpSpans


def open_spans(endpoint: str | None, instance: str) -> OtlpSpans | None:
    """Return spans that a collector at `endpoint` is sent, or None without an endpoint.

    Args:
        endpoint: the collector's URL without a path.
        instance: the name of this process in traces.
    """
    if endpoint is None:
        return None
    # Deferred: the packages are an extra, and take time to import.
    from server.tracing.exporting import OtlpSpans

    return OtlpSpans(endpoint, instance)
