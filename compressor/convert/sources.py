"""The source files of the merge kernel, as they were before it was imported."""

from __future__ import annotations

from pathlib import Path

from deltastore.compiled.sources import Sources

SOURCES = Sources.of(Path(__file__).parent)
