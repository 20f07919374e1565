"""Spans and histograms of requests, read from the SDK's own exporters in memory."""

from __future__ import annotations

import time
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from server.protocol.messages import Timings
from server.protocol.request import Request, TracedRequest, token_ids_of
from server.tracing import RequestSpans

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TIMINGS = Timings(queue_s=1.0, load_s=0.75, cold=True, ttft_s=1.5, total_s=3.5)
WARM = Timings(queue_s=0.0, load_s=0.0, cold=False, ttft_s=0.5, total_s=1.0)


class Traces:
    """Request spans whose exporters keep everything in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.requests = RequestSpans(tracers, MeterProvider([self._reader], shutdown_on_exit=False))

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def histograms(self) -> dict[str, Any]:
        """Return the only data point of each histogram."""
        data = self._reader.get_metrics_data()
        assert data is not None
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        assert all(len(metric.data.data_points) == 1 and metric.unit == "s" for metric in metrics)
        return {metric.name: metric.data.data_points[0] for metric in metrics}


@pytest.fixture
def traces() -> Traces:
    return Traces()


def traced(traceparent: str | None = None, num_tokens: int = 5, name: str | None = "sql") -> TracedRequest:
    request = Request("req-1-ab", "acme", name, None, token_ids_of([1, 2, 3]), 10, traceparent=traceparent)
    found = TracedRequest(request, "chat", submitted_at=1_000.0)
    found.num_tokens[0] = num_tokens
    return found


def seconds(span: ReadableSpan) -> tuple[float, float]:
    """Return the begin and the end of a span after its request's submission."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9 - 1_000, span.end_time / 1e9 - 1_000


def test_a_cold_request_has_a_span_and_one_per_phase(traces: Traces) -> None:
    traces.requests.finished(traced(), TIMINGS)
    spans = traces.spans()
    assert {name: seconds(span) for name, span in spans.items()} == {
        "chat sql": (0, 3.5), "queue": (0, 1), "load": (0, 0.75), "prefill": (1, 1.5), "decode": (1.5, 3.5),
    }  # fmt: skip
    whole = spans.pop("chat sql")
    assert whole.kind is SpanKind.SERVER
    assert all(span.parent is not None and span.parent == whole.context for span in spans.values())


def test_a_warm_request_has_no_load(traces: Traces) -> None:
    traces.requests.finished(traced(), WARM)
    assert "load" not in traces.spans()


def test_the_span_belongs_to_the_callers_trace(traces: Traces) -> None:
    traces.requests.finished(traced(f"00-{TRACE}-{CALLER}-01"), WARM)
    span = traces.spans()["chat sql"]
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == CALLER


def test_a_caller_that_does_not_sample_gets_no_span_and_is_counted(traces: Traces) -> None:
    traces.requests.finished(traced(f"00-{TRACE}-{CALLER}-00"), WARM)
    assert not traces.spans()
    assert traces.histograms()["gen_ai.server.request.duration"].count == 1


def test_a_span_names_the_model_and_its_tokens_by_the_conventions(traces: Traces) -> None:
    traces.requests.finished(traced(), WARM)
    assert dict(traces.spans()["chat sql"].attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "peraxis",
        "gen_ai.request.model": "sql",
        "gen_ai.response.model": "sql",
        "gen_ai.response.id": "req-1-ab",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
    }


def test_durations_are_counted_in_the_conventions_histograms(traces: Traces) -> None:
    traces.requests.finished(traced(num_tokens=5), TIMINGS)
    found = traces.histograms()
    assert {name: point.sum for name, point in found.items()} == {
        "gen_ai.server.request.duration": 3.5,
        "gen_ai.server.time_to_first_token": 1.5,
        "gen_ai.server.time_per_output_token": 0.5,
    }
    assert found["gen_ai.server.request.duration"].explicit_bounds[:2] == (0.01, 0.02)
    assert found["gen_ai.server.time_to_first_token"].explicit_bounds[:2] == (0.001, 0.005)


def test_one_token_has_no_time_per_further_token(traces: Traces) -> None:
    traces.requests.finished(traced(num_tokens=1), WARM)
    assert "gen_ai.server.time_per_output_token" not in traces.histograms()


def test_a_failed_request_names_the_kind_of_its_error_and_counts_its_duration_alone(traces: Traces) -> None:
    failed = traced()
    failed.submitted_at = time.time()
    traces.requests.failed(failed, "LoadTimeout")
    span = traces.spans()["chat sql"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description is None
    assert (span.attributes or {})["error.type"] == "LoadTimeout"
    (point,) = traces.histograms().values()
    assert point.attributes["error.type"] == "LoadTimeout"


def test_the_base_is_named_as_requests_name_it(traces: Traces) -> None:
    traces.requests.finished(traced(name=None), WARM)
    assert "chat base" in traces.spans()
