"""Convert between deltas and other files: merged checkpoints and others' one-bit formats."""
