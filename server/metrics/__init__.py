"""Metrics of the service: counted in every process, added up and rendered in one.

`EngineMetrics` and `FrontendMetrics` count. `take_snapshot` makes a plain value of a process's metrics, which can be
sent to another process. `Aggregator` adds up the snapshots of all processes, and `scrape` renders them.
"""
