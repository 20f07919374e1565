"""Grafana's dashboards, built with grafana-foundation-sdk. Their JSON is committed, so that using it needs nothing."""
