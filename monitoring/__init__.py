"""Dashboards and alerts of a server: one source for Compose and the Helm chart.

`python -m monitoring` writes every file that Grafana, Prometheus and the chart read. `python -m monitoring --check`
compares the files with this source, and every expression with the metrics of `server/metrics`. The package knows the
names of metrics and nothing else of a server.
"""
