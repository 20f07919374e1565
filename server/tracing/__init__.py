"""OpenTelemetry's spans and histograms of requests. Only `exporting.py` and `request_spans.py` import its packages."""
