"""Artifacts on their way into the registry: their checks, and the sources that a server fetches from."""
