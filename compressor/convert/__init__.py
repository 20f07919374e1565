"""Convert between deltas and other files: merged checkpoints and others' one-bit formats."""

from __future__ import annotations

from pathlib import Path

from deltastore.compiled.sources import Sources

# Read here, before the merge kernel is imported: these are the files that the kernel's code is of.
SOURCES = Sources.of(Path(__file__).parent)
