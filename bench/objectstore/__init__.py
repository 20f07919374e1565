"""Loads of a delta from a local S3 server: `python -m bench.objectstore`."""
