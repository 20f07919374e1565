"""Artifacts on their way into the registry: their checks, and the directories that they may be published from."""
