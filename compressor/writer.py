"""Write one delta: its tensors, side files and manifest into an artifact.

Both `peraxis compress` and `peraxis import` end here. This file owns the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.codec import Map, workers
from compressor.config import Method
from deltastore.architecture import POSITIONS
from deltastore.base import Base
from deltastore.console import byte_progress, rounded
from deltastore.format.artifact import ArtifactWriter
from deltastore.format.manifest import Manifest, TensorSpec
from deltastore.format.matrix import MatrixDelta, StackDelta


@dataclass(frozen=True, slots=True, eq=False)
class CodedMatrix:
    """A matrix or a stack of experts at one bit per weight, with its record for the manifest."""

    delta: MatrixDelta | StackDelta
    spec: TensorSpec
    added_rows: Tensor | None = None  # [rows, in]: rows that the base lacks, in the fine-tune's dtype
    squared_norm: float = 0.0  # of the difference from the base; 0 where it was not measured
    squared_error: float = 0.0  # of that difference less the delta


@dataclass(frozen=True, slots=True, eq=False)
class DeltaTensor:
    """One tensor of the fine-tune that a delta may carry."""

    name: str
    num_bytes: int  # that `content` reads, for the progress bar
    # Coded, whole, or None where the tensor equals the base's. Called once, so that one tensor is in memory at a time,
    # with a parallel map for its row blocks.
    content: Callable[[Map], CodedMatrix | Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class DeltaContents:
    """Everything that goes into one artifact."""

    base: Base
    method: Method
    tied: bool  # the output head is the input embedding
    tensors: Sequence[DeltaTensor]  # in layer order
    files: Mapping[str, bytes]  # the fine-tune's tokenizer, chat template and generation config
    settings: Mapping[str, Any]  # that the delta was made with
    max_positions: int | None = None  # tokens of the fine-tune's longest context; None: as the base's
    num_sequences: int | None = None  # of calibration text; None where there was none
    fidelity: Mapping[str, Any] = field(default_factory=dict)  # measured so far; `weight_error` is added


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """An artifact on disk, as the file alone tells."""

    out: Path
    digest: str  # SHA-256, 64 hex digits
    artifact_bytes: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class WrittenDelta(DeltaFile):
    """An artifact on disk, and the fine-tune that it was made from."""

    full_bytes: int  # of the fine-tune at 16 bits
    num_unchanged: int  # tensors that the fine-tune shares with its base

    @property
    def ratio(self) -> float:
        """Bytes of the fine-tune at 16 bits over bytes of the artifact."""
        return self.full_bytes / self.artifact_bytes

    def as_json(self) -> dict[str, Any]:
        specs = self.manifest.tensors.items()
        return {
            "out": str(self.out),
            "digest": f"sha256:{self.digest}",
            "artifact_bytes": self.artifact_bytes,
            "device_bytes": self.manifest.device_bytes,
            "full_bytes": self.full_bytes,
            "ratio": self.ratio,
            "fidelity": self.manifest.fidelity,
            "num_unchanged": self.num_unchanged,
            "tensors": {name: spec.model_dump(exclude_defaults=True) for name, spec in specs},
        }


def write_delta(contents: DeltaContents, writer: ArtifactWriter, *, progress: bool) -> tuple[Manifest, str]:
    """Write every tensor and file of `contents` and then the manifest.

    The manifest holds no paths and no times, so the same contents give the same bytes.

    Returns:
        The manifest, and the artifact's SHA-256 as 64 hex digits.

    Raises:
        CheckpointError: a tensor's content cannot be carried by a delta.
        StorageFull: the disk is full.
    """
    specs: dict[str, TensorSpec] = {}
    squared_norm, squared_error = 0.0, 0.0
    num_bytes = sum(tensor.num_bytes for tensor in contents.tensors)
    with byte_progress(num_bytes, writer.path.name, progress) as bar, workers() as each:
        for tensor in contents.tensors:
            content = tensor.content(each)
            if isinstance(content, CodedMatrix):
                if isinstance(content.delta, StackDelta):
                    writer.add_stack(tensor.name, content.delta)
                else:
                    writer.add_onebit(tensor.name, content.delta, content.added_rows)
                specs[tensor.name] = content.spec
                squared_norm += content.squared_norm
                squared_error += content.squared_error
            elif content is not None:
                writer.add_whole(tensor.name, content)
                specs[tensor.name] = TensorSpec(codec="whole", shape=list(content.shape))
            # Before the next tensor is read.
            del content
            bar.update(tensor.num_bytes)
    device_bytes = writer.device_bytes
    for name, file in contents.files.items():
        writer.add_file(name, file)
    measured = {"weight_error": rounded(math.sqrt(squared_error / squared_norm))} if squared_norm else {}
    manifest = _manifest(contents, specs, device_bytes, measured)
    return manifest, writer.finish(manifest)


def _manifest(
    contents: DeltaContents,
    specs: dict[str, TensorSpec],
    device_bytes: int,
    measured: Mapping[str, float],
) -> Manifest:
    compressor: dict[str, Any] = {"version": version("peraxis"), "settings": dict(contents.settings)}
    if contents.num_sequences is not None:
        compressor["num_sequences"] = contents.num_sequences
    positions = {} if contents.max_positions is None else {POSITIONS: contents.max_positions}
    return Manifest(
        base_id=contents.base.id,
        base_fingerprint=contents.base.fingerprint,
        method=contents.method,
        tied=contents.tied,
        device_bytes=device_bytes,
        config={**contents.base.config, **positions},
        tensors=specs,
        files=list(contents.files),
        compressor=compressor,
        fidelity={**contents.fidelity, **measured},
    )
