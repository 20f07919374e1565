"""Metrics of the service: counted in every process, added up in one, rendered where a scrape is answered.

`EngineMetrics` and `FrontendMetrics` count in plain values. Their snapshots are sent to the process with the shared
state, where `Aggregator` adds them up; `compose` renders them.
"""
