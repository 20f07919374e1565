"""Spans and histograms of one request for tokens, made when it has ended, and their way to a collector over OTLP.

Names, attributes and buckets are those of OpenTelemetry's semantic conventions for generative AI. The engine measures
the phases; a span is made from their durations afterwards, so that tracing costs a step nothing.
"""

from __future__ import annotations

import time
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.protocol.messages import Timings
from server.protocol.request import TracedRequest

SCOPE = "peraxis"
BASE = "base"
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# Deadline of one request to the collector. A server that ends does not wait longer for a collector that is gone.
TIMEOUT_S = 5.0


class RequestSpans:
    """Makes a span per request, with a child per phase, and counts its durations. Thread-safe; closes its providers."""

    def __init__(self, tracers: TracerProvider, meters: MeterProvider) -> None:
        self._tracers, self._meters = tracers, meters
        self._tracer = tracers.get_tracer(SCOPE)
        self._propagator = TraceContextTextMapPropagator()
        meter = meters.get_meter(SCOPE)

        def histogram(name: str, buckets: tuple[float, ...], text: str) -> Histogram:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=buckets)

        self._duration = histogram(
            "gen_ai.server.request.duration",
            DURATION_BUCKETS,
            "Time from submission to the last token or the error",
        )
        self._first_token = histogram(
            "gen_ai.server.time_to_first_token",
            FIRST_TOKEN_BUCKETS,
            "Time to the first token of successful requests",
        )
        self._per_token = histogram(
            "gen_ai.server.time_per_output_token",
            PER_TOKEN_BUCKETS,
            "Time per token after the first of successful requests",
        )

    def finished(self, traced: TracedRequest, timings: Timings) -> None:
        """Record a request that was answered."""
        attributes = _attributes(traced)
        span = self._start(traced, attributes)
        within = set_span_in_context(span)
        began, total_s = traced.submitted_at, timings.total_s
        # From submission; a load is part of the time in the queue.
        phases = [("queue", 0.0, timings.queue_s)]
        if timings.cold:
            phases.append(("load", 0.0, timings.load_s))
        phases += [("prefill", timings.queue_s, timings.ttft_s), ("decode", timings.ttft_s, total_s)]
        for name, start_s, end_s in phases:
            self._phase(name, within, began + start_s, began + end_s)
        self._end(span, traced, total_s)
        self._duration.record(total_s, attributes)
        self._first_token.record(timings.ttft_s, attributes)
        num_tokens = max(traced.num_tokens.values(), default=0)
        if num_tokens > 1:
            self._per_token.record((total_s - timings.ttft_s) / (num_tokens - 1), attributes)

    def failed(self, traced: TracedRequest, kind: str) -> None:
        """Record a request that was not answered.

        Args:
            traced: the request.
            kind: the class of its error, whose message stays out of the trace because it may quote a prompt.
        """
        attributes = {**_attributes(traced), "error.type": kind}
        span = self._start(traced, attributes)
        span.set_status(Status(StatusCode.ERROR))
        total_s = time.time() - traced.submitted_at
        self._end(span, traced, total_s)
        self._duration.record(total_s, attributes)

    def close(self) -> None:
        """Send what is left, and end the threads. Blocks for up to a few timeouts."""
        self._tracers.shutdown()
        self._meters.shutdown()

    def _start(self, traced: TracedRequest, attributes: dict[str, str]) -> Span:
        request = traced.request
        carrier = {} if request.traceparent is None else {"traceparent": request.traceparent}
        return self._tracer.start_span(
            f"{traced.operation} {request.name or BASE}",
            # Without a caller's trace, a new one.
            self._propagator.extract(carrier, Context()),
            SpanKind.SERVER,
            {**attributes, "gen_ai.response.id": request.id},
            start_time=_nanoseconds(traced.submitted_at),
        )

    def _end(self, span: Span, traced: TracedRequest, total_s: float) -> None:
        span.set_attribute("gen_ai.usage.input_tokens", len(traced.request.prompt_ids))
        span.set_attribute("gen_ai.usage.output_tokens", traced.num_tokens.total())
        span.end(_nanoseconds(traced.submitted_at + total_s))

    def _phase(self, name: str, within: Context, began: float, ended: float) -> None:
        span = self._tracer.start_span(name, within, start_time=_nanoseconds(began))
        span.end(_nanoseconds(ended))


def open_spans(endpoint: str, instance: str) -> RequestSpans:
    """Return spans and histograms that are sent to a collector, from threads of the SDK's own.

    Args:
        endpoint: the collector's URL without a path, such as http://localhost:4318.
        instance: the process, which tells its histograms from those of others.
    """
    resource = Resource.create(
        {"service.name": "peraxis", "service.version": version("peraxis"), "service.instance.id": instance}
    )
    base = endpoint.rstrip("/")
    tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
    spans = OTLPSpanExporter(f"{base}/v1/traces", timeout=TIMEOUT_S)
    tracers.add_span_processor(BatchSpanProcessor(spans))
    metrics = OTLPMetricExporter(f"{base}/v1/metrics", timeout=TIMEOUT_S)
    reader = PeriodicExportingMetricReader(metrics)
    return RequestSpans(tracers, MeterProvider([reader], resource=resource, shutdown_on_exit=False))


def _attributes(traced: TracedRequest) -> dict[str, str]:
    model = traced.request.name or BASE
    return {
        "gen_ai.operation.name": traced.operation,
        "gen_ai.provider.name": SCOPE,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
