"""Models, deltas and files that both source trees get."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.server.helpers.live_server import Artifacts, make_artifacts

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 100


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """Artifacts, and the files that are made from them."""

    artifacts: Artifacts
    finetune: Path
    broken: Path  # an artifact with a changed header
    text: Path
    sources: Path  # a directory that tenants may publish from


def make_inputs(directory: Path) -> ReplayInputs:
    artifacts = make_artifacts(directory)
    broken = directory / "broken.safetensors"
    content = bytearray(artifacts.plain.read_bytes())
    content[20:24] = b"\xff\xff\xff\xff"
    broken.write_bytes(content)
    text = directory / "text.txt"
    text.write_text(TEXT)
    sources = directory / "sources"
    sources.mkdir()
    shutil.copy(artifacts.third, sources / "third.safetensors")
    shutil.copy(artifacts.foreign, sources / "foreign.safetensors")
    finetunes = sorted((directory / "models").glob("finetune*"))
    return ReplayInputs(artifacts, finetunes[0], broken, text, sources)
