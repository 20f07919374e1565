"""OpenTelemetry's spans and histograms of requests. Only `request_spans.py` imports its packages."""
