"""Deltas on the device: loading them into slots, and applying them in a model's layers to a mixed batch."""
