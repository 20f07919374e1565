"""Deltas on the device: which are in slots, and how a model's layers apply them to a mixed batch."""
