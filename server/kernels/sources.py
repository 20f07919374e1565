"""The source files of the CPU kernels, as they were before any kernel was imported."""

from __future__ import annotations

from pathlib import Path

from deltastore.compiled.sources import Sources

SOURCES = Sources.of(Path(__file__).parent)
