"""Alerts: their thresholds, their conditions, and the files of rules that Prometheus and the chart read."""
