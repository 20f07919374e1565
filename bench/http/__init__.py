"""Measures HTTP beside the bare engine: `python -m bench.http`."""
