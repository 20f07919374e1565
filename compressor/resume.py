"""Stages of a compression on disk, so that an interrupted run resumes: a directory beside the artifact.

A stage's file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from deltastore.errors import StorageFull, UsageError
from deltastore.format.matrix import MatrixDelta, SignPlane
from deltastore.memory import is_out_of_memory

SUFFIX = ".progress"
INPUTS = "inputs.json"
STATE_FORMAT = 3  # of the stages' files; raised by every change of names or contents that a resumed run reads
CHECKSUM = "checksum"  # the key under which a file holds the CRC-32 of its content
PLANE = ("signs", "in_features", "gain", "scale_out", "scale_in")  # the fields of a SignPlane, in their order
FULL_BYTES = 1 << 20  # with less free, a failed write is reported as a full disk


class CheckpointStore:
    """The finished stages of one run, by name."""

    def __init__(self, out: Path, inputs: Mapping[str, Any], *, resume: bool) -> None:
        """Start empty, or resume the stages that a run of the same inputs left for `out`.

        Another run's stages are removed only when this one saves its first, so that a mistaken command loses nothing.

        Raises:
            UsageError: the directory was left by a run of other inputs or another state format, or is not a checkpoint
                store.
        """
        self.directory = out.with_name(out.name + SUFFIX)
        stored = {"state_format": STATE_FORMAT, **inputs}
        self._inputs = json.dumps(stored, sort_keys=True, default=str).encode()
        self._check_directory()
        self._is_other_run = not resume or not (self.directory / INPUTS).is_file()
        if not self._is_other_run and (self.directory / INPUTS).read_bytes() != self._inputs:
            raise UsageError(
                f"{self.directory}: it was left by a run with other inputs or settings: give the same ones, or leave "
                "`resume` away to begin anew"
            )

    def discard(self) -> None:
        """Remove every stage."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)

    @property
    def is_begun(self) -> bool:
        """True if this run has stages to resume."""
        return not self._is_other_run and self.directory.is_dir()

    def load(self, stage: str) -> Any:
        """Return the state of a stage: tensors and numbers in dicts, lists and tuples.

        None if the stage has not ended, or if its file is damaged: compute it again.
        """
        path = self.directory / f"{stage}.pt"
        if self._is_other_run or not path.is_file():
            return None
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            if is_out_of_memory(error):
                raise
            loaded = None
        if isinstance(loaded, dict) and loaded.get(CHECKSUM) == checksum(loaded.get(stage)):
            return loaded[stage]
        # A power loss tears files that were written and not yet on the disk.
        print(f"{path}: it is damaged: this stage is computed again", file=sys.stderr)
        return None

    def save(self, stage: str, state: Any) -> None:
        noted = {stage: state, CHECKSUM: checksum(state)}
        self._keep(f"{stage}.pt", lambda path: torch.save(noted, path))

    def load_matrices(self, stage: str) -> dict[str, FittedMatrix] | None:
        """Return the fitted matrices of a stage by name; None as `load` does."""
        state = self.load(stage)
        return None if state is None else matrices_of(state)

    def save_matrices(self, stage: str, matrices: Mapping[str, FittedMatrix]) -> None:
        self.save(stage, state_of(matrices))

    def _check_directory(self) -> None:
        """Refuse a directory of that name that no run made, because it would be removed."""
        if not os.path.lexists(self.directory):
            return
        is_directory = self.directory.is_dir() and not self.directory.is_symlink()
        # A run may have ended before its first file was whole.
        is_store = is_directory and (
            (self.directory / INPUTS).is_file() or set(os.listdir(self.directory)) <= {f".{INPUTS}"}
        )
        if not is_store:
            raise UsageError(
                f"{self.directory}: progress would be kept there, and this is none: move it away, or choose another "
                "`out`"
            )

    def _keep(self, filename: str, write: Callable[[Path], object]) -> None:
        partial = self.directory / f".{filename}"
        try:
            if self._is_other_run:
                self.discard()
                self._is_other_run = False
            if not self.is_begun:
                self.directory.mkdir()
                self._keep(INPUTS, self._write_inputs)
            write(partial)
            os.replace(partial, self.directory / filename)
        except OSError as error:
            raise self._full(error.strerror or str(error)) from error
        # What torch raises for a full disk.
        except RuntimeError as error:
            if shutil.disk_usage(self.directory).free > FULL_BYTES:
                raise
            raise self._full("no space left") from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()

    def _write_inputs(self, path: Path) -> None:
        # On the disk before any stage: without them no stage can be resumed.
        with path.open("wb") as opened:
            opened.write(self._inputs)
            opened.flush()
            os.fsync(opened.fileno())

    def _full(self, reason: str) -> StorageFull:
        return StorageFull(
            f"{self.directory}: {reason}: free some space for what is done so far and run again with `resume=True`"
        )


@dataclass(frozen=True, slots=True, eq=False)
class FittedMatrix:
    """A matrix's delta at one bit per weight, and the upgrades that spare bytes can replace it with."""

    delta: MatrixDelta
    upgrades: Sequence[MatrixDelta] = ()


@contextmanager
def open_checkpoint_store(out: Path, inputs: Mapping[str, Any], *, resume: bool) -> Iterator[CheckpointStore]:
    """Open the store for `out`; if the block fails after a stage was saved, note in the error how to resume."""
    store = CheckpointStore(out, inputs, resume=resume)
    try:
        yield store
    except BaseException as error:
        if store.is_begun:
            error.add_note(f"{store.directory} keeps what is done so far: go on with `resume=True`")
        raise


def checksum(value: Any, start: int = 0) -> int:
    """Return the CRC-32 of a nested value of tensors and numbers: dtypes, shapes and bytes, on any device."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(flat.numpy().data, checksum((str(value.dtype), *value.shape), start))
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return checksum([part for item in items for part in item], start)
    if isinstance(value, (list, tuple)):
        for part in value:
            start = checksum(part, start)
        return start
    return zlib.crc32(repr(value).encode(), start)


def state_of(matrices: Mapping[str, FittedMatrix]) -> dict[str, Any]:
    """Return deltas and upgrades by name as tensors in plain containers; `matrices_of` is the inverse."""
    return {
        name: [
            (
                [tuple(getattr(plane, part) for part in PLANE) for plane in delta.planes],
                delta.left,
                delta.right,
            )
            for delta in (matrix.delta, *matrix.upgrades)
        ]
        for name, matrix in matrices.items()
    }


def matrices_of(state: Mapping[str, Any]) -> dict[str, FittedMatrix]:
    """Return the matrices whose state `state_of` returned."""
    found = {}
    for name, parts in state.items():
        delta, *upgrades = (
            MatrixDelta(tuple(SignPlane(*plane) for plane in planes), left, right)
            for planes, left, right in parts
        )
        found[name] = FittedMatrix(delta, upgrades)
    return found
