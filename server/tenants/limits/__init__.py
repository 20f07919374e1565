"""Limits per tenant, counted in one process of a server: the supervisor, or the only one with `--engine inline`."""
