"""The report of a compression: what it shows, and its files in a directory: one page and its figures as images.

Everything is taken from the artifact and from what is handed in; no model runs here.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from compressor.evaluate.examples import Example
from compressor.io.pairs import pair_up
from compressor.report_tensors import CarriedTensor
from deltastore.base.checkpoint import Checkpoint
from deltastore.errors import StorageFull, UsageError
from deltastore.format.artifact import Artifact
from deltastore.format.manifest import Manifest
from deltastore.format.plan import FP16_BYTES
from deltastore.format.sizes import KINDS, files_bytes

PAGE = "report.html"
FIGURES = ("size", "axis_counts", "error")
FILES = (*(f"{figure}.png" for figure in FIGURES), PAGE)
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Report:
    """What a report tells."""

    name: str  # of the artifact's file
    finetune_id: str  # what people call the fine-tune; empty where that is not known
    digest: str  # SHA-256, 64 hex digits
    size_bytes: int
    full_bytes: int  # of the fine-tune at 16 bits
    num_unchanged: int  # tensors that the fine-tune shares with its base
    manifest: Manifest
    tensors: tuple[CarriedTensor, ...]
    sizes: Mapping[str, int]  # bytes by `KINDS`, and `overhead`: header and padding
    examples: tuple[Example, ...]

    @classmethod
    def of(
        cls,
        base: Checkpoint,
        finetune: Checkpoint,
        artifact: Artifact,
        examples: Sequence[Example],
        finetune_id: str = "",
    ) -> Report:
        """The report of a finished artifact, which is read once for its digest."""
        pairs, names = pair_up(base, finetune), artifact.manifest.tensors
        tensors = tuple(CarriedTensor.of(artifact, name) for name in names)
        sizes = {kind: sum(tensor.sizes.get(kind, 0) for tensor in tensors) for kind in KINDS}
        sizes["files"] = files_bytes(artifact)
        sizes["overhead"] = artifact.size_bytes - sum(sizes.values())
        return cls(
            name=artifact.path.name,
            finetune_id=finetune_id,
            digest=artifact.digest(),
            size_bytes=artifact.size_bytes,
            full_bytes=FP16_BYTES * pairs.num_weights,
            num_unchanged=len(pairs.tensors) - len(names),
            manifest=artifact.manifest,
            tensors=tensors,
            sizes=sizes,
            examples=tuple(examples),
        )

    @property
    def ratio(self) -> float:
        """How many times smaller than the fine-tune at 16 bits."""
        return self.full_bytes / self.size_bytes


def check_report(directory: Path) -> None:
    """Check that a report can be written, before any work is done for it. Leaves nothing behind.

    Raises:
        UsageError: figures cannot be drawn because matplotlib is not installed; no directory, or none that can be
            written to.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(f"--report {directory}: its figures need matplotlib: pip install 'peraxis[report]'")
    place = directory
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise UsageError(
            f"--report {directory}: {place} is no directory: choose another, or a name for a new one"
        )
    if taken := [name for name in FILES if (directory / name).is_dir()]:
        raise UsageError(f"--report {directory}: {taken[0]} in it is a directory: choose another --report")
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise UsageError(
            f"--report {directory}: {place}: {error.strerror}: choose another --report"
        ) from error


def write_report(directory: Path, report: Report) -> None:
    """Write `report.html` and its figures, in place of those of an older report; other files stay as they are.

    The same report gives the same bytes. A figure that has nothing to show is not there.

    Raises:
        StorageFull: no room in `directory`.
        UsageError: as `check_report`.
    """
    check_report(directory)
    from compressor.report_page import figures_of, page  # bring matplotlib, which takes a second

    figures = figures_of(report)
    files = {f"{name}.png": figure.light.data for name, figure in figures.items()}
    files[PAGE] = page(report, figures).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _replace(directory, files)
    except OSError as error:
        kind = StorageFull if error.errno in FULL else UsageError
        raise kind(
            f"--report {directory}: {error.strerror}: free some space there or choose another --report"
        ) from error


def _replace(directory: Path, files: Mapping[str, bytes]) -> None:
    """All contents are on the disk before the first name changes."""
    partial: dict[str, str] = {}
    try:
        for name, content in files.items():
            descriptor, partial[name] = tempfile.mkstemp(dir=directory, prefix=f".{name}.")
            with os.fdopen(descriptor, "wb") as out:
                out.write(content)
                os.fchmod(out.fileno(), 0o644)
                out.flush()
                os.fsync(out.fileno())
        for name, path in partial.items():
            os.replace(path, directory / name)
        for name in set(FILES) - files.keys():
            (directory / name).unlink(missing_ok=True)  # an older report's, of which the page knows nothing
    finally:
        for path in partial.values():
            Path(path).unlink(missing_ok=True)
