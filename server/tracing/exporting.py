"""Connect OpenTelemetry's SDK to a collector over OTLP. Knows no request."""

from __future__ import annotations

from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from server.tracing.request_spans import RequestSpans

# Of one request to the collector. A server that ends does not wait longer for a collector that is gone.
TIMEOUT_S = 5.0


class OtlpSpans(RequestSpans):
    """Spans and histograms that are sent to a collector, from threads of the SDK's own.

    Args:
        endpoint: the collector's URL without a path, such as http://localhost:4318.
        instance: the process, which tells its histograms from those of others.
    """

    def __init__(self, endpoint: str, instance: str) -> None:
        resource = Resource.create(
            {
                "service.name": "peraxis",
                "service.version": version("peraxis"),
                "service.instance.id": instance,
            }
        )
        base = endpoint.rstrip("/")
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        spans = OTLPSpanExporter(f"{base}/v1/traces", timeout=TIMEOUT_S)
        self._tracers.add_span_processor(BatchSpanProcessor(spans))
        metrics = OTLPMetricExporter(f"{base}/v1/metrics", timeout=TIMEOUT_S)
        reader = PeriodicExportingMetricReader(metrics)
        self._meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        super().__init__(self._tracers, self._meters)

    def close(self) -> None:
        """Send what is left, and end the threads. Blocks for up to a few timeouts."""
        self._tracers.shutdown()
        self._meters.shutdown()
