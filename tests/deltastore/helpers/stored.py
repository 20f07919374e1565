"""A registry with artifacts of several chunks, and ways to damage them."""

from __future__ import annotations

from pathlib import Path

import torch

from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.manifest import Manifest, TensorSpec
from deltastore.registry import Registry
from deltastore.registry.records import ArtifactFacts, VersionRecord

EMBEDDING = "model.embed_tokens.weight"
ROWS, WIDTH = 1500, 1000


def write_stored(path: Path, files: dict[str, bytes]) -> None:
    """Write an artifact whose embedding, stored whole, fills most of the first chunk; files follow it."""
    generator = torch.Generator().manual_seed(len(files))
    with ArtifactWriter(path) as writer:
        writer.add_whole(EMBEDDING, torch.randn(ROWS, WIDTH, generator=generator).half())
        for filename, content in files.items():
            writer.add_file(filename, content)
        manifest = Manifest(
            base_id="tiny",
            base_fingerprint="5f" * 32,
            method="per-axis",
            tied=True,
            device_bytes=writer.device_bytes,
            config={},
            tensors={EMBEDDING: TensorSpec(codec="whole", shape=[ROWS, WIDTH])},
            # In another order than in the file.
            files=sorted(files, reverse=True),
            compressor={},
            fidelity={},
        )
        writer.finish(manifest)


def publish_file(registry: Registry, path: Path, name: str = "a", tenant: str = "default") -> VersionRecord:
    """Publish an artifact as an upload does after its checks."""
    with Artifact.open(path) as artifact, registry.open_upload(None) as upload:
        facts = ArtifactFacts(
            artifact.header.data_start,
            artifact.manifest.device_bytes,
            artifact.manifest.base_fingerprint,
            artifact.manifest.method,
        )
        upload.write(path.read_bytes())
        return registry.publish(upload.seal(), facts, tenant=tenant, name=name).record


def flip_byte(path: Path, position: int) -> None:
    """Change one byte of a file in place."""
    with path.open("r+b") as file:
        file.seek(position)
        old = file.read(1)
        file.seek(position)
        file.write(bytes([old[0] ^ 1]))
