"""Run a decoder one block at a time."""
