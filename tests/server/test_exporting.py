"""A server that sends its traces to a collector on loopback, and one without a collector."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pydantic import ValidationError

from server.settings import Settings
from tests.server.helpers.live_server import Artifacts, live_server

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = "xyzzy-the-words-of-a-tenant"


class Collector(ThreadingHTTPServer):
    """An OTLP receiver that keeps the bodies it is sent, by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: dict[str, list[bytes]] = {"/v1/traces": [], "/v1/metrics": []}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Span]:
        received = map(ExportTraceServiceRequest.FromString, self.bodies["/v1/traces"])
        return [
            span
            for request in received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def metric_names(self) -> set[str]:
        received = map(ExportMetricsServiceRequest.FromString, self.bodies["/v1/metrics"])
        return {
            metric.name
            for request in received
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.bodies[self.path].append(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[Collector]:
    with Collector() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()


def test_a_server_that_ends_has_sent_the_spans_of_its_requests(artifacts: Artifacts, tmp_path: Path) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "X-Request-Id": "req-1"}
    body = {"prompt": PROMPT, "max_new_tokens": 3, "temperature": 0}
    with collector() as receiver:
        with live_server(artifacts.base, tmp_path / "registry", "--otlp-endpoint", receiver.url) as server:
            server.upload("traced", artifacts.plain)
            params = {"variant": "traced"}
            assert (
                server.client.post("/generate", params=params, json=body, headers=headers).status_code == 200
            )
            with server.streaming(max_new_tokens=2000, n=32) as events:
                next(events)
            assert server.stop() == 0
        spans = {span.name: span for span in receiver.spans()}
        left = spans.pop("text_completion base")
        assert ("error.type", "cancelled") in [
            (each.key, each.value.string_value) for each in left.attributes
        ]
        assert set(spans) == {"text_completion traced", "queue", "load", "prefill", "decode"}
        assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
        whole = spans.pop("text_completion traced")
        assert whole.parent_span_id.hex() == CALLER
        assert {span.parent_span_id for span in spans.values()} == {whole.span_id}
        assert {
            "gen_ai.server.request.duration",
            "gen_ai.server.time_to_first_token",
            "gen_ai.server.time_per_output_token",
        } <= receiver.metric_names()
        assert not [raw for bodies in receiver.bodies.values() for raw in bodies if PROMPT.encode() in raw]


@pytest.mark.deploy
def test_a_collector_that_is_gone_costs_no_request(artifacts: Artifacts, tmp_path: Path) -> None:
    with collector() as receiver:
        url = receiver.url
    with live_server(artifacts.base, tmp_path / "registry", "--otlp-endpoint", url) as server:
        assert server.generate(max_new_tokens=1).status_code == 200
        assert server.stop() == 0


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://host/v1/traces", "http://a b"])
def test_an_endpoint_is_a_url_without_a_path(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ValidationError, match="otlp_endpoint"):
        Settings(base=tmp_path, registry=str(tmp_path), otlp_endpoint=endpoint)
