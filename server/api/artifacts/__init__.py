"""Artifacts over HTTP: uploads with their checks, and downloads."""
