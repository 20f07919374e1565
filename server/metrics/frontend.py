"""Metrics that HTTP processes count."""

from __future__ import annotations

from server.metrics.labels import UPLOAD_RESULTS
from server.metrics.requests import RequestMetrics


class FrontendMetrics(RequestMetrics):
    """Metrics of one HTTP process: its replies, its uploads, and the requests that it refuses or loses itself."""

    def __init__(self, *, process: bool = False) -> None:
        super().__init__(process=process)
        self.http_requests_total = self.labelled_counter(
            "http_requests", "HTTP requests by route and status", route=(), code=()
        )
        self.tenant_requests_total = self.labelled_counter(
            "tenant_requests", "HTTP requests by status", tenant=(), code=()
        )
        self.uploads_total = self.labelled_counter("uploads", "Uploads by outcome", result=UPLOAD_RESULTS)
        self.upload_bytes_total = self.counter("upload_bytes", "Bytes of artifacts received")
