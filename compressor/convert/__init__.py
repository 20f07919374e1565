"""Convert between deltas and other files: merged checkpoints and others' one-bit formats."""

# `sources` is imported before the kernel: it reads the files that the kernel's code is of.
from compressor.convert import sources  # noqa: F401
