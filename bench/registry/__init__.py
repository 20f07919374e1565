"""Benches of the registry: a thousand variants that are served, and questions about many versions."""
