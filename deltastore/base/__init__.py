"""The base checkpoint: its tensors, shapes and fingerprint."""
